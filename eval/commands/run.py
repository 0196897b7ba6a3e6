"""Evaluate a checkpoint on a retrieval set.

    rge eval run checkpoint=DIR set=DIR out=DIR [query_mode=reasoning,direct] [query_modality=both,text,image]

set --sets--> items --encode--> embeddings (sharded, resumable) --search--> ranking --metrics, stats--> outputs --report-->

Candidates are encoded once for all conditions; a condition is a query mode and a query modality. A single condition is
written to ``out`` itself, several to ``out/<mode>-<modality>``. Under ``accelerate launch`` all processes encode into one
cache, and the first one does the rest.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from eval.benchmarks.registry import MeasureOptions
from eval.benchmarks.suite import is_suite, loaded_once, measure_members
from eval.commands.audit import Audit, audit_training, training_files
from eval.embedding.fill_cache import Embeds, Mode, mean_cosine
from eval.embedding.processes import join
from eval.embedding.set_embeddings import Embeddings, contents_of
from eval.judging.rewrite import RewriteOptions, rewritten
from eval.models.registry import ModelOptions
from eval.scoring.evaluation import decides, write_evaluation
from eval.scoring.output_files import RESULTS, check_out, rerun_command, self_retrieval
from eval.scoring.protocol import Protocol
from eval.scoring.search import DEPTH, Ranking, rows_within, search
from eval.sets.retrieval_set import MODALITIES, Modality, RetrievalSet, load_set, with_content
from rge.common.errors import UserError
from rge.common.options import one_of
from rge.common.prompt_profiles import PROFILES
from rge.common.schema import Encoded

MODES: tuple[Mode, ...] = get_args(Mode)
MAX_INSTRUCTIONS = 20
"""Maximum number of instructions listed in results.json; a set may have one per query."""


@dataclass(kw_only=True)
class RunOptions(ModelOptions, RewriteOptions, MeasureOptions):
    """Embed a retrieval set, search it, score the ranking and write a report."""

    query_mode: tuple[str, ...] = ("reasoning",)
    """reasoning and/or direct: whether a query writes a rationale before it is embedded."""
    query_modality: tuple[str, ...] = ("both",)
    """both, text and/or image: the parts of a query that are used, for the shortcut ablations."""
    limit: int | None = None
    """Use only this many queries, for a quick look; the pool stays complete."""
    cache: Path | None = None
    """Cache of embeddings; null: ``out/.cache``. Any number of runs can share one."""
    embedding_dims: int | None = None
    """Truncate every embedding to this many components and normalise it again, for checkpoints trained with
    loss.matryoshka_dims; null: all. The cache holds whole embeddings, so further sizes cost nothing."""
    candidate_mode: Literal["reasoning", "direct"] = "direct"
    """direct or reasoning: whether candidates get rationales too."""
    depth: int = DEPTH
    """Length of a ranking; extended to the largest cutoff of the metrics."""
    memory_mb: float = 2048.0
    """Memory for the pool's embeddings, MB; a larger pool is searched in blocks of this size from a file in the cache."""
    seed: int = 0
    """Seed of the resampling and of sampled rationales."""
    train: tuple[str, ...] = ("auto",)
    """Training files (JSON lines) to search for the set's pictures; auto: those that rge.json names; null: none."""
    report: bool = True
    """Whether to write report.html."""

    @property
    def root(self) -> Path:
        """Folder of cached embeddings and rewritten queries."""
        return self.cache or self.out / ".cache"

    def of_member(self, path: Path, out: Path) -> Self:
        """The options for one member of the suite; members share a cache, and only the suite gets a page."""
        return replace(self, set=path, out=out, cache=self.root, report=False)


@dataclass(frozen=True)
class Condition:
    """A query mode and modality, the output directory, and the command that reproduces it."""

    mode: Mode
    modality: Modality
    out: Path
    rerun_command: Mapping[str, Any]


def run(options: RunOptions, load: Callable[..., Embeds] | None = None) -> list[Path]:
    """Evaluate, write the outputs, and return their directories.

    ``load``: loads the encoder; default `eval.models.registry.load_model`.
    """
    conditions = _conditions(options)
    if is_suite(options.set):
        return _run_suite(options, loaded_once(load or options.loader()))
    session = start(options, conditions, load)
    embeddings, seed = session.embeddings, session.draw_seed
    dirs = [condition.out for condition in conditions]
    embeddings.fill_candidates(options.candidate_mode, seed)
    if embeddings.process_group.is_first:
        candidate_CD = embeddings.candidates(options.candidate_mode, seed)  # raises if they cannot be ranked
    for condition in conditions:
        embeddings.fill_queries(condition.mode, condition.modality, seed)
    if not embeddings.process_group.is_first:
        return dirs
    for condition in conditions:
        encoded = embeddings.queries(condition.mode, condition.modality, seed)
        ranking = session.rank(encoded.embeddings, candidate_CD)
        figures = {
            "warnings": [
                w for w in session.warnings if condition.mode == "reasoning" or not w.startswith("query_mode")
            ],
            "mean_cosine": {"query": mean_cosine(encoded.embeddings), "candidate": mean_cosine(candidate_CD)},
            "embedding_dim": candidate_CD.shape[1],
        }
        print()
        session.write(condition, ranking, encoded, figures, title=f"{condition.mode}, {condition.modality}")
    if options.report:
        from eval.pages.report import write_report

        metric = "recall@1" if options.benchmark == "generic" else session.protocol.headline[0]
        print(f"\n{write_report(dirs, options.out / 'report.html', metric=metric)}")
    return dirs


