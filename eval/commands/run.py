"""Evaluate a checkpoint on a retrieval set.

    rge eval run checkpoint=DIR set=DIR out=DIR [query_mode=reasoning,direct] [query_modality=both,text,image]

set --sets--> items --encode--> embeddings (sharded, resumable) --search--> ranking --metrics, stats--> outputs --report-->

Candidates are encoded once and serve every condition; a condition is a query mode with a query modality. One condition
is written to ``out`` itself, several to ``out/<mode>-<modality>`` each. Under ``accelerate launch`` all processes encode
into one cache, and the first one does the rest.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from eval.benchmarks.registry import MeasureOptions
from eval.benchmarks.suite import is_suite, run_members
from eval.commands.audit import Audit, audit_training, training_files
from eval.embedding.fill_cache import Embeds, Mode, mean_cosine
from eval.embedding.processes import Team, join
from eval.embedding.set_embeddings import Embeddings, contents_of, is_sampled
from eval.judging.rewrite import PROMPTS, RewriteOptions, rewritten
from eval.scoring.evaluation import decides, write_evaluation
from eval.scoring.output_files import RESULTS, again, check_out, self_retrieval
from eval.scoring.protocol import Protocol
from eval.scoring.search import DEPTH, Ranking, rows_within, search
from eval.scoring.tables import summary
from eval.sets.retrieval_set import MODALITIES, Modality, RetrievalSet, load_set, with_content
from rge.common.errors import UserError
from rge.common.files import checkpoint_folder
from rge.common.options import one_of
from rge.common.prompt_profiles import PROFILES
from rge.common.schema import Encoded

MODES: tuple[Mode, ...] = get_args(Mode)
MAX_INSTRUCTIONS = 20
"""Instructions listed in results.json; a set may have one a query."""


@dataclass(kw_only=True)
class RunOptions(RewriteOptions, MeasureOptions):
    """Embed a retrieval set, search it, score the ranking and write a report."""

    checkpoint: Path | None = None
    """Checkpoint directory with ``rge.json``, or ``demo``; equivalent to model=DIR."""
    model: str | None = None
    """Any embedder of `eval.models.registry`: a directory, or an id on the Hugging Face hub."""
    adapter: str | None = None
    """How that embedder is prompted; null: inferred from its files."""
    as_: Literal["release"] | None = None
    """release: prompt the released RGE checkpoint as its authors' own evaluation does (`eval.models.released`), with
    MMEB imported with verbatim=true; null: as rge prompts every model of that kind."""
    revision: str | None = None
    """Commit, tag or branch of an id on the hub."""
    base: str | None = None
    """Directory or hub id of the base model of adapters (a checkpoint of rge, or a LoRA); null: the one in their files."""
    query_mode: tuple[str, ...] = ("reasoning",)
    """reasoning and/or direct: whether a query writes a rationale before it is embedded."""
    query_modality: tuple[str, ...] = ("both",)
    """both, text and/or image: the parts of a query that are used, for the shortcut ablations."""
    batch_size: int = 32
    """Items embedded, and rationales written, at once; affects speed and memory, not the embeddings."""
    exact: bool | None = None
    """Embed every item alone, so that run.trec is the same to the last digit for any batch_size= and number of
    processes; null: only in float32 on a CPU. Without it, embeddings differ by rounding (about 1e-6)."""
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
    device: str | None = None
    """Device, such as cuda:0; null: a GPU if there is one."""
    dtype: str | None = None
    """Dtype of the weights; null: float32 on CPU, the recipe's on GPU."""
    engine: Literal["own", "vllm"] = "own"
    """What writes the rationales of a checkpoint of rge: the model itself, or vLLM (docs/serving.md)."""
    vllm_memory: float = 0.5
    """Share of a GPU's memory for vLLM, which holds a second copy of the language model and its cache."""
    max_new_tokens: int | None = None
    """Cap on a rationale in tokens; null: the checkpoint's."""
    temperature: float | None = None
    """Sampling temperature of rationales; null: the checkpoint's setting, which is greedy."""
    seed: int = 0
    """Seed of the resampling and of sampled rationales."""
    prompts: str | None = None
    """Prompt profile; null: the set's if it names one, else the checkpoint's."""
    train: tuple[str, ...] = ("auto",)
    """Training files (JSON lines) to search for the set's pictures; auto: those that rge.json names; null: none."""
    report: bool = True
    """Whether to write report.html."""


