"""Evaluate a checkpoint on a retrieval set.

    python -m eval run checkpoint=DIR set=DIR out=DIR [query_mode=reasoning,direct] [query_modality=both,text,image]

set --sets--> items --encode--> embeddings (sharded, resumable) --search--> ranking --metrics, stats--> outputs --report-->

Candidates are encoded once, directly, and serve every condition; a condition is a query mode with a query modality.
One condition is written to ``out`` itself, several to ``out/<mode>-<modality>`` each.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.audit import Audit, audit_training, training_files
from eval.benchmarks.protocols import Protocol, all_figures, protocol_for
from eval.encode import Embeds, Mode, Side, cache_key, check_collapse, encode_side, mean_cosine, open_cache
from eval.metrics import CUTOFFS
from eval.options import UserError, one_of
from eval.outputs import (
    FORMAT,
    RESULTS,
    RUN,
    check_out,
    invalidate,
    per_query_table,
    rationale_figures,
    self_retrieval,
    set_figures,
    statistics_settings,
    summary,
    versions,
    write_tables,
)
from eval.search import DEPTH, search
from eval.sets import MODALITIES, Modality, RetrievalSet, content_digest, load_set
from eval.stats import NUM_RESAMPLES
from eval.suite import is_suite, run_members
from eval.trec import write_run
from rge.prompts import PROFILES
from rge.schema import Encoded, Item

MODES: tuple[Mode, ...] = ("reasoning", "direct")
MAX_INSTRUCTIONS = 20
"""Instructions listed in results.json; a set may have one a query."""


@dataclass
class RunOptions:
    """Options of ``python -m eval run``."""

    checkpoint: Path
    """Checkpoint directory with ``rge.json``."""
    set: Path
    """Retrieval set directory, see `eval.sets`, or a suite of them, see `eval.suite`."""
    out: Path
    """Output directory."""
    query_mode: tuple[str, ...] = ("reasoning",)
    """reasoning and/or direct: whether a query writes a rationale before it is embedded."""
    query_modality: tuple[str, ...] = ("both",)
    """both, text and/or image: what a query keeps; the shortcut ablations."""
    batch_size: int = 32
    """Items embedded at once; changes speed and memory, not the embeddings."""
    limit: int | None = None
    """Only the first so many queries, for a quick look; the pool stays whole."""
    cache: Path | None = None
    """Where embeddings are kept; null: ``out/.cache``. May be shared by any number of runs."""
    by: tuple[str, ...] = ()
    """Further query columns to report by, besides the set's ``report_by``."""
    depth: int = DEPTH
    """Length of a ranking."""
    device: str | None = None
    """Such as cuda:0; null: a GPU if there is one."""
    dtype: str | None = None
    """Weights' dtype; null: float32 on CPU, the recipe's on GPU."""
    max_new_tokens: int | None = None
    """Cap on a rationale in tokens; null: the checkpoint's."""
    temperature: float | None = None
    """Sampling temperature of rationales; null: the checkpoint's, which is greedy."""
    seed: int = 0
    """Of the resampling, and of sampled rationales."""
    benchmark: str = "generic"
    """Protocol of a known benchmark: generic, rmir, mmeb, mmbright or pinpoint."""
    profile: str = "clean"
    """clean is the defensible protocol, official what the benchmark's released code computes."""
    prompts: str | None = None
    """Prompt profile instead of the checkpoint's; null: the set's where it says one, else the checkpoint's."""
    train: tuple[str, ...] = ("auto",)
    """Training files (JSON lines) to look for the set's pictures in; auto: those that rge.json names; null: none."""
    report: bool = True
    """Whether to write report.html."""
    overwrite: bool = False
    """Replace the output of another checkpoint or set."""


@dataclass(frozen=True)
class Condition:
    """A way of asking: mode, modality, and the directory that its output goes to."""

    mode: Mode
    modality: Modality
    out: Path


