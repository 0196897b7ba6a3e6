"""A retrieval set and an encoder small enough to reason about, with the interfaces of the real ones."""

import hashlib
import io
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rge.checkpoints.settings import Settings
from rge.common.images import picture_bytes
from rge.common.schema import Encoded
from rge.embedders.common import ThirdParty
from rge.identity.set_fingerprint import set_fingerprint

DIM = 16
NUM_QUERIES, NUM_CANDIDATES = 24, 60


def picture(number: int) -> bytes:
    """A 4 x 4 PNG that differs for every number."""
    colour = (number * 37 % 256, number * 101 % 256, number // 7 % 256)
    image = Image.new("RGB", (4, 4), colour)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def write_tables(path: Path, tables: dict, meta: dict | None = None) -> Path:
    """Write ``{table: {column: values or Arrow array}}`` as a set, with a fingerprint that fits."""
    path.mkdir(parents=True, exist_ok=True)
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), path / f"{name}.parquet")

    def pairs(name):
        columns = tables.get(name)
        return list(zip(columns["query-id"], columns["corpus-id"], strict=True)) if columns else ()

    rows = tables["qrels"]
    fingerprint = set_fingerprint(
        tables["queries"]["id"],
        tables["corpus"]["id"],
        zip(rows["query-id"], rows["corpus-id"], rows["score"], strict=True),
        **{name: pairs(name) for name in ("negatives", "excluded", "candidates")},
    )
    meta = {"name": "fake", "split": "test", "licence": "CC0-1.0", "fingerprint": fingerprint} | (meta or {})
    (path / "meta.json").write_text(json.dumps(meta))
    return path


def tables(
    num_queries: int = NUM_QUERIES, num_candidates: int = NUM_CANDIDATES, *, negatives: bool = True
) -> dict:
    """Queries ``q00`` ... with 1 to 3 positives; two queries share a picture and a group."""
    rng = np.random.default_rng(0)
    ids = [f"c{number:03d}" for number in rng.permutation(num_candidates)]
    kinds = ("functional", "temporal", "causal")
    query_ids = [f"q{number:02d}" for number in range(num_queries)]
    qrels: dict = {"query-id": [], "corpus-id": [], "score": []}
    hard: dict = {"query-id": [], "corpus-id": []}
    for number, query in enumerate(query_ids):
        chosen = rng.choice(num_candidates, 5, replace=False)
        for place in range(number % 3 + 1):
            qrels["query-id"].append(query)
            qrels["corpus-id"].append(f"c{chosen[place]:03d}")
            qrels["score"].append(place + 1)
        for place in range(3, 5):
            hard["query-id"].append(query)
            hard["corpus-id"].append(f"c{chosen[place]:03d}")
    out = {
        "corpus": {
            "id": ids,
            "image": [picture(int(name[1:])) for name in ids],
            "text": [None] * num_candidates,
        },
        "queries": {
            "id": query_ids,
            "text": [f"question {number}" for number in range(num_queries)],
            "image": [[picture(1000 + number // 2)] for number in range(num_queries)],
            "category": [kinds[number % 3] for number in range(num_queries)],
            "group": [f"g{number // 2:02d}" for number in range(num_queries)],
            "instruction": ["Find the picture."] * num_queries,
            "pair": ["seen" if number % 4 else "held_out" for number in range(num_queries)],
        },
        "qrels": qrels,
    }
    return out | ({"negatives": hard} if negatives else {})


def write_set(path: Path, **options) -> Path:
    """The set of `tables`, reported by category and pair."""
    return write_tables(path, tables(**options), {"report_by": ["pair"]})


class FakeEncoder(ThirdParty):
    """Embeds content by hash; a rationale moves the query, so that modes differ."""

    def __init__(self, checkpoint="fake", *, skill: float = 0.0, decides: bool = False, **settings):
        self.checkpoint, self.skill, self.decides = Path(checkpoint), skill, decides
        self.checkpoint_hash = hashlib.sha256(f"{checkpoint}{skill}".encode()).hexdigest()
        asked = {
            "profile": "rge",
            "dtype": "float32",
            "generation": {"max_new_tokens": 8, "temperature": 0.0},
        }
        self.settings = Settings.model_validate(asked | settings)
        self.calls: list[tuple[str, str, int]] = []
        self.seen: list[str] = []

    def vector(self, *parts: object) -> np.ndarray:
        seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8])
        x = np.random.default_rng(seed).standard_normal(DIM)
        return x / np.linalg.norm(x)

    def with_(self, *, max_rationale_tokens=None, **settings):
        other = super().with_(**settings)
        other.settings = other.settings.asking(max_rationale_tokens=max_rationale_tokens)
        return other

    def encode(self, items, *, side, mode, batch_size=64, seeds=None, on_progress=None):
        self.calls.append((side, mode, len(items)))
        self.seen += [item.id for item in items]
        rows, silent = [], []
        cap = self.settings.generation.max_rationale_tokens
        cap = math.inf if cap is None else cap
        for number, item in enumerate(items):
            free = self.decides and not self.settings.generation.min_new_tokens
            silent.append(mode == "reasoning" and free and int(item.id[1:]) % 3 == 0)
            content = (
                item.text,
                item.instruction,
                [hashlib.sha256(picture_bytes(ref)).digest() for ref in item.pictures],
            )
            silent[-1] |= mode == "reasoning" and cap == 0
            asked = "direct" if silent[-1] else mode if 3 + number % 5 < cap else f"{mode} to {cap}"
            extra = (asked, None if seeds is None else seeds[number]) if side == "query" else ()
            rows.append(self.vector(content, *extra))
        if on_progress is not None:
            on_progress(len(items))
        reasons = mode == "reasoning"
        num = len(items)
        tokens = [0 if not reasons or silent[n] else min(3 + n % 5, cap) for n in range(num)]
        return Encoded(
            embeddings=np.stack(rows).astype(np.float32),
            rationales=[f"because of {item.id}" if reasons else "" for item in items],
            num_rationale_tokens=np.array(tokens, np.int64),
            stop_reasons=[
                ("forced" if n % 4 == 0 else "emb") if reasons else "prefilled" for n in range(num)
            ],
            generate_ms=np.full(num, 2.0 if reasons else 0.0),
            embed_ms=np.full(num, 1.0),
        )


def loader(encoder: FakeEncoder, **asked):
    """Stands for `rge.embedders.registry.ModelOptions.loader`; ``asked``: `temperature` or `max_new_tokens` of the options."""
    encoder.settings = encoder.settings.asking(**asked)
    return lambda: encoder
