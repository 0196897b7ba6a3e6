"""Evaluate a checkpoint on a retrieval set.

    rge eval run checkpoint=DIR set=DIR out=DIR [query_mode=reasoning,direct] [query_modality=both,text,image]

set --sets--> items --encode--> embeddings (sharded, resumable) --search--> ranking --metrics, stats--> outputs --report-->

Candidates are encoded once for all conditions; a condition is a query mode and a query modality. A single condition is
written to ``out`` itself, several to ``out/<mode>-<modality>``. Under ``accelerate launch`` all processes encode into one
cache, and the first one does the rest.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
from pydantic import Field

from eval.benchmarks.registry import MeasureOptions
from eval.benchmarks.suite import is_suite, load_suite, measure_members
from eval.commands.audit import Audit, audit_training, training_files
from eval.embedding.fill_cache import Embeds, Mode, mean_cosine
from eval.embedding.processes import join
from eval.embedding.set_embeddings import Embeddings, contents_of
from eval.judging.rewrite import RewriteOptions, rewritten
from eval.models.registry import ModelOptions
from eval.scoring.evaluation import decides, write_evaluation
from eval.scoring.output_files import RESULTS, check_out, rerun_command, self_retrieval, value_at
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
DETERMINES = (
    "checkpoint_hash", "decoding", "embedding_dims", "candidate_mode", "depth", "dtype", "exact", "prompts.profile",
    "rewrite.kind", "rewrite.model", "query_mode", "query_modality",
)  # fmt: skip
"""Keys of results.json that determine the figures beside those of `decides`; not software, machine and batch size."""
UNTRAINED = (
    "query_mode=reasoning, but according to rge.json this checkpoint was trained without rationales (reasons: none): "
    "use query_mode=direct"
)


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
    memory_mb: Annotated[float, Field(gt=0)] = 2048.0
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
        return _run_suite(options, cache(load or options.loader()))  # all members share one model
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
            "mean_cosine": {"query": mean_cosine(encoded.embeddings), "candidate": mean_cosine(candidate_CD)},
            "embedding_dim": candidate_CD.shape[1],
        }
        print()
        name = f"{condition.mode}-{condition.modality}"
        session.check_out(condition)  # again: another process may have finished meanwhile
        session.write(condition, ranking, encoded, figures, tag=name, title=name.replace("-", ", "))
    metric = "recall@1" if options.benchmark == "generic" else session.protocol.headline[0]
    write_page(options, dirs, page="set", metric=metric)
    return dirs


def _run_suite(options: RunOptions, load: Callable[..., Embeds]) -> list[Path]:
    dirs = measure_members(
        load_suite(options.set),
        options,
        lambda _, path, out: run(options.of_member(path, out), load),
        title=options.query_mode[0],
    )
    if join().is_first:
        write_page(options, dirs, page="leaderboard")
    return dirs


def write_page(options: RunOptions, dirs: Sequence[Path], **more: Any) -> None:
    """Write ``report.html`` unless report=false; ``more``: further options of `eval.pages.report`."""
    if options.report:
        # not at the top: results record every loaded package, and pages do not change figures
        from eval.pages.report import ReportOptions, report

        print()
        report(ReportOptions(runs=tuple(map(str, dirs)), out=options.out / "report.html", **more))


@dataclass(frozen=True)
class Session:
    """A checked set, an encoder's embeddings of it, and what all conditions have in common."""

    options: RunOptions
    wanted: RetrievalSet  # prepared by the protocol
    protocol: Protocol
    embeddings: Embeddings
    draw_seed: int | None  # of sampled rationales; None for greedy decoding
    audit: Audit | None  # overlap with the training files; None if none are known
    shared: Mapping[str, Any]  # content of results.json that is the same for all conditions

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

    def about(self, condition: Condition) -> dict[str, Any]:
        """What a condition measures and how, for results.json."""
        return {"query_mode": condition.mode, "query_modality": condition.modality, **self.shared}

    def warnings(self, mode: Mode) -> list[str]:
        """Caveats for readers of the figures."""
        settings = self.embeddings.encoder.settings
        untrained = [UNTRAINED] if mode == "reasoning" and settings.reasons == "none" else []
        audited = [] if self.audit is None else self.audit.warnings
        return [*self.wanted.meta.get("notes", []), *untrained, *settings.notes, *audited]

    def check_out(self, condition: Condition) -> None:
        """Raise a UserError if the output directory holds another evaluation."""
        about, options = self.about(condition), self.options
        determined = decides(self.wanted, self.protocol, options.seed) | {"set.limit": options.limit}
        determined |= {key: value_at(about, key.split(".")) for key in DETERMINES}
        check_out(condition.out, determined, overwrite=options.overwrite, measured=about)

    def write(
        self,
        condition: Condition,
        ranking: Ranking,
        encoded: Encoded,
        more: Mapping[str, Any],
        *,
        tag: str,
        title: str | None = None,
    ) -> dict[str, Any]:
        """Score a ranking and write its output directory; returns the content of results.json.

        ``more``: further keys of results.json. ``tag``: suffix of the run file's tag. ``title``: see `write_evaluation`.
        """
        about = {
            **self.about(condition),
            "warnings": self.warnings(condition.mode),
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
            tag=f"{self.shared['checkpoint_hash'][:12]}-{tag}",
            seed=self.options.seed,
            encoded=encoded,
            limit=self.options.limit,
            made_with=self.embeddings.made_with,
            title=title,
        )


def start(
    options: RunOptions, conditions: Sequence[Condition], load: Callable[..., Embeds] | None = None
) -> Session:
    """Check the set and the output directories, read all pictures once, load the encoder and print warnings."""
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
    files = [Path(name) for name in options.train if name != "null"]
    if options.train == ("auto",):
        files = training_files(encoder.settings.recipe)
    audit = process_group.once(lambda: audit_training(wanted, files) if files else None)
    embeddings = Embeddings(
        encoder, wanted, contents, options.root, options.batch_size, options.memory_mb, process_group,
        options.embedding_dims,
    )  # fmt: skip
    draw_seed = options.seed if encoder.settings.generation.temperature > 0 else None
    shared = _shared(options, wanted, encoder)
    session = Session(options, wanted, protocol, embeddings, draw_seed, audit, shared)
    warnings = chain.from_iterable(session.warnings(condition.mode) for condition in conditions)
    for warning in dict.fromkeys(warnings) if process_group.is_first else ():
        print(f"WARNING: {warning}", file=sys.stderr, flush=True)
    for condition in conditions:
        session.check_out(condition)
    return session


def _conditions(options: RunOptions) -> list[Condition]:
    one_of("query_mode", options.query_mode, MODES)
    one_of("query_modality", options.query_modality, MODALITIES)
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
