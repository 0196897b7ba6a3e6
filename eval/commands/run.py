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
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import Field

from eval.benchmarks.published_tables import beside
from eval.benchmarks.registry import MeasureOptions
from eval.benchmarks.suite import is_suite, load_suite, measure_members
from eval.commands.audit import audit_run
from eval.embedding.set_embeddings import Embeddings
from eval.judging.rewrite import ALONE, RewriteOptions, rewritten
from eval.scoring.measurement import Measurement
from eval.scoring.output_files import RESULTS, read_results, rerun_command, self_retrieval
from eval.scoring.results import Made, ModelFacts, Prompts, Rerun, Rewritten
from eval.scoring.search import Ranking, rows_within, search
from eval.sets.contents import Contents, contents_of, query_contents, with_content
from eval.sets.retrieval_set import MODALITIES, Modality, RetrievalSet
from rge.checkpoints.settings import Instructions
from rge.common.errors import UserError
from rge.common.mmeb_prompts import imported_with
from rge.common.modes import Mode
from rge.common.options import AtLeastOne, Count, one_of
from rge.common.prompt_profiles import PROFILES
from rge.common.schema import Encoded
from rge.embedders.registry import ModelOptions
from rge.index.nearest import search_device
from rge.stats.intervals import few_groups
from rge.vectors.fill_cache import Embeds, mean_cosine
from rge.vectors.processes import join

MODES: tuple[Mode, ...] = get_args(Mode)
MAX_INSTRUCTIONS = 20
"""Maximum number of instructions listed in results.json; a set may have one per query."""
UNTRAINED = (
    "query_mode=reasoning, but according to rge.json this checkpoint was trained without rationales (reasons: none): "
    "use query_mode=direct"
)
UNREASONED = "candidate_mode=reasoning, but training embeds candidates without a rationale: no checkpoint has learned this mode"
IN_OTHER_WORDS = (
    "Otherwise figures can be much lower: pass instruction={default!r}, or another of those in rge.json"
)
UNINSTRUCTED = (
    "{missing} of {all} queries have no instruction; the most frequent one in this checkpoint's training was {default!r}. "
    + IN_OTHER_WORDS
)
UNKNOWN = (
    "none of the set's instructions, such as {asked!r}, is one that this checkpoint was trained with, most often {default!r}. "
    + IN_OTHER_WORDS
)
OTHER_MMEB = (
    "the set was imported with instructions={given}, but this checkpoint was trained on MMEB's records with instructions={trained}: "
    "import it in the trained words, with instructions={trained} of `rge eval import mmeb`"
)


@dataclass(kw_only=True)
class RunOptions(ModelOptions, RewriteOptions, MeasureOptions):
    """Embed a retrieval set, search it, score the ranking and write a report."""

    query_mode: tuple[str, ...] = ("reasoning",)
    """Any of reasoning (a query writes a rationale before it is embedded), direct and auto (docs/modes.md)."""
    max_rationale_tokens: Count | None = None
    """Cap on each rationale in tokens, from 0 (direct), below the model's own, max_new_tokens; null: that one."""
    query_modality: tuple[str, ...] = ("both",)
    """both, text and/or image: the parts of a query that are used, for the shortcut ablations."""
    instruction: str | None = None
    """Task instruction of every query, in place of the set's own; '': none; null: the set's."""
    limit: int | None = None
    """Use only this many queries, for a quick look; the pool stays complete."""
    cache: Path | None = None
    """Cache of embeddings; null: ``out/.cache``. Any number of runs can share one."""
    embedding_dims: AtLeastOne | None = None
    """Truncate every embedding to this many components and normalise it again, for checkpoints trained with
    loss.matryoshka_dims; null: all. The cache holds whole embeddings, so further sizes cost nothing."""
    candidate_mode: Literal["reasoning", "direct"] = "direct"
    """direct or reasoning: whether candidates get rationales too."""
    depth: int | None = None
    """Length of a ranking; null: 1000, or the largest cutoff of the metrics."""
    memory_mb: Annotated[float, Field(gt=0)] = 2048.0
    """Memory for the pool's embeddings, MB; a larger pool is searched in blocks of this size from a file in the cache."""
    seed: Count = 0
    """Seed of the resampling and of sampled rationales."""
    train: tuple[str, ...] = ("auto",)
    """Training records to search for the set's pictures: files or data sets; auto: those that rge.json names; null: none."""
    report: bool = True
    """Whether to write report.html."""

    @property
    def root(self) -> Path:
        """Folder of cached embeddings and rewritten queries."""
        return self.cache or self.out / ".cache"