@dataclass(frozen=True)
class Condition:
    """A way of asking: mode, modality, and the directory that its output goes to."""

    mode: Mode
    modality: Modality
    out: Path


def run(options: RunOptions, load: Callable[..., Embeds] | None = None) -> list[Path]:
    """Evaluate, write the outputs, and return their directories.

    ``load``: makes the encoder; `eval.models.registry.load_model` by default.

    Raises:
        UserError: something given is wrong; see the modules named above.
    """
    conditions = _conditions(options)
    if is_suite(options.set):
        dirs = run_members(options, run, load or default_loader(options))
        if options.report and join().is_first:
            from eval.pages.boards.leaderboard import write_leaderboard

            print(f"\n{write_leaderboard([str(path) for path in dirs], options.out / 'report.html')}")
        return dirs
    session = start(options, conditions, load)
    embeddings, seed = session.embeddings, session.seed
    dirs = [one.out for one in conditions]
    embeddings.fill_candidates(options.candidate_mode, seed)
    if session.team.is_first:
        candidate_CD = embeddings.candidates(options.candidate_mode, seed)  # refuses what cannot be ranked
    for one in conditions:
        embeddings.fill_queries(one.mode, one.modality, seed)
    if not session.team.is_first:
        return dirs
    for one in conditions:
        encoded = embeddings.queries(one.mode, one.modality, seed)
        ranking = session.rank(encoded.embeddings, candidate_CD)
        warnings = [w for w in session.warnings if one.mode == "reasoning" or not w.startswith("query_mode")]
        figures = {
            "warnings": warnings,
            "mean_cosine": {"query": mean_cosine(encoded.embeddings), "candidate": mean_cosine(candidate_CD)},
            "embedding_dim": candidate_CD.shape[1],
        }
        results = session.write(one, ranking, encoded, figures)
        print(
            f"\n{session.wanted.name}: {one.mode}, {one.modality} -> {one.out}\n"
            f"{summary(results, (*session.protocol.headline, *options.metrics))}",
            flush=True,
        )
    if options.report:
        from eval.pages.report import write_report

        metric = "recall@1" if options.benchmark == "generic" else session.protocol.headline[0]
        print(f"\n{write_report(dirs, options.out / 'report.html', metric=metric)}")
    return dirs


@dataclass(frozen=True)
class Session:
    """An encoder, loaded, in front of a checked set.

    Attributes:
        wanted: the set, as the protocol wants it.
        warnings: what a reader of the figures has to know.
        audit: what training saw of the set; None if there is nothing to look into.
        seed: of drawn rationales; None where the encoder decodes greedily.
    """

    options: RunOptions
    wanted: RetrievalSet
    protocol: Protocol
    encoder: Embeds
    embeddings: Embeddings
    warnings: list[str]
    audit: Audit | None
    team: Team
    seed: int | None

    def rank(self, query_QD: np.ndarray, candidate_CD: np.ndarray) -> Ranking:
        """Exact search with the set's exclusions and candidate lists."""
        return search(
            query_QD,
            candidate_CD,
            depth=self.options.depth,
            excluded=self.wanted.excluded,
            candidates=self.wanted.candidates,
            block_rows=rows_within(self.options.memory_mb, candidate_CD.shape[1]),
        )

    def write(
        self, condition: Condition, ranking: Ranking, encoded: Encoded, more: Mapping[str, Any], tag: str = ""
    ) -> dict[str, Any]:
        """Score a ranking and write its output directory.

        ``more``: further keys of results.json. ``tag``: of the run file, after the checkpoint's hash; default: mode and modality.

        Returns:
            Content of results.json.
        """
        about = {
            **_measured_with(self.options, self.wanted, self.encoder, condition),
            "warnings": self.warnings,
            "audit": self.audit.content if self.audit is not None else None,
            "self_retrieval": self_retrieval(ranking, self.embeddings.contents.own),
            "again": again(
                "run",
                replace(self.options, query_mode=(condition.mode,), query_modality=(condition.modality,)),
            ),
            **more,
        }
        return write_evaluation(
            condition.out,
            self.wanted,
            ranking,
            self.protocol,
            about,
            tag=f"{self.encoder.checkpoint_hash[:12]}-{tag or f'{condition.mode}-{condition.modality}'}",
            seed=self.options.seed,
            encoded=encoded,
            limit=self.options.limit,
            made_with=self.embeddings.made_with,
        )