def run(options: RunOptions, load: Callable[..., Embeds] | None = None) -> list[Path]:
    """Evaluate, write the outputs, and return their directories.

    Args:
        options: see `RunOptions`.
        load: makes the encoder; `rge.encode.load_encoder` by default.

    Raises:
        UserError: something given is wrong; see the modules named above.
    """
    if is_suite(options.set):
        _conditions(options)
        if options.report:
            print("a suite has no page of its own yet: report=true is left out", file=sys.stderr)
        return run_members(options, run, load or _default_loader())
    conditions = _conditions(options)
    wanted = load_set(options.set, by=options.by)
    protocol = protocol_for(options.benchmark, options.profile, wanted)
    wanted = protocol.prepare(wanted)
    if options.limit is not None:
        wanted = wanted.first(options.limit)
    if options.depth < min(max(CUTOFFS), len(wanted.corpus_ids)):
        raise UserError(f"depth must be at least {max(CUTOFFS)}, the deepest metric, got {options.depth}")
    queries = {one.modality: wanted.query_items(one.modality) for one in conditions}

    # One pass over all pictures before the model is loaded: it names what the embeddings depend on, and a missing
    # picture shows now instead of in the last shard.
    candidate_contents, rows_of_picture = _candidate_contents(wanted)
    query_contents = {
        modality: [content_digest(item)[0] for item in items] for modality, items in queries.items()
    }
    own = [_own_rows(item, rows_of_picture) for item in wanted.queries]

    encoder = _load(options, load, wanted.meta.get("prompts"))
    audit = _audit(options, encoder, wanted)
    warnings = _warnings(conditions, encoder, wanted, audit)
    for warning in warnings:
        print(f"WARNING: {warning}", file=sys.stderr, flush=True)
    sampled = encoder.settings["generation"]["temperature"] > 0
    for one in conditions:
        check_out(one.out, _identity(wanted, encoder, one), overwrite=options.overwrite)

    def encode(
        side: Side, mode: Mode, modality: str, items: Iterable[Item], contents: Sequence[str]
    ) -> Encoded:
        seed = options.seed if mode == "reasoning" and sampled else None
        settings = encoder.settings | {"seed": seed}
        if mode == "direct":  # nothing is generated, so another cap on rationales changes nothing
            del settings["generation"]
        about = {"side": side, "mode": mode, "modality": modality, "checkpoint_hash": encoder.checkpoint_hash}
        key = cache_key(**about, settings=settings, fingerprint=wanted.fingerprint, contents=contents)
        cache = open_cache(
            options.cache or options.out / ".cache", key, len(contents), about | {"set": wanted.name}
        )
        size = options.batch_size
        found = encode_side(encoder, items, cache, side=side, mode=mode, batch_size=size, seed=seed)
        check_collapse(found.embeddings, contents, side)
        return found

    candidate_CD = encode("candidate", "direct", "both", wanted.corpus_items(), candidate_contents).embeddings
    candidate_CD = candidate_CD[wanted.file_rows_C]  # from the order of the file to the order of ids
    for one in conditions:
        encoded = encode("query", one.mode, one.modality, queries[one.modality], query_contents[one.modality])
        ranking = search(
            encoded.embeddings,
            candidate_CD,
            depth=options.depth,
            excluded=wanted.excluded,
            candidates=wanted.candidates,
        )
        scored = protocol.score(wanted, ranking)
        results = {
            **_measured_with(options, wanted, encoder, one, protocol),
            **all_figures(wanted, scored, protocol, seed=options.seed),
            "warnings": [w for w in warnings if one.mode == "reasoning" or not w.startswith("query_mode")],
            "audit": audit.content if audit is not None else None,
            "rationale": rationale_figures(encoded),
            "self_retrieval": self_retrieval(ranking, own),
            "coverage": 1.0,
            "mean_cosine": {"query": mean_cosine(encoded.embeddings), "candidate": mean_cosine(candidate_CD)},
            "embedding_dim": candidate_CD.shape[1],
        }
        invalidate(one.out)
        tag = f"{encoder.checkpoint_hash[:12]}-{one.mode}-{one.modality}"
        write_run(one.out / RUN, ranking, wanted.query_ids, wanted.corpus_ids, tag)
        write_tables(one.out, per_query_table(wanted, ranking, scored, encoded), results)
        print(
            f"\n{wanted.name}: {one.mode}, {one.modality} -> {one.out}\n{summary(results, protocol.headline)}",
            flush=True,
        )
    dirs = [one.out for one in conditions]
    if options.report:
        from eval.report import write_report

        page = options.out / "report.html"
        if options.benchmark == "generic":
            print(f"\n{write_report(dirs, page)}")
        else:
            print(f"\n{write_report(dirs, page, metric=protocol.headline[0])}")
    return dirs


def _conditions(options: RunOptions) -> list[Condition]:
    one_of("query_mode", options.query_mode, MODES)
    one_of("query_modality", options.query_modality, MODALITIES)
    protocol_for(options.benchmark, options.profile)
    if options.prompts is not None:
        one_of("prompts", [options.prompts], tuple(PROFILES))
    if options.batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {options.batch_size}")
    pairs = [(mode, modality) for mode in MODES for modality in MODALITIES]
    pairs = [pair for pair in pairs if pair[0] in options.query_mode and pair[1] in options.query_modality]
    if len(pairs) == 1:
        return [Condition(*pairs[0], options.out)]
    if (options.out / RESULTS).exists():
        raise UserError(
            f"{options.out} holds a single evaluation, these would be {len(pairs)}: give another out="
        )
    return [Condition(mode, modality, options.out / f"{mode}-{modality}") for mode, modality in pairs]


