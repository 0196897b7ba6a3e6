"""The stages: each reads the tables of those before it, writes its own, and returns what it counted.

Source: RMIR, section 3.1. Differs: where the paper is silent the choice is a setting; see docs/data_prep.md.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.rmir import arithmetic as maths
from data_prep.rmir import frames, prompts
from data_prep.rmir.config import ConfigError, EncoderConfig
from data_prep.rmir.pictures.cluster import embed_on_ray
from data_prep.rmir.pictures.download import resolve
from data_prep.rmir.pictures.encoders import ImageEncoder, TextEncoder, bridged, image_encoder, text_encoder
from data_prep.rmir.pictures.formats import LibraryError
from data_prep.rmir.pictures.library import DUPLICATE, NEAR_DUPLICATE, Library, blocks, fetched, inspect
from data_prep.rmir.pictures.near_duplicates import near_duplicates
from data_prep.rmir.results.audit import audit
from data_prep.rmir.results.export import export
from data_prep.rmir.run import Run, reasons
from data_prep.rmir.wording import wording
from rge.calls.caller import Outcome
from rge.calls.model_config import known_as
from rge.calls.replies import Refused, Reply, ReplyError
from rge.calls.request import Request
from rge.common.files import replacing, write_bytes
from rge.common.schema import ImageRef, safe_id

Rows = list[dict[str, Any]]
QUERIES_A_GROUP = 1000
"""Queries whose candidates are written at once."""


def seed(run: Run) -> dict[str, Any]:
    """Inspect and embed the library, cluster it, and sample some pictures of each cluster."""
    config = run.config
    library = Library(config.library)
    encoder = image_encoder(config.image_encoder)
    tables, vectors = look_through(run, library, encoder)
    table = pa.concat_tables(tables)
    del tables
    usable_N = pc.is_null(table["reason"]).to_numpy()
    if not usable_N.any():
        raise ConfigError(
            f"library.path {config.library.path}: none of {len(table)} pictures can be used: "
            f"{reasons(table.select(['reason']).to_pylist())}"
        )
    bad: Rows = table.filter(pa.array(~usable_N)).select(["id", "reason", "ref"]).to_pylist()
    good = table.filter(pa.array(usable_N))
    repeated_N = good["sha256"].to_pandas().duplicated().to_numpy()
    bad += [
        {**row, "reason": DUPLICATE}
        for row in good.filter(pa.array(repeated_N)).select(["id", "ref"]).to_pylist()
    ]
    unique = np.flatnonzero(~repeated_N)
    if config.library.near_duplicates is not None:
        some = good.take(unique)
        repeats = near_duplicates(some["phash"].to_pylist(), config.library.near_duplicates)
        names = some["id"].to_pylist()
        bad += [
            {"id": name, "reason": NEAR_DUPLICATE, "ref": f"repeats {names[of]}"}
            for name, of in zip(names, repeats, strict=True)
            if of is not None
        ]
        unique = unique[[of is None for of in repeats]]
    vectors_ND = gather(vectors, unique)
    cluster_N = cluster(vectors_ND, config.seed.clusters, config.seed.iterations, config.seed.seed)
    chosen = sample_clusters(cluster_N, config.seed.per_cluster, config.seed.seed)
    columns = ["id", "ref", "caption", "sha256", "width", "height", "phash"]
    images = good.take(unique[chosen]).select(columns).to_pylist()
    for image, number in zip(images, cluster_N[chosen].tolist(), strict=True):
        image["cluster"] = number
    keep_pictures(run, library, images)
    _save(run.path("seed", "images.npy"), vectors_ND[chosen])
    captions = [image["caption"] for image in images if image["caption"]]
    captioner = text_encoder(config.caption_encoder)
    _save(run.path("seed", "captions.npy"), embed_captions(captioner, captions))
    frames.write_rows(
        run.path("seed", "rejected.parquet"),
        "rejected",
        [{"id": row["id"], "reason": row["reason"], "detail": row["ref"], "key": None} for row in bad],
    )
    frames.write_rows(run.path("seed", "images.parquet"), "images", images)
    return {
        "listed": len(table),
        "usable": len(unique),
        "seed": len(images),
        "with_caption": len(captions),
        "rejected": reasons(bad),
        "encoders": {"images": encoder.name, "captions": captioner.name},
    }


def look_through(
    run: Run, library: Library, encoder: ImageEncoder
) -> tuple[list[pa.Table], list[np.ndarray]]:
    """Inspect and embed the library a block at a time; while one is embedded the next is fetched and decoded.

    Args:
        run: keeps each block as a part; those that are there are not done again.
        library: read once.
        encoder: of pictures.

    Returns:
        Of each part the table ``inspected``, and the vectors of its good pictures, mapped from the disk: the parts and the
        whole are not in memory together.

    Raises:
        LibraryError: the library cannot be read, or an id occurs twice.
    """
    config, folder = run.config, run.path("seed", "inspected")
    tables: list[pa.Table] = []
    vectors: list[np.ndarray] = []
    seen: set[bytes] = set()

    def part(number: int) -> Path:
        return folder / f"part-{number:05d}.parquet"

    def finish(number: int) -> None:
        table = frames.read_table(part(number), "inspected")
        for name in table["id"].to_pylist():
            digest = hashlib.blake2b(safe_id(name).encode(), digest_size=8).digest()
            if digest in seen:
                raise LibraryError(
                    f"library.path {config.library.path}: the id {name!r} occurs twice (white space counts as %20; library.id_column; "
                    "null numbers the rows)"
                )
            seen.add(digest)
        tables.append(table)
        if table["reason"].null_count:
            vectors.append(np.load(part(number).with_suffix(".npy"), mmap_mode="r"))

    def prepare(number: int) -> list[ImageRef] | None:
        """Read a block and write its table; the pictures to embed, or None at the end."""
        if (rows := next(todo, None)) is None:
            return None
        there, failed = resolve(rows, run.out / "downloads", config.download, progress=run.progress)
        found = inspect(there, config.library, config.runner)
        reason = [
            failed.get(row["id"]) or why for row, why in zip(rows, found["reason"].to_pylist(), strict=True)
        ]
        place = found.schema.get_field_index("reason")
        found = found.set_column(place, found.schema.field(place), pa.array(reason, pa.string()))
        frames.write_table(part(number), found)
        return [row["data"] or row["ref"] for row, why in zip(there, reason, strict=True) if why is None]

    while part(len(tables)).with_suffix(".npy").is_file() and part(len(tables)).is_file():
        finish(len(tables))
    # Two blocks at once, each as it was read, as a table and as the engine's copy.
    most_bytes = max(1, int(config.library.memory_mb * 2**20 / 6))
    left = fetched(library.rows(sum(map(len, tables))))
    todo = blocks(left, config.library.shard_size, most_bytes)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(prepare, len(tables))
        while (refs := waiting.result()) is not None:
            number = len(tables)
            waiting = beside.submit(prepare, number + 1)
            _save(
                part(number).with_suffix(".npy"),
                embed_pictures(encoder, config.image_encoder, refs, config.runner),
            )
            finish(number)
    return tables, vectors


def keep_pictures(run: Run, library: Library, images: Rows) -> None:
    """Copy the pictures of the seed set that are no files of their own, so that each can be opened by itself.

    Args:
        run: has them under ``seed/pictures``, named by their content.
        library: read once more.
        images: of the seed set; those whose ``ref`` is None get one.

    Raises:
        LibraryError: the library has changed in the meantime.
    """
    missing = {image["id"]: image for image in images if image["ref"] is None}

    def path(image: dict[str, Any]) -> Path:
        return run.path("seed", "pictures") / image["sha256"][:2] / image["sha256"]

    wanted = {name for name, image in missing.items() if not path(image).is_file()}
    if wanted:
        for row in fetched(row for row in library.rows() if row["id"] in wanted):
            image = missing[row["id"]]
            if row["data"] is None or hashlib.sha256(row["data"]).hexdigest() != image["sha256"]:
                break
            write_bytes(path(image), row["data"], sync=False)
            wanted.remove(row["id"])
        os.sync()
    if wanted:
        raise LibraryError(
            f"library.path {run.config.library.path}: picture {min(wanted)!r} has changed since it was inspected; delete "
            f"{run.path('seed')} and run the same command again"
        )
    for image in missing.values():
        image["ref"] = str(path(image))


def embed_pictures(
    encoder: ImageEncoder, config: EncoderConfig, refs: list[ImageRef], runner: str
) -> np.ndarray:
    """(number of pictures, D) float32; on a Ray cluster every worker loads the encoder itself.

    Args:
        encoder: loaded here; used by the native runner.
        config: of the same encoder.
        refs: of the pictures.
        runner: of Daft.
    """
    if not refs:
        return np.empty((0, 0), np.float32)
    if runner == "native":
        return encoder.pictures(refs)
    return embed_on_ray(config, refs)


def gather(parts: list[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Rows of the parts' concatenation, without making it: at the paper's size it is 9.3 GB.

    Args:
        parts: (N_i, D), may be mapped from files.
        rows: ascending.

    Returns:
        (len(rows), D), of the type of the first part.
    """
    starts = np.cumsum([0, *map(len, parts)])
    found = np.empty((len(rows), parts[0].shape[1]), parts[0].dtype)
    for part, start, end in zip(parts, starts[:-1], starts[1:], strict=True):
        first, last = np.searchsorted(rows, [start, end])
        found[first:last] = part[rows[first:last] - start]
    return found