def start(
    options: RunOptions, conditions: Sequence[Condition], load: Callable[..., Embeds] | None = None
) -> Session:
    """Check the set, read its pictures once, load the encoder and say what has to be said.

    Raises:
        UserError: something given is wrong, or an output directory holds something else.
    """
    team = join()
    wanted = load_set(options.set, by=options.by)
    protocol = options.protocol(wanted)
    whole = wanted = protocol.prepare(wanted)
    if options.limit is not None:
        wanted = wanted.first(options.limit)
    protocol.check_depth(wanted, options.depth)
    root = options.cache or options.out / ".cache"
    rewriter = options.load_rewriter(root)
    if rewriter is not None:
        wanted = team.once(lambda: rewritten(wanted, rewriter))
    # One pass over all pictures before the model is loaded: it names what the embeddings depend on, and a missing
    # picture shows now instead of in the last shard.
    modalities = list(dict.fromkeys(one.modality for one in conditions))
    contents = team.once(lambda: contents_of(wanted, modalities))
    content = team.once(lambda: with_content(whole, contents.candidates).content)
    wanted = replace(wanted, content=content)
    verbatim = wanted.meta.get("prompts") == "verbatim"
    if verbatim and options.as_ != "release":
        raise UserError(
            f"{wanted.path} was imported with verbatim=true: its texts hold places for pictures, which only as=release reads"
        )
    encoder = _load(options, load, wanted.meta.get("prompts"))
    needs, given = encoder.settings.mmeb_instructions, wanted.meta.get("instructions")
    if verbatim and given != needs:
        raise UserError(
            f"{wanted.path} was imported with instructions={given}; as=release needs instructions={needs}"
        )
    audit = team.once(lambda: _audit(options, encoder, wanted))
    warnings = _warnings(conditions, encoder, wanted, audit)
    for warning in warnings if team.is_first else ():
        print(f"WARNING: {warning}", file=sys.stderr, flush=True)
    for one in conditions:
        measured = _measured_with(options, wanted, encoder, one)
        identity = _decides(options, wanted, protocol, measured)
        check_out(one.out, identity, overwrite=options.overwrite, measured=measured)
    embeddings = Embeddings(
        encoder, wanted, contents, root, options.batch_size, options.memory_mb, team, options.embedding_dims
    )
    seed = options.seed if is_sampled(encoder) else None
    return Session(options, wanted, protocol, encoder, embeddings, warnings, audit, team, seed)


def _conditions(options: RunOptions) -> list[Condition]:
    one_of("query_mode", options.query_mode, MODES)
    one_of("query_modality", options.query_modality, MODALITIES)
    if options.memory_mb <= 0:
        raise UserError(f"memory_mb must be above 0, got {options.memory_mb:g}")
    options.protocol()
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
        files = training_files(encoder.settings.recipe)
    return audit_training(wanted, files) if files else None


def _warnings(
    conditions: Sequence[Condition], encoder: Embeds, wanted: RetrievalSet, audit: Audit | None
) -> list[str]:
    """What a reader of the figures has to know first."""
    out = list(wanted.meta.get("notes", []))
    if encoder.settings.reasons == "none" and any(one.mode == "reasoning" for one in conditions):
        out.append(
            "query_mode=reasoning, but rge.json says that this checkpoint was trained without rationales (reasons: none): "
            "its embeddings after a rationale are not what it was trained for; query_mode=direct is"
        )
    return out + list(encoder.settings.notes) + (audit.warnings if audit is not None else [])


