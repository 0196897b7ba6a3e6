"""The stages: each reads earlier tables, writes its own, and returns its counts.

Source: RMIR, section 3.1. Choices that the paper leaves open are settings; see docs/data_prep.md.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.rmir import arithmetic as maths
from data_prep.rmir import decisions, frames, prompts
from data_prep.rmir.pictures.encoders import (
    NO_CAPTIONS,
    Index,
    caption_index,
    embed_all,
    image_index,
)
from data_prep.rmir.results.audit import audit
from data_prep.rmir.results.export import export
from data_prep.rmir.run import Asking, Row, Run, reasons
from data_prep.rmir.seed_set import drawn, save_vectors, seed
from data_prep.rmir.wording import wording
from rge.calls.caller import Outcome
from rge.calls.failures import Rejection
from rge.calls.model_config import cache_names
from rge.calls.request import Request
from rge.calls.wire.replies import Refused, Reply, ReplyError
from rge.common.errors import UserError


def caption(run: Run) -> dict[str, Any]:
    """Write captions of seed pictures that have none in the library (not in the paper, whose library is fully captioned)."""
    config = run.config.caption

    def ask(image: Row) -> Request:
        return prompts.caption_request(run.config, run.picture(image, str(config.model)))

    def read(reply: Reply) -> Row:
        return {"caption": prompts.read_caption(reply, config.max_words)}

    without = run.rows("seed", "images").having("caption", filled=False)
    _ask_each(run, "caption", without, "id", "captions", ask, read)
    captioned = run.images().having("caption").table
    is_written_N = pc.not_equal(captioned["caption_by"], "library").to_numpy()
    vectors = known_ND = np.load(run.path("seed", "captions.npy"), mmap_mode="r")
    if is_written_N.any():
        written = captioned["caption"].filter(pa.array(is_written_N)).to_pylist()
        written_ND = embed_all(run.config, run.config.caption_encoder, captions=written)
        vectors = np.empty((len(captioned), written_ND.shape[1]), written_ND.dtype)
        vectors[is_written_N] = written_ND
        if len(known_ND):
            vectors[~is_written_N] = known_ND
    save_vectors(run.caption_vectors(), vectors)
    return {
        "missing": len(without),
        "written": int(is_written_N.sum()),
        "with_caption": len(captioned),
        "not_written": reasons(run.rows("caption", "rejected")),
    }


def generate(run: Run) -> dict[str, Any]:
    """Write one question of each category about each input picture, with a description of its target (3.1.1)."""
    config, codes_of = run.config.generate, wording(run.config.prompts).codes
    encoders = (run.config.image_encoder, *(spec.encoder for spec in run.config.retrieve.more))
    if any(encoder.kind == "pixels" for encoder in encoders) and not run.images().having("caption"):
        raise UserError(
            NO_CAPTIONS, kind="captions"
        )  # else `retrieve` would say so, after all questions are paid
    images, limits = drawn(run, config.max_inputs), (config.max_query_words, config.max_target_words)

    def ask(image: Row) -> Iterator[Request]:
        yield prompts.generate_request(run.config, run.picture(image, config.model))

    def readable(reply: Reply) -> None:
        prompts.check_generated(reply, [codes_of[category] for category in config.categories], limits)

    def rows(image: Row, outcomes: list[Outcome]) -> Iterator[tuple[str, Row]]:
        for category in config.categories:
            code = codes_of[category]
            about = {"query_id": f"{image['id']}-{code}-1", "image_id": image["id"], "category": category}
            read = partial(prompts.read_generated, code=code, max_words=limits)
            yield _read_or_rejected("queries", about, outcomes[0], read)

    run.in_shards("generate", images, Asking(("queries", "rejected"), ask, readable, rows))
    queries, rejected = run.rows("generate", "queries"), run.rows("generate", "rejected")
    return {"inputs": len(images), "queries": len(queries), "rejected": reasons(rejected)}


def filter_queries(run: Run) -> dict[str, Any]:
    """Keep the questions that meet all constraints (3.1.2)."""
    images = run.by("id", "seed", "images")
    queries = run.rows("generate", "queries")

    def ask(query: Row) -> Request:
        picture = run.picture(images[query["image_id"]], run.config.filter.model)
        return prompts.filter_request(run.config, picture, query["query"], query["target_desc"])

    _ask_each(run, "filter", queries, "query_id", "valid", ask, prompts.read_filtered)
    valid, rejected = run.rows("filter", "valid"), run.rows("filter", "rejected")
    return {"queries": len(queries), "valid": len(valid), "rejected": reasons(rejected)}


def _ask_each(
    run: Run,
    stage: str,
    items: Sequence[Row],
    key: str,
    table: str,
    ask: Callable[[Row], Request],
    read: Callable[[Reply], Row],
) -> None:
    """Make one call about each item, and write the rows that are read from the answers, named by the column `key`."""

    def rows(item: Row, outcomes: list[Outcome]) -> Iterator[tuple[str, Row]]:
        yield _read_or_rejected(table, {key: item[key]}, outcomes[0], read)

    run.in_shards(stage, items, Asking((table, "rejected"), lambda item: [ask(item)], read, rows))


def _read_or_rejected(
    table: str, about: Row, outcome: Outcome, read: Callable[[Reply], Row]
) -> tuple[str, Row]:
    """The (table, row) of an answer, or of ``rejected`` with the reason; `about` begins with the id."""
    try:
        return table, {**about, **read(outcome.answer()), "key": outcome.key}
    except ReplyError as error:
        name = next(iter(about.values()))
        return "rejected", {"id": name, "reason": error.kind, "detail": str(error), "key": outcome.key}


def _indices(run: Run, images: frames.Rows) -> Iterator[tuple[str, int, Index]]:
    """Yield name, candidates per query and index, one at a time to save memory."""
    config = run.config.retrieve
    has_captions = bool(images.having("caption"))
    images_ND = np.load(run.path("seed", "images.npy"), mmap_mode="r")
    yield "image", config.by_image, image_index(run.config.image_encoder, images, images_ND)
    del images_ND
    if has_captions and config.by_caption:
        caption_ND = np.load(run.caption_vectors(), mmap_mode="r")
        yield "caption", config.by_caption, caption_index(run.config.caption_encoder, images, caption_ND)
    for spec in config.more:
        if spec.side == "image":
            saved = run.path("retrieve", f"index-{spec.name}.npy")
            if not saved.is_file():
                refs = [image["ref"] for image in images]
                save_vectors(saved, embed_all(run.config, spec.encoder, pictures=refs))
            yield spec.name, spec.count, image_index(spec.encoder, images, np.load(saved, mmap_mode="r"))
        elif has_captions:
            yield spec.name, spec.count, caption_index(spec.encoder, images)


def retrieve(run: Run) -> dict[str, Any]:
    """Retrieve candidates of each question: the nearest to its target description in each index (3.1.3)."""
    images = run.images()
    valid = run.rows("filter", "valid").table["query_id"]
    queries = run.rows("generate", "queries").among("query_id", valid)
    found: list[dict[str, list[str]]] = [{} for _ in queries]
    encoders = {}
    for name, count, index in _indices(run, images) if queries else ():
        encoders[name] = index.encoder.name
        _search(run, index, count, queries, [per_query.setdefault(name, []) for per_query in found])
    counts = Counter(triplets=0, found_by_both=0)

    def rows() -> Iterator[Row]:
        for query, per_query in zip(queries, found, strict=True):
            for position, (candidate, ranks) in enumerate(maths.merge_candidates(per_query).items()):
                counts["triplets"] += 1
                counts["found_by_both"] += ranks.keys() >= {"image", "caption"}
                yield {
                    "query_id": query["query_id"],
                    "candidate_id": candidate,
                    "position": position,
                    "image_rank": ranks.get("image"),
                    "caption_rank": ranks.get("caption"),
                    "found_by": list(ranks),
                }

    frames.write_rows(run.path("retrieve", "triplets.parquet"), rows())
    more = {spec.name: encoders[spec.name] for spec in run.config.retrieve.more if spec.name in encoders}
    return {"queries": len(queries), **counts, "more_encoders": more}


def _search(run: Run, index: Index, count: int, queries: Sequence[Row], found: list[list[str]]) -> None:
    """Append to each query's list the `count` candidates nearest to its target description."""
    import faiss

    config = run.config.retrieve
    most = min(len(index.ids), count + config.exclude_input)
    # Blocks leave room for two scores per query and vector.
    size = max(1, int(config.memory_mb * 2**20 / (16 * max(1, len(index.ids)))))
    for start in range(0, len(queries), size):
        block = queries[start : start + size]
        described_QD = np.ascontiguousarray(index.texts([row["target_desc"] for row in block]), np.float32)
        _, place_QK = faiss.knn(described_QD, index.vectors_ND, most, metric=faiss.METRIC_INNER_PRODUCT)
        for query, names, places in zip(block, found[start : start + size], place_QK.tolist(), strict=True):
            nearest = [index.ids[place] for place in places]
            if config.exclude_input:
                nearest = [name for name in nearest if name != query["image_id"]]
            names += nearest[:count]


