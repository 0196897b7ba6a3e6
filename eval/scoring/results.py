"""Content of ``results.json``, typed: how a ranking was made, what is measured, and the figures.

The types say what else one has to know about a key: `DECIDES` marks what determines the figures, and `Asked` holds what a
reranking copies from the first ranking, and what the members of a suite have in common.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict

from eval.sets.retrieval_set import Modality
from rge.identity.run_identity import Identity

FORMAT: Literal[1] = 1
DECIDES = "decides"
"""Mark of keys that determine the figures, unlike software, machine and batch size: an output directory with another value of one
holds a different evaluation."""

Number = int | float | None
Figure = dict[str, Number]
"""``value``, and the bounds of its interval, ``low`` and ``high``; fractions."""
Figures = dict[str, Figure]
"""By metric."""


class Block(BaseModel):
    """A part of results.json; keys of protocols and plugins are kept. A key may be known to be None, or be not known yet."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    def as_json(self) -> dict[str, Any]:
        """The known values, for files."""
        return self.model_dump(exclude_unset=True)

    def but(self, **changes: Any) -> Self:
        """A copy with other values."""
        return type(self).model_validate(self.as_json() | changes)

    def as_read(self) -> Self:
        """As it will be read from the file."""
        return type(self).model_validate_json(json.dumps(self.as_json(), default=str))

    def look_up(self, path: Sequence[str]) -> Any:
        """The value at a path of keys, or None."""
        value: Any = self
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        return value