@dataclass(frozen=True)
class Condition:
    """A query mode and modality, the output directory, and the command that reproduces it."""

    mode: Mode
    modality: Modality
    out: Path
    rerun_command: Rerun


def run_command(options: RunOptions, load: Callable[[], Embeds] | None = None) -> list[Path]:
    """Evaluate a set, or all members of a suite with one model, and write the page; returns the output directories.

    ``load``: loads the encoder; default `rge.embedders.registry.ModelOptions.loader`.
    """
    if is_suite(options.set):
        _check(options)  # before the model is looked up; `run` checks a set's
        load = cache(load or options.loader())
        dirs = measure_members(
            load_suite(options.set),
            replace(options, cache=options.root),  # members share it
            lambda _, of_member: run(of_member, load),
            title=options.query_mode[0],
        )
    else:
        dirs = run(options, load)
    if join().is_first:
        print(beside({path.name: read_results(path) for path in dirs}))
    if options.report and join().is_first and not is_suite(options.set):
        write_page(options.out, dirs, options.protocol().headline[0])
    return dirs


def write_page(out: Path, dirs: Sequence[Path], metric: str) -> None:
    """Write ``report.html``; ``metric``: that of a set's main table."""
    # not at the top: results record every loaded package, and pages do not change figures
    from eval.pages.report import ReportOptions, report

    print()
    report(ReportOptions(runs=tuple(map(str, dirs)), out=out / "report.html", metric=metric))


def run(options: RunOptions, load: Callable[[], Embeds] | None = None) -> list[Path]:
    """Evaluate one set under all conditions, write the outputs, and return their directories; see `run_command`."""
    num = _check(options)
    conditions = [
        Condition(
            mode,
            modality,
            options.out / f"{mode}-{modality}" if num > 1 else options.out,
            rerun_command("run", replace(options, query_mode=(mode,), query_modality=(modality,))),
        )
        for mode, modality in product(MODES, MODALITIES)
        if mode in options.query_mode and modality in options.query_modality
    ]
    session = Session(options, conditions, load)
    embeddings = session.embeddings
    embeddings.fill_candidates()
    if embeddings.process_group.is_first:
        candidate_CD = embeddings.candidates()  # raises if they cannot be ranked
    for condition in conditions:
        embeddings.fill_queries(condition.mode, condition.modality)
    for condition in conditions if embeddings.process_group.is_first else ():
        encoded = embeddings.queries(condition.mode, condition.modality)
        ranking = session.rank(encoded.embeddings, candidate_CD)
        figures = {
            "mean_cosine": {"query": mean_cosine(encoded.embeddings), "candidate": mean_cosine(candidate_CD)},
            "embedding_dim": candidate_CD.shape[1],
        }
        print()
        name = f"{condition.mode}-{condition.modality}"
        session.write(condition, ranking, encoded, figures, tag=name, title=name.replace("-", ", "))
    return [condition.out for condition in conditions]


def _check(options: RunOptions) -> int:
    """The number of conditions; raises a `UserError` if options contradict one another, or ``out`` holds one evaluation for several."""
    one_of("query_mode", options.query_mode, MODES)
    one_of("query_modality", options.query_modality, MODALITIES)
    options.protocol()
    options.check_model()
    num = len(options.query_mode) * len(options.query_modality)
    if num > 1 and (options.out / RESULTS).exists():
        raise UserError(
            f"it holds a single evaluation, but this command would write {num}: choose another",
            options.out,
            key="out",
        )
    return num