def _load(options: RunOptions, load: Callable[..., Embeds] | None, of_set: str | None = None) -> Embeds:
    """The embedder, set to ask as the options and the set want."""
    if options.exact and options.engine != "own":
        raise UserError("exact=true embeds every item alone, which vLLM does not do: use engine=own")
    if (options.checkpoint is None) == (options.model is None):
        given = "neither" if options.model is None else f"{options.checkpoint} and {options.model}"
        raise UserError(f"give checkpoint=DIR or model=NAME, got {given}")
    name = str(options.model)
    if options.checkpoint is not None:
        checkpoint = checkpoint_folder(options.checkpoint)
        name = str(checkpoint)
        if load is None:
            _check_checkpoint(checkpoint, options.adapter)
    encoder = (load or default_loader(options))(
        name,
        device=options.device,
        dtype=options.dtype,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
    )
    for mode in options.query_mode:
        encoder.settings.check_mode(mode)
    profile, told = options.prompts or of_set, encoder.settings
    exact = options.exact
    if exact is None:
        exact = options.engine == "own" and (told.dtype, told.device) == ("float32", "cpu")
    return encoder.with_(
        exact=exact or None,
        profile=None if profile == told.profile else profile,
    )


def _check_checkpoint(checkpoint: Path, adapter: str | None) -> None:
    if not checkpoint.is_dir():
        raise UserError(
            f"checkpoint {checkpoint} does not exist; model=NAME also takes an id on the Hugging Face hub"
        )
    if adapter is None and not (checkpoint / "rge.json").is_file():
        raise UserError(
            f"checkpoint {checkpoint} has no rge.json, which says how it is asked: it is not finished, or lost it on the "
            "way. An embedder of others is named by model="
        )


def default_loader(options: RunOptions) -> Callable[..., Embeds]:
    """What loads the embedder that the options name."""
    from eval.models.registry import load_model

    asked: dict[str, Any] = {
        "adapter": options.adapter,
        "revision": options.revision,
        "base": options.base,
        "as_released": options.as_ == "release",
    }
    if options.engine != "own":
        asked |= {
            "engine": options.engine,
            "vllm_memory": options.vllm_memory,
            "vllm_rows": options.batch_size,
        }
    return partial(load_model, **asked)


def _decides(
    options: RunOptions, wanted: RetrievalSet, protocol: Protocol, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """What decides the figures beside how the embedder is asked, but for software, machine and batch size; see `check_out`."""
    told = (
        "checkpoint_hash", "decoding", "query_mode", "query_modality", "embedding_dims", "candidate_mode", "depth", "dtype", "exact",
    )  # fmt: skip
    return {
        **decides(wanted, protocol, options.seed),
        "set.limit": options.limit,
        **{key: measured[key] for key in told},
        "prompts.profile": measured["prompts"]["profile"],
        "rewrite.kind": options.rewrite,
        "rewrite.model": options.rewriter_model,
    }


def _measured_with(
    options: RunOptions, wanted: RetrievalSet, encoder: Embeds, condition: Condition
) -> dict[str, Any]:
    """What results.json says of how it was measured."""
    known = encoder.settings
    return {
        "query_mode": condition.mode,
        "query_modality": condition.modality,
        "embedding_dims": options.embedding_dims,
        "candidate_mode": options.candidate_mode,
        "model": {
            "name": known.model or str(options.checkpoint or options.model),
            "adapter": known.adapter,
            "revision": known.revision,
        },
        "checkpoint": str(encoder.checkpoint),
        "checkpoint_hash": encoder.checkpoint_hash,
        "prompts": _prompts(wanted, encoder),
        "rewrite": None
        if options.rewrite is None
        else {
            "kind": options.rewrite,
            "model": options.rewriter_model,
            "prompts": PROMPTS[options.rewrite],
            **wanted.meta["rewriter"],
        },
        "settings": {
            key: value for key, value in known.content().items() if key not in ("recipe", "identity")
        },
        "decoding": known.generation.content(),
        "dtype": known.dtype,
        "exact": known.exact,
        # for an adapter of a released model: whether it is asked as the release's own code asks it; else None
        "asked_as_released": None if (differs := known.differs_from_release) is None else not differs,
        "batch_size": options.batch_size,
        "depth": options.depth,
    }


def _prompts(wanted: RetrievalSet, encoder: Embeds) -> dict[str, Any]:
    """How queries and candidates were worded: the profile's templates and the set's instructions."""
    profile = encoder.settings.profile
    instructions = sorted({item.instruction or "" for item in wanted.queries})
    return {
        "profile": profile,
        "templates": asdict(PROFILES[profile]) if profile in PROFILES else None,
        "instructions": instructions[:MAX_INSTRUCTIONS],
        "num_instructions": len(instructions),
    }
