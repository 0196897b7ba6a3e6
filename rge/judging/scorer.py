"""Scores of pairs of a query and a candidate: one interface for every judge, and their registry.

`eval.commands.rerank` reorders rankings by these scores. Your own: ``@SCORERS.register("name")`` over a function from `Judge` to a
`Scorer`, in a module of ``plugins=`` (docs/extending.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rge.calls.grouping import Outcome
from rge.calls.model_config import ModelConfig
from rge.calls.store import AnswerStore, value_key
from rge.common.errors import UserError
from rge.common.registry import Registry
from rge.common.schema import Item
from rge.identity.run_identity import digest, still_valid

SOFTWARE, MOST_SOFTWARE = "software of local models", 1000
"""Key of a store's records of the software behind its scores and texts, and their maximum number."""
FETCHED = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"]
"""Patterns of the files to fetch from a hub repository."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a pair, higher is better; or None, and why there is none."""

    value: float | None
    why: str | None = None  # such as ``refusal``


@dataclass(frozen=True)
class Judge:
    """The model behind a scorer: one in this process, or one behind an endpoint."""

    model: str | None = None  # directory or hub id
    endpoint: ModelConfig | None = None
    batch_size: int = 16  # pairs per forward pass
    device: str | None = None  # None: a GPU if there is one
    dtype: str | None = None  # None: float32 on CPU, bfloat16 on a GPU
    answers: AnswerStore = field(default_factory=lambda: AnswerStore(None))  # of an endpoint


class Scorer:
    """Scores pairs of a query and a candidate.

    Attributes:
        name: everything that determines the scores except the software; part of cache keys.
        first: what a prompt begins with, which is computed once for pairs that share it.
        local: whether the model runs in this process, so that the software affects the scores.
        counts: totals of what was done, such as tokens.
    """

    name: dict[str, Any]
    first: Literal["query", "candidate"] = "query"
    local = True

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def count(self, **more: int) -> None:
        """Add to `counts`."""
        for name, number in more.items():
            self.counts[name] = self.counts.get(name, 0) + number

    def prepare(
        self, queries: Sequence[Item], rationales: Mapping[str, str], answers: AnswerStore
    ) -> list[Item]:
        """What `score` gets in the place of each query; ``rationales`` are by query id."""
        return list(queries)

    def score(self, pairs: Sequence[tuple[Item, Item]]) -> list[Score]:
        """Scores of (query, candidate) pairs; those that share `first` are best passed together."""
        raise NotImplementedError


SCORERS: Registry[Callable[[Judge], Scorer]] = Registry(
    "scorer", "rge.scorers", ["rge.judging.yes_no", "rge.judging.description"]
)
"""Functions from a `Judge` to a `Scorer`, by the name of what it is asked."""


class LocalModel:
    """A vision-language model of any family in `rge.model.families`, with its prompt builder.

    Raises:
        UserError: the judge has no model, or it cannot be loaded.
    """

    def __init__(self, judge: Judge, max_prompt_tokens: int):
        import torch

        from rge.checkpoints.export import checkpoint_hash
        from rge.common.files import read_json
        from rge.model.adapter_files import fetched, is_hub_id
        from rge.model.backbone import load_backbone
        from rge.model.embedding_model import EmbeddingModel
        from rge.model.prompts import PromptBuilder

        if judge.model is None:
            raise UserError(
                "this judge runs in the process: pass judge=MODEL, a directory or an id on the hub"
            )
        path = Path(judge.model)
        if not path.is_dir() and is_hub_id(judge.model):
            path = fetched(judge.model, None, FETCHED)
        device = judge.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = judge.dtype or ("float32" if device == "cpu" else "bfloat16")
        pixels = (read_json(path / "rge.json") or {"pixels": {"min": None, "max": None}})["pixels"]
        backbone = load_backbone(
            path, dtype=dtype, min_pixels=pixels["min"], max_pixels=pixels["max"], add_emb=True
        )
        self.embedder = EmbeddingModel(backbone).to(device).eval()
        self.builder = PromptBuilder(backbone.processor, "plain", max_prompt_tokens)
        self.about = {"judge": checkpoint_hash(path), "dtype": dtype, "max_tokens": max_prompt_tokens}


def need_answers(outcomes: Sequence[Outcome], asked: str) -> None:
    """Raise a `UserError` if calls are unanswered; ``asked``: the model, for the message."""
    if unanswered := [outcome for outcome in outcomes if outcome.unanswered]:
        raise UserError(
            f"{asked} left {len(unanswered)} of {len(outcomes)} calls unanswered, such as: {unanswered[0].error}; the other "
            "answers are stored, run the same command again to continue"
        )


def local_software(store: AnswerStore) -> str:
    """Hash of the software of models in this process, for cache keys; see `still_valid`."""
    keys = [value_key(SOFTWARE, number) for number in range(MOST_SOFTWARE)]
    known = store.get_values(keys)
    software = still_valid(list(known.values()), ("rge",))
    if software not in known.values():
        store.put_values({keys[len(known) % MOST_SOFTWARE]: software})
    return digest(software)