class ImportedWith(Block):
    """Options of an import that affect a set's content or counts; they explain differences between sets with the same ids."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    instructions: Any = None
    verbatim: Any = None
    image_policy: Any = None
    query_images: Any = None
    task: Any = None
    keys: Any = None
    gains: Any = None
    layout: Any = None
    pool: Any = None
    exclude_query_image: Any = None

    def as_json(self) -> dict[str, Any]:
        """Without what was not given."""
        return self.model_dump(exclude_none=True)


class SetFacts(Block):
    """The measured set, or suite."""

    name: str
    fingerprint: Annotated[str, DECIDES]
    content: Annotated[str | None, DECIDES] = None
    made_with: dict[str, Any] | None = None  # see `ImportedWith`
    num_queries: int = 0
    num_candidates: int = 0
    num_groups: int | None = None
    report_by: Annotated[list[str], DECIDES] = []
    limit: Annotated[int | None, DECIDES] = None
    path: str | None = None
    split: str | None = None
    num_members: int | None = None  # of a suite
    members: dict[str, str] | None = None  # their fingerprints


class ModelFacts(Block):
    """The model behind a ranking."""

    name: str | None = None
    adapter: str | None = None
    revision: str | None = None


class Prompts(Block):
    """Wording around the items."""

    profile: Annotated[str | None, DECIDES] = None
    templates: dict[str, Any] | None = None
    instructions: Annotated[list[str] | None, DECIDES] = None
    num_instructions: int | None = None


class Rewritten(Block):
    """How queries were rewritten, see `eval.judging.rewrite.Rewriter.about`."""

    kind: Annotated[str, DECIDES]
    model: Annotated[str | None, DECIDES] = None
    replaces: Annotated[bool | None, DECIDES] = None


class Reranked(Block):
    """How a ranking was reordered by a judge, see `eval.commands.rerank`."""

    of: Annotated[str, DECIDES]
    top_n: Annotated[int, DECIDES]
    mix: Annotated[float | None, DECIDES] = None
    judge: Annotated[Any, DECIDES] = None
    ask: str | None = None
    seed: int | None = None  # of the first ranking's sampled rationales
    num_pairs: int = 0
    ms_mean: float = 0.0
    unscored: dict[str, int] = {}
    counts: dict[str, int] = {}
    before: Figures = {}


class Point(Block):
    """A point of ``rge eval budget``, which may have further keys."""

    name: str
    curve: str | None = None
    at: Number = None
    tokens: Number = None
    ms: Number = None
    gflops: Number = None


class AnswersAsked(Block):
    """What determines answers and their scores, see `eval.commands.rag`."""

    row: str | None = None
    of: str | None = None
    top_n: int | None = None
    document_chars: int | None = None
    answer_tokens: int | None = None
    judge_tokens: int | None = None
    models: Any = None
    wording: str | None = None
    references: str | None = None


class Answers(AnswersAsked):
    """Answers written from the ranking."""

    counts: dict[str, int] = {}
    agreement: Any = None


class Rerun(Block):
    """The command that reproduces an evaluation, without its output directory."""

    command: str
    options: dict[str, Any]


class Asked(Block):
    """How an embedder was asked for a ranking."""

    query_mode: Annotated[str | None, DECIDES] = None
    query_modality: Annotated[Modality | None, DECIDES] = None
    candidate_mode: Annotated[str | None, DECIDES] = None
    model: ModelFacts | None = None
    checkpoint: str | None = None
    checkpoint_hash: Annotated[str | None, DECIDES] = None
    prompts: Prompts | None = None
    rewrite: Rewritten | None = None
    settings: dict[str, Any] | None = None  # see `rge.checkpoints.settings.Settings`; of BM25 its own
    decoding: Annotated[dict[str, Any] | None, DECIDES] = None
    dtype: Annotated[str | None, DECIDES] = None
    exact: Annotated[bool | None, DECIDES] = None
    embedding_dims: Annotated[int | None, DECIDES] = None
    asked_as_released: bool | None = None

    def asked(self) -> "Asked":
        """This part of a larger block."""
        return Asked(**{name: value for name, value in self.as_json().items() if name in Asked.model_fields})


class Made(Asked):
    """How a ranking was made."""

    tag: Annotated[str | None, DECIDES] = None
    run_hash: Annotated[str | None, DECIDES] = None  # of a run file
    depth: Annotated[int | None, DECIDES] = None
    batch_size: int | None = None
    ranked_with: dict[str, Any] | None = None  # see `eval.scoring.identity.ranked_with`
    rerank: Reranked | None = None
    rag: Answers | None = None
    budget: Point | None = None
    coverage: float = 1.0  # share of the queries with a ranking
    warnings: list[str] = []
    again: Rerun | None = None
    audit: dict[str, Any] | None = None
    self_retrieval: dict[str, Any] | None = None


class MadeFromRun(Made):
    """Read from a run file."""

    run: str
    num_missing: int  # queries without a line
    num_short: int  # queries with fewer candidates than the metrics need
    num_excluded_lines: int


class Measured(Made):
    """What is measured, and how: all but the figures."""

    format: Literal[1] = FORMAT
    set: SetFacts
    benchmark: Annotated[str, DECIDES] = "generic"
    profile: Annotated[str, DECIDES] = "clean"
    protocol: list[str] = []
    metrics: Annotated[list[str], DECIDES] = []
    seed: Annotated[int | None, DECIDES] = None  # of the resampling


class Results(Measured):
    """All of it. Figures of the values of a column are in blocks ``by_COLUMN``, see `by`."""

    micro: Figures
    macro: Figures = {}
    ties: dict[str, dict[str, float]] = {}
    random: dict[str, float] = {}  # of a random ranking
    headline: list[dict[str, str | Number]] = []
    rationale: dict[str, float | None] = {}
    statistics: dict[str, Any] = {}
    versions: dict[str, str] = {}
    identity: Identity = {}
    plugins: Any = None
    official: dict[str, float] = {}  # as released code rounds and names them
    main_score: dict[str, str | Number] | None = None  # of a benchmark whose sets have different ones
    suite: str | None = None  # what its members are called
    member_dirs: dict[str, str] = {}

    @property
    def by(self) -> dict[str, dict[str, Figures]]:
        """Figures by column and value."""
        further = self.model_extra or {}
        return {key.removeprefix("by_"): block for key, block in further.items() if key.startswith("by_")}

    @property
    def overall(self) -> Figures:
        """The figures that stand for all: means over members of a suite, else over queries."""
        return self.macro if self.suite else self.micro


def decided_differently(old: Measured, new: Measured) -> dict[str, tuple[Any, Any]]:
    """Old and new value of each key that determines the figures and differs; in a block of the new one, keys may be not known yet."""
    apart = {}
    for path in _deciding(Measured):
        block = new.look_up(path[:-1])
        if len(path) > 1 and block is not None and path[-1] not in block.model_fields_set:
            continue
        was, value = old.look_up(path), new.look_up(path)
        if was != value:
            apart[".".join(path)] = was, value
    return apart


def _deciding(kind: type[Block]) -> Iterator[tuple[str, ...]]:
    for name, field in kind.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        inner = next((one for one in kinds if isinstance(one, type) and issubclass(one, Block)), None)
        if DECIDES in field.metadata:
            yield (name,)
        elif inner is not None:
            yield from ((name, *path) for path in _deciding(inner))