def judge(run: Run) -> dict[str, Any]:
    """Have every judge of the panel judge every triplet (3.1.4)."""
    images = run.by("id", "seed", "images")
    queries = run.by("query_id", "generate", "queries")
    candidates: dict[str, list[str]] = {}
    for row in run.rows("retrieve", "triplets"):
        candidates.setdefault(row["query_id"], []).append(row["candidate_id"])
    panel = _panel(run)

    def calls(name: str) -> list[tuple[str, str, int]]:
        return [(candidate, model, sample) for candidate in candidates[name] for model, sample in panel]

    def ask(name: str) -> Iterator[Request]:
        query = queries[name]
        for candidate, model, sample in calls(name):
            given, target = (run.picture(images[shown], model) for shown in (query["image_id"], candidate))
            yield prompts.judge_request(run.config, given, query["query"], target, model, sample)

    def rows(name: str, outcomes: list[Outcome]) -> Iterator[tuple[str, Row]]:
        for (candidate, model, sample), outcome in zip(calls(name), outcomes, strict=True):
            verdict, reasoning = _verdict(outcome)
            about = {"query_id": name, "candidate_id": candidate, "judge": model, "sample": sample}
            answer = {"verdict": verdict, "reasoning": reasoning, "key": outcome.key}
            yield "judgements", about | answer

    asking = Asking(("judgements",), ask, prompts.read_judged, rows, lambda name: len(calls(name)))
    run.in_shards("judge", sorted(candidates), asking)
    return {
        "triplets": sum(map(len, candidates.values())),
        "judgements": frames.num_rows(run.path("judge", "judgements")),
        "panel": len(panel),
    }