def _audit(options: RunOptions, encoder: Embeds, wanted: RetrievalSet) -> Audit | None:
    files = [Path(name) for name in options.train if name != "null"]
    if options.train == ("auto",):
        files = training_files(encoder.settings.get("recipe") or {})
    return audit_training(wanted, files) if files else None


def _warnings(
    conditions: Sequence[Condition], encoder: Embeds, wanted: RetrievalSet, audit: Audit | None
) -> list[str]:
    """What a reader of the figures has to know first."""
    out = list(wanted.meta.get("notes", []))
    if encoder.settings.get("reasons") == "none" and any(one.mode == "reasoning" for one in conditions):
        out.append(
            "query_mode=reasoning, but rge.json says that this checkpoint was trained without rationales (reasons: none): "
            "its embeddings after a rationale are not what it was trained for; query_mode=direct is"
        )
    return out + (audit.warnings if audit is not None else [])


def _load(options: RunOptions, load: Callable[..., Embeds] | None, of_set: str | None = None) -> Embeds:
    encoder = (load or _default_loader())(
        options.checkpoint,
        device=options.device,
        dtype=options.dtype,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
    )
    profile = options.prompts or of_set
    if profile is not None and profile != encoder.settings["profile"]:
        builder = getattr(encoder, "builder", None)
        if builder is None:
            raise UserError(f"prompts={profile}: this encoder words its prompts itself")
        from rge.prompts import PromptBuilder

        encoder.builder = PromptBuilder(builder.processor, profile, builder.max_tokens)  # type: ignore[attr-defined]
        encoder.settings = encoder.settings | {"profile": profile}  # also part of the cache's name
    return encoder


def _default_loader() -> Callable[..., Embeds]:
    from rge.encode import load_encoder

    return load_encoder


def _identity(wanted: RetrievalSet, encoder: Embeds, condition: Condition) -> dict[str, Any]:
    return {
        "set.fingerprint": wanted.fingerprint,
        "checkpoint_hash": encoder.checkpoint_hash,
        "query_mode": condition.mode,
        "query_modality": condition.modality,
    }


def _measured_with(
    options: RunOptions, wanted: RetrievalSet, encoder: Embeds, condition: Condition, protocol: Protocol
) -> dict[str, Any]:
    """What results.json says of how it was measured."""
    return {
        "format": FORMAT,
        "set": set_figures(wanted) | {"limit": options.limit},
        "benchmark": options.benchmark,
        "profile": options.profile,
        "protocol": list(protocol.statements),
        "query_mode": condition.mode,
        "query_modality": condition.modality,
        "candidate_mode": "direct",
        "checkpoint": str(encoder.checkpoint),
        "checkpoint_hash": encoder.checkpoint_hash,
        "prompts": _prompts(wanted, encoder),
        "settings": {key: value for key, value in encoder.settings.items() if key != "recipe"},
        "decoding": encoder.settings["generation"],
        "dtype": encoder.settings["dtype"],
        "batch_size": options.batch_size,
        "depth": options.depth,
        "seed": options.seed,
        "statistics": statistics_settings(options.seed, NUM_RESAMPLES),
        "versions": versions(),
    }


def _prompts(wanted: RetrievalSet, encoder: Embeds) -> dict[str, Any]:
    """How queries and candidates were worded: the profile's templates and the set's instructions."""
    profile = encoder.settings["profile"]
    instructions = sorted({item.instruction or "" for item in wanted.queries})
    return {
        "profile": profile,
        "templates": asdict(PROFILES[profile]) if profile in PROFILES else None,
        "instructions": instructions[:MAX_INSTRUCTIONS],
        "num_instructions": len(instructions),
    }


def _candidate_contents(wanted: RetrievalSet) -> tuple[list[str], dict[str, list[int]]]:
    """Content digest of each candidate in file order, and the rows (in id order) that show each picture."""
    row_of_C = np.empty(len(wanted.file_rows_C), np.int64)
    row_of_C[wanted.file_rows_C] = np.arange(len(row_of_C))
    contents: list[str] = []
    rows_of_picture: dict[str, list[int]] = {}
    for file_row, item in enumerate(wanted.corpus_items()):
        content, pictures = content_digest(item)
        contents.append(content)
        for picture in pictures:
            rows_of_picture.setdefault(picture, []).append(int(row_of_C[file_row]))
    return contents, rows_of_picture


def _own_rows(query: Item, rows_of_picture: dict[str, list[int]]) -> np.ndarray:
    rows = {row for picture in content_digest(query)[1] for row in rows_of_picture.get(picture, [])}
    return np.array(sorted(rows), np.int64)