def embed_captions(encoder: TextEncoder, captions: list[str]) -> np.ndarray:
    """(number of captions, D) float32; no captions give no rows."""
    return encoder.texts(captions, query=False) if captions else np.empty((0, 1), np.float32)


def cluster(vectors_ND: np.ndarray, num_clusters: int, iterations: int, seed: int) -> np.ndarray:
    """Cluster of each row, by faiss' k-means.

    Raises:
        ConfigError: more clusters than rows.
    """
    import faiss

    num, width = vectors_ND.shape
    if num_clusters > num:
        raise ConfigError(f"seed.clusters={num_clusters} needs as many pictures at least; {num} can be used")
    means = faiss.Kmeans(
        width,
        num_clusters,
        niter=iterations,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=256,
    )
    means.train(vectors_ND)
    found = [
        means.index.search(vectors_ND[start : start + 65536], 1)[1][:, 0] for start in range(0, num, 65536)
    ]
    return np.concatenate(found)


def sample_clusters(cluster_N: np.ndarray, per_cluster: int, seed: int) -> list[int]:
    """Rows of at most `per_cluster` members of each cluster, drawn at random; ascending."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(cluster_N))
    order = order[np.argsort(cluster_N[order], kind="stable")]
    sorted_N = cluster_N[order]
    starts = np.searchsorted(sorted_N, sorted_N, side="left")
    return sorted(order[np.arange(len(order)) - starts < per_cluster].tolist())


def caption(run: Run) -> dict[str, Any]:
    """A caption of each seed picture that has none in the library (not in the paper, whose library has them all)."""
    config = run.config.caption
    model = str(config.model)
    images = run.rows("seed", "images")
    settings = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    texts = wording(run.config.prompts)

    def readable(reply: Reply) -> None:
        prompts.read_caption(reply, config.max_words)

    def ask(image: dict[str, Any]) -> Iterator[Request]:
        yield prompts.caption_request(model, run.picture(image, model), texts=texts, **settings)

    def rows_of(shard: Sequence[dict[str, Any]], outcomes: Iterator[Outcome]) -> dict[str, Rows]:
        found: dict[str, Rows] = {"captions": [], "rejected": []}
        for image, outcome in zip(shard, outcomes, strict=True):
            try:
                text = prompts.read_caption(outcome.answer(), config.max_words)
            except ReplyError as error:
                found["rejected"].append(_rejected(image["id"], error, outcome.key))
            else:
                found["captions"].append({"id": image["id"], "caption": text, "key": outcome.key})
        return found

    tables = {"captions": "captions", "rejected": "rejected"}
    without = [image for image in images if not image["caption"]]
    run.in_shards("caption", without, tables, requests=ask, read=readable, rows=rows_of)
    captioned = [image for image in run.images() if image["caption"]]
    is_written = np.array([image["caption_by"] != "library" for image in captioned], bool)
    vectors = np.load(run.path("seed", "captions.npy"), mmap_mode="r")
    if is_written.any():
        written = [image["caption"] for image in captioned if image["caption_by"] != "library"]
        written_ND = embed_captions(text_encoder(run.config.caption_encoder), written)
        library_ND, vectors = vectors, np.empty((len(captioned), written_ND.shape[1]), np.float32)
        vectors[is_written] = written_ND
        if not is_written.all():
            vectors[~is_written] = library_ND
    _save(run.caption_vectors(), vectors)
    return {
        "missing": len(without),
        "written": int(is_written.sum()),
        "with_caption": len(captioned),
        "not_written": reasons(run.rows("caption", "rejected")),
    }


def generate(run: Run) -> dict[str, Any]:
    """One question of each category about each input picture, with a description of its target (3.1.1)."""
    config = run.config.generate
    images = run.rows("seed", "images")
    if config.max_inputs is not None and config.max_inputs < len(images):
        rng = np.random.default_rng(run.config.seed.seed)
        images = [
            images[row] for row in sorted(rng.choice(len(images), config.max_inputs, replace=False).tolist())
        ]
    settings = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    texts = wording(run.config.prompts)

    codes = [texts.codes[category] for category in config.categories]

    def readable(reply: Reply) -> None:
        prompts.check_generated(reply, codes, config.max_query_words, config.max_target_words)

    def ask(image: dict[str, Any]) -> Iterator[Request]:
        yield prompts.generate_request(
            config.model,
            run.picture(image, config.model),
            config.categories,
            content_policy=config.content_policy,
            texts=texts,
            **settings,
        )

    def rows_of(shard: Sequence[dict[str, Any]], outcomes: Iterator[Outcome]) -> dict[str, Rows]:
        found: dict[str, Rows] = {"queries": [], "rejected": []}
        for image, outcome in zip(shard, outcomes, strict=True):
            for category, code in zip(config.categories, codes, strict=True):
                name = f"{image['id']}-{code}-1"
                try:
                    read = prompts.read_generated(
                        outcome.answer(), code, config.max_query_words, config.max_target_words
                    )
                except ReplyError as error:
                    found["rejected"].append(_rejected(name, error, outcome.key))
                    continue
                query = {
                    "query_id": name,
                    "image_id": image["id"],
                    "category": category,
                    **read,
                    "key": outcome.key,
                }
                found["queries"].append(query)
        return found

    tables = {"queries": "generated", "rejected": "rejected"}
    run.in_shards("generate", images, tables, requests=ask, read=readable, rows=rows_of)
    queries, rejected = run.rows("generate", "queries", "generated"), run.rows("generate", "rejected")
    return {"inputs": len(images), "queries": len(queries), "rejected": reasons(rejected)}


def filter_queries(run: Run) -> dict[str, Any]:
    """Keep the questions that break no constraint (3.1.2)."""
    config = run.config.filter
    images = {image["id"]: image for image in run.rows("seed", "images")}
    queries = run.rows("generate", "queries", "generated")
    settings = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    texts = wording(run.config.prompts)

    def ask(query: dict[str, Any]) -> Iterator[Request]:
        picture = run.picture(images[query["image_id"]], config.model)
        yield prompts.filter_request(
            config.model, picture, query["query"], query["target_desc"], texts=texts, **settings
        )

    def rows_of(shard: Sequence[dict[str, Any]], outcomes: Iterator[Outcome]) -> dict[str, Rows]:
        found: dict[str, Rows] = {"valid": [], "rejected": []}
        for query, outcome in zip(shard, outcomes, strict=True):
            name = query["query_id"]
            try:
                valid, reasoning, description = prompts.read_filtered(outcome.answer())
            except ReplyError as error:
                found["rejected"].append(_rejected(name, error, outcome.key))
                continue
            if valid:
                row = {
                    "query_id": name,
                    "reasoning": reasoning,
                    "input_desc": description,
                    "key": outcome.key,
                }
                found["valid"].append(row)
            else:
                row = {"id": name, "reason": "breaks a constraint", "detail": reasoning, "key": outcome.key}
                found["rejected"].append(row)
        return found

    tables = {"valid": "filtered", "rejected": "rejected"}
    run.in_shards("filter", queries, tables, requests=ask, read=prompts.read_filtered, rows=rows_of)
    valid, rejected = run.rows("filter", "valid", "filtered"), run.rows("filter", "rejected")
    return {"queries": len(queries), "valid": len(valid), "rejected": reasons(rejected)}


def retrieve(run: Run) -> dict[str, Any]:
    """Candidates of each question: the best of two indices for the description of its target (3.1.3)."""
    config = run.config.retrieve
    images = run.images()
    valid = {row["query_id"] for row in run.rows("filter", "valid", "filtered")}
    queries = [row for row in run.rows("generate", "queries", "generated") if row["query_id"] in valid]
    captions = [image["caption"] for image in images]
    ids = {
        "image": [image["id"] for image in images],
        "caption": [image["id"] for image in images if image["caption"]],
    }
    names = {}
    searches: dict[str, tuple[str, np.ndarray, Callable[[list[str]], np.ndarray], int]] = {}

    def place_by(name: str, spec: EncoderConfig, vectors: np.ndarray, count: int) -> str:
        encoder = bridged(spec, captions, vectors)
        searches[name] = "image", vectors, encoder.texts, count
        return encoder.name

    def place_by_caption(
        name: str, spec: EncoderConfig, count: int, vectors: np.ndarray | None = None
    ) -> str:
        captioner = text_encoder(spec)
        if vectors is None:
            vectors = embed_captions(captioner, [caption for caption in captions if caption])
        searches[name] = "caption", vectors, lambda texts: captioner.texts(texts, query=True), count
        return captioner.name

    if queries:
        place_by("image", run.config.image_encoder, np.load(run.path("seed", "images.npy")), config.by_image)
        if ids["caption"] and config.by_caption:
            vectors = np.load(run.caption_vectors())
            place_by_caption("caption", run.config.caption_encoder, config.by_caption, vectors)
        for spec in config.more:
            if spec.side == "image":
                saved = run.path("retrieve", f"index-{spec.name}.npy")
                if not saved.is_file():
                    refs = [image["ref"] for image in images]
                    made_by = image_encoder(spec.encoder)
                    _save(saved, embed_pictures(made_by, spec.encoder, refs, run.config.runner))
                names[spec.name] = place_by(spec.name, spec.encoder, np.load(saved), spec.count)
            elif ids["caption"]:
                names[spec.name] = place_by_caption(spec.name, spec.encoder, spec.count)
    # One index after the other, and no copy of its vectors: at the paper's size each has 2.3 GB.
    found: list[dict[str, list[str]]] = [{} for _ in queries]
    for name, (side, vectors, texts_of, count) in searches.items():
        most = min(len(ids[side]), count + config.exclude_input)
        for start, places_QK in _nearest(
            vectors, texts_of, [query["target_desc"] for query in queries], most, config.memory_mb
        ):
            for query, row, per_query in zip(
                queries[start:], places_QK.tolist(), found[start:], strict=False
            ):
                nearest = [ids[side][place] for place in row]
                if config.exclude_input:
                    nearest = [one for one in nearest if one != query["image_id"]]
                per_query[name] = nearest[:count]
    num_triplets = both = 0
    with frames.writing(run.path("retrieve", "triplets.parquet"), "triplets") as write:
        for start in range(0, len(queries), QUERIES_A_GROUP):
            rows: Rows = []
            for query, per_query in zip(
                queries[start : start + QUERIES_A_GROUP], found[start:], strict=False
            ):
                for position, candidate in enumerate(maths.merge_candidates(per_query)):
                    rows.append(
                        {
                            "query_id": query["query_id"],
                            "candidate_id": candidate.id,
                            "position": position,
                            "image_rank": candidate.ranks.get("image"),
                            "caption_rank": candidate.ranks.get("caption"),
                            "found_by": list(candidate.ranks),
                        }
                    )
            write(rows)
            num_triplets += len(rows)
            both += sum(row["image_rank"] is not None and row["caption_rank"] is not None for row in rows)
    return {"queries": len(queries), "triplets": num_triplets, "found_by_both": both, "more_encoders": names}


def _nearest(
    vectors_ND: np.ndarray,
    texts_of: Callable[[list[str]], np.ndarray],
    texts: list[str],
    most: int,
    memory_mb: int,
) -> Iterator[tuple[int, np.ndarray]]:
    """First text of a block and the places (Q, most) of what is nearest to each, nearest first.

    Blocks are as large as leaves room for what a text is compared with: a score for each vector, twice.
    """
    import faiss

    size = max(1, int(memory_mb * 2**20 / (16 * max(1, len(vectors_ND)))))
    for start in range(0, len(texts), size):
        block_QD = np.ascontiguousarray(texts_of(texts[start : start + size]), np.float32)
        yield start, faiss.knn(block_QD, vectors_ND, most, metric=faiss.METRIC_INNER_PRODUCT)[1]


def judge(run: Run) -> dict[str, Any]:
    """Every judge of the panel on every triplet (3.1.4)."""
    config = run.config.judge
    images = {image["id"]: image for image in run.rows("seed", "images")}
    queries = {query["query_id"]: query for query in run.rows("generate", "queries", "generated")}
    candidates: dict[str, list[str]] = {}
    for row in run.rows("retrieve", "triplets"):
        candidates.setdefault(row["query_id"], []).append(row["candidate_id"])
    # The number of the draw counts within a model, so that one more judge of it leaves the others' answers valid.
    names = known_as(run.config.models)
    panel: list[tuple[str, int]] = []
    for spec in config.judges:
        before = sum(names[model] == names[spec.model] for model, _ in panel)
        panel += [(spec.model, before + number) for number in range(spec.count)]
    settings = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    texts = wording(run.config.prompts)

    def asked(name: str) -> Iterator[tuple[str, str, int]]:
        for candidate in candidates[name]:
            for model, sample in panel:
                yield candidate, model, sample

    def ask(name: str) -> Iterator[Request]:
        query = queries[name]
        for candidate, model, sample in asked(name):
            given = run.picture(images[query["image_id"]], model)
            target = run.picture(images[candidate], model)
            yield prompts.judge_request(
                model, given, query["query"], target, sample=sample, texts=texts, **settings
            )

    def rows_of(shard: Sequence[str], outcomes: Iterator[Outcome]) -> dict[str, Rows]:
        rows = []
        for name in shard:
            for (candidate, model, sample), outcome in zip(asked(name), outcomes, strict=False):
                try:
                    verdict, reasoning = prompts.read_judged(outcome.answer())
                except Refused as error:
                    verdict, reasoning = maths.ABSTAIN, f"{error.kind}: {error}"
                except ReplyError as error:
                    verdict, reasoning = maths.ERROR, f"{error.kind}: {error}"
                rows.append(
                    {
                        "query_id": name,
                        "candidate_id": candidate,
                        "judge": model,
                        "sample": sample,
                        "verdict": verdict,
                        "reasoning": reasoning,
                        "key": outcome.key,
                    }
                )
        return {"judgements": rows}

    tables = {"judgements": "judgements"}
    run.in_shards(
        "judge",
        sorted(candidates),
        tables,
        requests=ask,
        read=prompts.read_judged,
        rows=rows_of,
        count=lambda name: len(candidates[name]) * len(panel),
    )
    by_judge = count_votes(run)
    return {
        "triplets": sum(map(len, candidates.values())),
        "judgements": sum(sum(votes.values()) for votes in by_judge.values()),
        "panel": len(panel),
        "by_judge": by_judge,
    }


def count_votes(run: Run) -> dict[str, dict[str, int]]:
    """How often each judge said what, counted by Daft; the judgements are never in memory all at once."""
    folder, columns = run.path("judge", "judgements"), ["judge", "sample", "verdict"]
    found: dict[str, dict[str, int]] = {}
    if not any(folder.glob("part-*.parquet")):
        return found
    from daft import col, lit

    frame = frames.scan(folder, "judgements", columns, run.config.runner).with_column("one", lit(1))
    counted = frame.groupby(*columns).agg(col("one").count()).sort(["judge", "sample"])
    for judge, sample, verdict, number in zip(*counted.to_pydict().values(), strict=True):
        votes = found.setdefault(f"{judge} {sample}", dict.fromkeys(maths.VERDICTS, 0))
        votes[verdict] = number
    return found


def keep(run: Run) -> dict[str, Any]:
    """Decide on each triplet, and collect the doubted images (3.1.5)."""
    folder = run.path("judge", "judgements")
    if any(folder.glob("part-*.parquet")):
        columns = ["query_id", "candidate_id", "verdict"]
        frame = frames.scan(folder, "judgements", columns, run.config.runner)
        decided = decide(frame, run.config.keep.min_confidence)
    else:
        decided = frames.SCHEMAS["decided"].empty_table()
    frames.write_table(run.path("keep", "decided.parquet"), decided)
    states = list(zip(decided["candidate_id"].to_pylist(), decided["state"].to_pylist(), strict=True))
    doubted = maths.doubted_images(states)
    frames.write_rows(run.path("keep", "doubted.parquet"), "pool", [{"id": name} for name in sorted(doubted)])
    counted = {
        state: sum(found == state for _, found in states)
        for state in (maths.KEPT, maths.REJECTED, maths.ABSTAINED, maths.DOUBTED)
    }
    return {"triplets": len(states), **counted, "doubted_images": len(doubted)}


def decide(judgements: Any, min_confidence: float) -> pa.Table:
    """Group the panel's verdicts by triplet (by Daft) and decide on each.

    Args:
        judgements: DataFrame with query_id, candidate_id and verdict.
        min_confidence: see `arithmetic.tally`.

    Returns:
        The table ``decided``, sorted by query and candidate.
    """
    from daft import DataType, col

    kind = DataType.struct(
        {
            "majority": DataType.string(),
            "confidence": DataType.float32(),
            "negativeness": DataType.float32(),
            "state": DataType.string(),
        }
    )

    def decision(verdicts: list[str]) -> dict[str, Any]:
        found = maths.tally(verdicts, min_confidence)
        return {
            "majority": found.majority,
            "confidence": found.confidence,
            "negativeness": maths.negativeness(verdicts),
            "state": found.state,
        }

    frame = judgements.groupby("query_id", "candidate_id").agg(col("verdict").agg_list())
    frame = frame.with_column("found", col("verdict").apply(decision, return_dtype=kind))
    for name in ("majority", "confidence", "negativeness", "state"):
        frame = frame.with_column(name, col("found")[name])
    return frames.from_daft(frame.sort(["query_id", "candidate_id"]), "decided")


def pool(run: Run) -> dict[str, Any]:
    """The retrieval pool: every image that is a right answer to some query and is not doubted (3.1.6)."""
    doubted = {row["id"] for row in run.rows("keep", "doubted", "pool")}
    decided = run.rows("keep", "decided")
    kept = [row for row in decided if row["state"] == maths.KEPT and row["candidate_id"] not in doubted]
    images = sorted({row["candidate_id"] for row in kept})
    frames.write_rows(run.path("pool", "pool.parquet"), "pool", [{"id": name} for name in images])
    lost = sum(row["state"] == maths.KEPT and row["candidate_id"] in doubted for row in decided)
    return {"images": len(images), "triplets": len(kept), "kept_but_doubted_elsewhere": lost}


def split(run: Run) -> dict[str, Any]:
    """Test and training sets by TSR (3.1.7), and everything that is written for training and evaluation."""
    config = run.config
    doubted = {row["id"] for row in run.rows("keep", "doubted", "pool")}
    queries = {row["query_id"]: row for row in run.rows("generate", "queries", "generated")}
    negative = {
        (row["query_id"], row["candidate_id"]): row["negativeness"] for row in run.rows("keep", "decided")
    }
    positives: dict[str, list[str]] = {}
    for row in run.rows("keep", "decided"):
        if row["state"] == maths.KEPT and row["candidate_id"] not in doubted:
            positives.setdefault(row["query_id"], []).append(row["candidate_id"])
    if config.keep.remove_doubted_inputs:
        positives = {
            name: found for name, found in positives.items() if queries[name]["image_id"] not in doubted
        }
    ranked: dict[str, list[tuple[int, float]]] = {name: [] for name in positives}
    for row in run.rows("retrieve", "triplets"):
        if config.split.tsr_list == "surviving" and row["candidate_id"] in doubted:
            continue
        if row["query_id"] in ranked and row["image_rank"] is not None:
            value = negative[row["query_id"], row["candidate_id"]]
            ranked[row["query_id"]].append((row["image_rank"], value))
    scores = {
        name: maths.tsr([value for _, value in sorted(found)], config.retrieve.by_image)
        for name, found in ranked.items()
    }
    splits = maths.split_queries(scores, config.split.tsr_threshold)
    inputs = {name: queries[name]["image_id"] for name in splits}
    overlap = {mode: maths.overlapping(splits, inputs, positives, mode) for mode in ("inputs", "all")}
    dropped = overlap.get(config.split.disjoint, set())
    rows = [
        {
            "query_id": name,
            "tsr": scores[name],
            "split": "dropped" if name in dropped else splits[name],
            "overlaps": name in overlap["all"],
        }
        for name in sorted(splits)
    ]
    frames.write_rows(run.path("split", "splits.parquet"), "splits", rows)
    written = export(run, {str(row["query_id"]): str(row["split"]) for row in rows}, positives, doubted)
    return {
        "queries_with_an_answer": len(rows),
        "test": sum(row["split"] == "test" for row in rows),
        "train": sum(row["split"] == "train" for row in rows),
        "dropped": len(dropped),
        "train_sharing_an_input_with_test": len(overlap["inputs"]),
        "train_sharing_any_image_with_test": len(overlap["all"]),
        **written,
    }


WORK: dict[str, Callable[[Run], dict[str, Any]]] = {
    "seed": seed,
    "caption": caption,
    "generate": generate,
    "filter": filter_queries,
    "retrieve": retrieve,
    "judge": judge,
    "keep": keep,
    "pool": pool,
    "split": split,
    "audit": audit,
}


def _rejected(name: str, error: ReplyError, key: str) -> dict[str, Any]:
    return {"id": name, "reason": error.kind, "detail": str(error), "key": key}


def _save(path: Path, vectors: np.ndarray) -> None:
    with replacing(path) as waiting, waiting.open("wb") as out:
        np.save(out, vectors)