def _panel(run: Run) -> list[tuple[str, int]]:
    """(model, sample) of each judge; samples count within a model, so that adding a judge keeps the others' answers valid."""
    names = cache_names(run.config.models)
    panel: list[tuple[str, int]] = []
    for spec in run.config.judge.judges:
        before = sum(names[model] == names[spec.model] for model, _ in panel)
        panel += [(spec.model, before + number) for number in range(spec.count)]
    return panel


def _verdict(outcome: Outcome) -> tuple[str, str]:
    """Verdict and reasoning of a judge; a refusal is an abstention, a rejected call no verdict."""
    try:
        return prompts.read_judged(outcome.answer())
    except ReplyError as error:
        verdict = {Refused: maths.ABSTAIN, Rejection: maths.MISSING}.get(type(error), maths.ERROR)
        return verdict, f"{error.kind}: {error}"


def keep(run: Run) -> dict[str, Any]:
    """Decide on each triplet, and collect the doubted images, which leave the whole seed set (3.1.5)."""
    schema, least = frames.SCHEMAS["decided"], run.config.keep.min_confidence
    tables = [schema.empty_table()]
    for panels in decisions.panels(run.path("judge", "judgements")):
        rows = []
        for (query, candidate), votes in panels.items():
            verdicts = [verdict for _, _, verdict in votes]
            about = {
                "query_id": query,
                "candidate_id": candidate,
                "negativeness": maths.negativeness(verdicts),
            }
            rows.append(about | maths.tally(verdicts, least))
        tables.append(pa.Table.from_pylist(rows, schema=schema))
    decided = pa.concat_tables(tables).sort_by([("query_id", "ascending"), ("candidate_id", "ascending")])
    frames.write_table(run.path("keep", "decided.parquet"), decided)
    state_N = decided["state"].to_numpy()
    doubted = sorted({*decided["candidate_id"].to_numpy()[state_N == maths.DOUBTED]})
    frames.write_rows(run.path("keep", "doubted.parquet"), [{"id": name} for name in doubted])
    return {
        "triplets": len(decided),
        **{state: int((state_N == state).sum()) for state in maths.STATES},
        "unanimous": int((decided["confidence"].to_numpy() == 1).sum()),
        "doubted_images": len(doubted),
    }