def _run_suite(options: RunOptions, load: Callable[..., Embeds]) -> list[Path]:
    """Evaluate every member with one encoder, and write the suite's page."""
    dirs = measure_members(
        options, lambda _, path, out: run(options.of_member(path, out), load), options.query_mode[0]
    )
    if options.report and join().is_first:
        from eval.pages.boards.leaderboard import write_leaderboard

        print(f"\n{write_leaderboard([str(path) for path in dirs], options.out / 'report.html')}")
    return dirs


@dataclass(frozen=True)
class Session:
    """A checked set, an encoder's embeddings of it, and what all conditions have in common.

    Attributes:
        wanted: the set, prepared by the protocol.
        draw_seed: seed of sampled rationales; None for greedy decoding.
        warnings: caveats for readers of the figures.
        audit: overlap with the training files; None if none are known.
        shared: content of results.json that is the same for all conditions.
    """

    options: RunOptions
    wanted: RetrievalSet
    protocol: Protocol
    embeddings: Embeddings
    draw_seed: int | None
    warnings: list[str]
    audit: Audit | None
    shared: Mapping[str, Any] = field(repr=False)

    def rank(self, query_QD: np.ndarray, candidate_CD: np.ndarray) -> Ranking:
        """Exact search with the set's exclusions and candidate lists."""
        return search(
            query_QD,
            candidate_CD,
            depth=self.options.depth,
            excluded=self.wanted.excluded,
            candidates=self.wanted.candidates,
            block_rows=rows_within(self.embeddings.memory_mb, candidate_CD.shape[1]),
        )

    def write(
        self,
        condition: Condition,
        ranking: Ranking,
        encoded: Encoded,
        more: Mapping[str, Any],
        *,
        tag: str = "",
        title: str | None = None,
    ) -> dict[str, Any]:
        """Score a ranking and write its output directory; returns the content of results.json.

        ``more``: further keys of results.json. ``tag``: suffix of the run file's tag; default: mode and modality. ``title``:
        see `write_evaluation`.
        """
        about = {
            **_of_condition(self.shared, condition),
            "warnings": self.warnings,
            "audit": self.audit.content if self.audit is not None else None,
            "self_retrieval": self_retrieval(ranking, self.embeddings.contents.own),
            "again": condition.rerun_command,
            **more,
        }
        return write_evaluation(
            condition.out,
            self.wanted,
            ranking,
            self.protocol,
            about,
            tag=f"{self.shared['checkpoint_hash'][:12]}-{tag or f'{condition.mode}-{condition.modality}'}",
            seed=self.options.seed,
            encoded=encoded,
            limit=self.options.limit,
            made_with=self.embeddings.made_with,
            title=title,
        )


def start(
    options: RunOptions, conditions: Sequence[Condition], load: Callable[..., Embeds] | None = None
) -> Session:
    """Check the set, read its pictures once, load the encoder and print warnings.

    Raises:
        UserError: invalid options or data, or an output directory holds another evaluation.
    """
    process_group = join()
    wanted = load_set(options.set, by=options.by)
    protocol = options.protocol(wanted)
    whole = wanted = protocol.prepare(wanted)
    if options.limit is not None:
        wanted = wanted.first(options.limit)
    protocol.check_depth(wanted, options.depth)
    rewriter = options.load_rewriter(options.root)
    if rewriter is not None:
        wanted = process_group.once(lambda: rewritten(wanted, rewriter))
    # One pass over all pictures before loading the model: the cache keys need their hashes, and a missing picture is
    # reported now instead of in the last shard.
    modalities = list(dict.fromkeys(condition.modality for condition in conditions))
    contents = process_group.once(lambda: contents_of(wanted, modalities))
    content = process_group.once(lambda: with_content(whole, contents.candidates).content)
    wanted = replace(wanted, content=content)
    encoder = options.load(wanted, load)
    for condition in conditions:
        encoder.settings.check_mode(condition.mode)
    audit = process_group.once(lambda: _audit(options.train, encoder, wanted))
    warnings = _warnings(conditions, encoder, wanted, audit)
    for warning in warnings if process_group.is_first else ():
        print(f"WARNING: {warning}", file=sys.stderr, flush=True)
    shared = _shared(options, wanted, encoder)
    identity = decides(wanted, protocol, options.seed) | _decides(options, shared)
    for condition in conditions:
        measured = _of_condition(shared, condition)
        determined = identity | {key: measured[key] for key in ("query_mode", "query_modality")}
        check_out(condition.out, determined, overwrite=options.overwrite, measured=measured)
    embeddings = Embeddings(
        encoder, wanted, contents, options.root, options.batch_size, options.memory_mb, process_group,
        options.embedding_dims,
    )  # fmt: skip
    draw_seed = options.seed if encoder.settings.generation.temperature > 0 else None
    return Session(options, wanted, protocol, embeddings, draw_seed, warnings, audit, shared)