class Session:
    """A measured set, an encoder's embeddings of it, and what all conditions have in common.

    Making one checks the set and the output directories, reads all pictures once, loads the encoder and prints warnings.

    Attributes:
        shared: content of results.json that is the same for all conditions.
        audit: overlap with the training files; None if none are known.
    """

    def __init__(
        self, options: RunOptions, conditions: Sequence[Condition], load: Callable[[], Embeds] | None = None
    ):
        modes = {(condition.mode, options.candidate_mode) for condition in conditions}
        if options.as_ == "release" and modes != {("reasoning", "direct")}:
            raise UserError(
                "queries write a rationale and candidates do not (query_mode=reasoning candidate_mode=direct)",
                key="as",
            )
        process_group = join()
        protocol, whole = options.prepared()
        wanted = whole.first(options.limit)
        if options.instruction is not None:
            given = options.instruction or None
            wanted = replace(wanted, queries=[replace(query, instruction=given) for query in wanted.queries])
        depth = protocol.depth(wanted, options.depth)
        modalities = {condition.modality for condition in conditions}
        rewriter = None if modalities == {"image"} else options.load_rewriter(options.root)
        if rewriter is not None and rewriter.kind == ALONE and "image" in modalities:
            raise UserError(
                "describe leaves no picture in a query: measure query_modality=image without it",
                key="rewrite",
            )

        def read() -> tuple[Contents, str | None]:
            contents = contents_of(wanted, modalities)
            return contents, with_content(whole, contents.candidates).content

        # One pass over all pictures before loading the model: the cache keys need their hashes, and a missing picture is
        # reported now instead of in the last shard.
        contents, content = process_group.once(read)
        wanted = replace(wanted, content=content)
        encoder = options.load(wanted.meta, wanted.path, load)
        encoder = encoder.with_(max_rationale_tokens=options.max_rationale_tokens)
        for condition in conditions:
            encoder.settings.check_mode(condition.mode)
        self.audit = process_group.once(lambda: audit_run(wanted, options.train, encoder.settings))
        self.depth = depth
        self.shared = _shared(options, wanted, encoder, depth, None if rewriter is None else rewriter.about())
        self.measurement = Measurement(wanted, protocol, options.seed, options.overwrite, options.limit)
        for condition in conditions:
            self.check_out(condition, {})
        if rewriter is not None:  # last, since its model may cost money
            asked = process_group.once(lambda: rewritten(wanted, rewriter))
            self.measurement = replace(self.measurement, wanted=asked)
            queries = process_group.once(lambda: query_contents(asked, modalities, contents.pictures))
            contents = replace(contents, queries=queries)
        self.embeddings = Embeddings(
            encoder, options.root, self.measurement.wanted, contents, options.candidate_mode, options.embedding_dims,
            options.memory_mb, process_group=process_group, batch_size=options.batch_size, seed=options.seed,
            cluster=options.cluster(wanted.meta, wanted.path, max_rationale_tokens=options.max_rationale_tokens),
        )  # fmt: skip
        warnings = [warning for condition in conditions for warning in self.warnings(condition.mode)]
        if caution := few_groups(len(set(self.measurement.wanted.columns["group"]))):
            warnings.append(caution)
        for warning in dict.fromkeys(warnings) if process_group.is_first else ():
            print(f"WARNING: {warning}", file=sys.stderr, flush=True)

    def rank(self, query_QD: np.ndarray, candidate_CD: np.ndarray) -> Ranking:
        """Exact search with the set's exclusions and candidate lists."""
        return search(
            query_QD,
            candidate_CD,
            depth=self.depth,
            excluded=self.measurement.wanted.excluded,
            candidates=self.measurement.wanted.candidates,
            block_rows=rows_within(self.embeddings.memory_mb, candidate_CD.shape[1]),
            device=search_device(),
        )

    def warnings(self, mode: Mode) -> list[str]:
        """Caveats for readers of the figures."""
        settings, wanted = self.embeddings.encoder.settings, self.measurement.wanted
        warnings = list(wanted.meta.get("notes", []))
        if mode == "reasoning" and settings.reasons == "none":
            warnings.append(UNTRAINED)
        if self.embeddings.candidate_mode == "reasoning" and settings.recipe is not None:  # trained here
            warnings.append(UNREASONED)
        warnings += other_words(wanted, settings.instructions)
        return [*warnings, *settings.notes, *(self.audit.warnings if self.audit else [])]

    def check_out(self, condition: Condition, more: Mapping[str, Any]) -> Made:
        """What a condition measures and how, for results.json; a UserError if its output directory holds another evaluation.

        ``more``: further keys of results.json.
        """
        texts = {"rewrite": None} if condition.modality == "image" else {}  # which leaves out all texts
        made = self.shared.but(
            query_mode=condition.mode, query_modality=condition.modality, **{**more, **texts}
        )
        self.measurement.check_out(condition.out, made)
        return made

    def write(
        self,
        condition: Condition,
        ranking: Ranking,
        encoded: Encoded,
        more: Mapping[str, Any],
        *,
        tag: str,
        title: str | None = None,
    ) -> None:
        """Score a ranking and write its output directory.

        ``more``: further keys of results.json. ``tag``: suffix of the run file's tag. ``title``: see `Measurement.write`.
        """
        # Checked again: another process may have finished meanwhile.
        made = self.check_out(condition, more).but(
            warnings=self.warnings(condition.mode),
            audit=self.audit.content if self.audit is not None else None,
            self_retrieval=self_retrieval(ranking, self.embeddings.contents.own),
            again=condition.rerun_command,
        )
        tag = f"{(self.shared.checkpoint_hash or '')[:12]}-{tag}"
        self.measurement.write(
            condition.out,
            ranking,
            made,
            tag=tag,
            encoded=encoded,
            made_with=self.embeddings.made_with,
            title=title,
        )