def pool(run: Run) -> dict[str, Any]:
    """The retrieval pool: every image that is a right answer to some query and is not doubted (3.1.6)."""
    kept = decisions.candidates_by_query(run.out, maths.KEPT)
    images = sorted({name for found in kept.values() for name in found})
    frames.write_rows(run.path("pool", "pool.parquet"), [{"id": name} for name in images])
    triplets = sum(map(len, kept.values()))
    lost = sum(row["state"] == maths.KEPT for row in decisions.decided(run.out)) - triplets
    return {"images": len(images), "triplets": triplets, "kept_but_doubted_elsewhere": lost}


def split(run: Run) -> dict[str, Any]:
    """Split queries into test and training set by TSR (3.1.7), and export the data set."""
    config = run.config
    doubted = {row["id"] for row in run.rows("keep", "doubted")}
    inputs = {row["query_id"]: row["image_id"] for row in run.rows("generate", "queries")}
    positives = decisions.candidates_by_query(run.out, maths.KEPT)
    if config.keep.remove_doubted_inputs:
        positives = {name: found for name, found in positives.items() if inputs[name] not in doubted}
    scores = _reliability(run, positives, doubted if config.split.tsr_list == "surviving" else set())
    splits = maths.split_queries(scores, config.split.tsr_threshold)
    overlap = {mode: maths.overlapping(splits, inputs, positives, mode) for mode in ("inputs", "all")}
    dropped = overlap.get(config.split.disjoint, set())
    parts = {name: "dropped" if name in dropped else splits[name] for name in sorted(splits)}
    rows = [
        {"query_id": name, "tsr": scores[name], "split": part, "overlaps": name in overlap["all"]}
        for name, part in parts.items()
    ]
    frames.write_rows(run.path("split", "splits.parquet"), rows)
    written = export(run, parts, positives)
    counts = Counter(parts.values())
    return {
        "queries_with_an_answer": len(rows),
        "test": counts["test"],
        "train": counts["train"],
        "dropped": len(dropped),
        "train_sharing_an_input_with_test": len(overlap["inputs"]),
        "train_sharing_any_image_with_test": len(overlap["all"]),
        **written,
    }


def _reliability(run: Run, queries: Collection[str], left_out: set[str]) -> dict[str, float]:
    """TSR of the given queries, from the image index's candidates except those in `left_out`."""
    decided = run.rows("keep", "decided")
    negative = {(row["query_id"], row["candidate_id"]): row["negativeness"] for row in decided}
    ranked: dict[str, list[tuple[int, float]]] = {name: [] for name in queries}
    for row in run.rows("retrieve", "triplets"):
        query, candidate, rank = row["query_id"], row["candidate_id"], row["image_rank"]
        if query in ranked and rank is not None and candidate not in left_out:
            ranked[query].append((rank, negative[query, candidate]))
    k = run.config.retrieve.by_image
    return {name: maths.tsr([value for _, value in sorted(found)], k) for name, found in ranked.items()}


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