def _conditions(options: RunOptions) -> list[Condition]:
    one_of("query_mode", options.query_mode, MODES)
    one_of("query_modality", options.query_modality, MODALITIES)
    if options.memory_mb <= 0:
        raise UserError(f"memory_mb must be above 0, got {options.memory_mb:g}")
    options.protocol()
    options.check_model()
    conditions = [
        Condition(
            mode,
            modality,
            options.out / f"{mode}-{modality}",
            rerun_command("run", replace(options, query_mode=(mode,), query_modality=(modality,))),
        )
        for mode, modality in product(MODES, MODALITIES)
        if mode in options.query_mode and modality in options.query_modality
    ]
    if len(conditions) == 1:
        return [replace(conditions[0], out=options.out)]
    if (options.out / RESULTS).exists():
        raise UserError(
            f"{options.out} holds a single evaluation, but this command would write {len(conditions)}: choose another out="
        )
    return conditions


def _audit(train: Sequence[str], encoder: Embeds, wanted: RetrievalSet) -> Audit | None:
    files = [Path(name) for name in train if name != "null"]
    if train == ("auto",):
        files = training_files(encoder.settings.recipe)
    return audit_training(wanted, files) if files else None


def _warnings(
    conditions: Sequence[Condition], encoder: Embeds, wanted: RetrievalSet, audit: Audit | None
) -> list[str]:
    """Caveats for readers of the figures."""
    out = list(wanted.meta.get("notes", []))
    if encoder.settings.reasons == "none" and any(condition.mode == "reasoning" for condition in conditions):
        out.append(
            "query_mode=reasoning, but according to rge.json this checkpoint was trained without rationales (reasons: none): "
            "use query_mode=direct"
        )
    return out + list(encoder.settings.notes) + (audit.warnings if audit is not None else [])


def _of_condition(shared: Mapping[str, Any], condition: Condition) -> dict[str, Any]:
    return {"query_mode": condition.mode, "query_modality": condition.modality, **shared}


def _decides(options: RunOptions, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that determine the figures, except software, machine, batch size and condition; see `check_out`."""
    keys = ("checkpoint_hash", "decoding", "embedding_dims", "candidate_mode", "depth", "dtype", "exact")
    return {
        "set.limit": options.limit,
        **{key: shared[key] for key in keys},
        "prompts.profile": shared["prompts"]["profile"],
        "rewrite.kind": options.rewrite,
        "rewrite.model": options.rewriter_model,
    }


def _shared(options: RunOptions, wanted: RetrievalSet, encoder: Embeds) -> dict[str, Any]:
    """Content of results.json that is the same for all conditions."""
    known = encoder.settings
    instructions = sorted({item.instruction or "" for item in wanted.queries})
    return {
        "embedding_dims": options.embedding_dims,
        "candidate_mode": options.candidate_mode,
        "model": {
            "name": known.model or str(options.checkpoint or options.model),
            "adapter": known.adapter,
            "revision": known.revision,
        },
        "checkpoint": str(encoder.checkpoint),
        "checkpoint_hash": encoder.checkpoint_hash,
        "prompts": {
            "profile": known.profile,
            "templates": asdict(PROFILES[known.profile]) if known.profile in PROFILES else None,
            "instructions": instructions[:MAX_INSTRUCTIONS],
            "num_instructions": len(instructions),
        },
        "rewrite": options.rewrite_settings(wanted.meta),
        "settings": {
            key: value for key, value in known.content().items() if key not in ("recipe", "identity")
        },
        "decoding": known.generation.content(),
        "dtype": known.dtype,
        "exact": known.exact,
        # for adapters of released models: whether settings are those of the released code; else None
        "asked_as_released": None if (differs := known.differs_from_release) is None else not differs,
        "batch_size": options.batch_size,
        "depth": options.depth,
    }