def other_words(wanted: RetrievalSet, trained: Instructions | None) -> list[str]:
    """Caveats about a set that asks in other words than a checkpoint was trained with."""
    if trained is None:
        return []
    given = wanted.meta.get("instructions")
    if wanted.meta.get("prompts"):  # the texts include their instructions
        known = imported_with(trained.known)
        if given in ("vlm2vec", "rge") and known and given not in known:
            return [OTHER_MMEB.format(given=given, trained=known.pop())]
        return []
    missing = sum(not item.instruction for item in wanted.queries)
    if missing and trained.default:
        return [UNINSTRUCTED.format(missing=missing, all=len(wanted.queries), default=trained.default)]
    asked = dict.fromkeys(item.instruction for item in wanted.queries if item.instruction)
    if asked and trained.known and asked.keys().isdisjoint(trained.known):
        default = trained.default or trained.known[0]
        return [UNKNOWN.format(asked=next(iter(asked)), default=default)]
    return []


def _shared(
    options: RunOptions, wanted: RetrievalSet, encoder: Embeds, depth: int, rewrite: Rewritten | None
) -> Made:
    """What is the same for all conditions."""
    known = encoder.settings
    instructions = sorted({item.instruction or "" for item in wanted.queries})
    return Made(
        embedding_dims=options.embedding_dims,
        candidate_mode=options.candidate_mode,
        model=ModelFacts(
            name=known.model or str(options.checkpoint or options.model),
            adapter=known.adapter,
            revision=known.revision,
        ),
        checkpoint=str(encoder.checkpoint),
        checkpoint_hash=encoder.checkpoint_hash,
        prompts=Prompts(
            profile=known.profile,
            templates=asdict(PROFILES[known.profile]) if known.profile in PROFILES else None,
            instructions=instructions[:MAX_INSTRUCTIONS],
            num_instructions=len(instructions),
        ),
        settings={
            key: value
            for key, value in known.content().items()
            if key not in ("recipe", "trained_on", "identity")
        },
        decoding=known.generation.content(),
        dtype=known.dtype,
        exact=known.exact,
        # for adapters of released models: whether settings are those of the released code; else None
        asked_as_released=None if (differs := known.differs_from_release) is None else not differs,
        batch_size=options.batch_size,
        depth=depth,
        rewrite=rewrite,
    )
