"""A small run of `data_prep rmir`: one drawing of each concept of the shipped library, thumbnails and hashing as encoders."""

from collections.abc import Callable
from pathlib import Path

from PIL import Image

from data_prep.rmir import frames, oracle
from data_prep.rmir.config import (
    EncoderConfig,
    GenerateConfig,
    LibraryConfig,
    RetrieveConfig,
    RmirConfig,
    load_config,
)
from data_prep.rmir.pictures.encoders import HashingEncoder
from data_prep.rmir.pictures.library import look
from data_prep.rmir.run import Run
from rge.calls.model_config import ModelConfig


def config_of(out: Path, library: Path | str, url: str = "http://host/v1") -> RmirConfig:
    models = {name: ModelConfig(name=name, base_url=url, concurrency=8) for name in ("writer", "judge")}
    config = RmirConfig(
        out=str(out),
        library=LibraryConfig(path=str(library)),
        image_encoder=EncoderConfig("pixels", None),
        caption_encoder=EncoderConfig("hashing", None),
        models=models,
        generate=GenerateConfig(max_inputs=6),
        retrieve=RetrieveConfig(by_image=4, by_caption=3),
    )
    config.seed.clusters, config.seed.per_cluster = 12, 30
    return config


class Seer(HashingEncoder):
    """Stands for an encoder that sees in a picture what its caption says."""

    def __init__(self, captions: dict[str, str]):
        self.captions = captions  # by the name of the file, without its ending

    def pictures(self, refs):
        return self.texts([self.captions[Path(ref).stem] for ref in refs])


def one_family(path: Path) -> None:
    """A library of one drawing a concept, so that few pictures hold many answers."""
    oracle.write_library(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *(line for line in lines if line.startswith("noto/"))]) + "\n")


def table_of(run: Run, stage: str, name: str, schema: str, rows: list[dict]) -> None:
    whole = [{key: row.get(key) for key in frames.SCHEMAS[schema].names} for row in rows]
    frames.write_rows(run.path(stage, name), whole)


YES, NO, NEITHER = (["true"] * 5, ["false"] * 5, ["abstain"] * 5)
VOTES = {
    "q1": {"a": YES, "b": YES, "c": NO},
    "q2": {"b": [*YES[:4], "false"], "d": YES},
    "q3": {"c": NEITHER, "e": NO},
}
"""q1: a kept, b kept, c rejected.  q2: b doubted (4 of 5), d kept.  q3: c abstained, e rejected: no answer at all."""


def made(
    tmp_path: Path,
    called: Callable[[str], str] = str,
    *,
    votes: dict[str, dict[str, list[str]]] = VOTES,
    inputs: dict[str, str] | None = None,
) -> Run:
    """Six images and what a panel of five said; every list is found by the image index in this order.

    Args:
        tmp_path: where ``out`` and the pictures go.
        called: name of an image or query.
        votes: by query and candidate.
        inputs: picture that a query is about, where it is not `in`.
    """
    config = load_config(
        ["config=demo", f"out={tmp_path / 'out'}", f"library.path={tmp_path}", "split.tsr_threshold=0.9"]
    )
    run = Run(config, progress=False)
    images = []
    for number, name in enumerate(["in", "a", "b", "c", "d", "e"]):
        path = tmp_path / f"{name}.png"
        Image.new("RGB", (40, 40), (number * 20, 0, 0)).save(path)
        images.append({"id": called(name), "ref": str(path), "sha256": look(str(path), 1)["sha256"]})
    table_of(run, "seed", "images.parquet", "images", images)
    queries = [
        {
            "query_id": called(name),
            "image_id": called((inputs or {}).get(name, "in")),
            "category": "causal",
            "query": f"{name}?",
            "target_desc": "t",
            "reasoning": "r",
        }
        for name in votes
    ]
    table_of(run, "generate", "queries/part-00000.parquet", "queries", queries)
    triplets, judgements = [], []
    for query, candidates in votes.items():
        query = called(query)
        for rank, (candidate, verdicts) in enumerate(candidates.items(), start=1):
            candidate = called(candidate)
            triplets.append(
                {
                    "query_id": query,
                    "candidate_id": candidate,
                    "position": rank - 1,
                    "image_rank": rank,
                    "found_by": ["image"],
                }
            )
            judgements += [
                {"query_id": query, "candidate_id": candidate, "sample": sample, "verdict": verdict}
                for sample, verdict in enumerate(verdicts)
            ]
    table_of(run, "retrieve", "triplets.parquet", "triplets", triplets)
    table_of(run, "judge", "judgements/part-00000.parquet", "judgements", judgements)
    return run
