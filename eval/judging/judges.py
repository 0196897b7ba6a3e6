"""Judges: vision-language models that rate a candidate for a query, local or behind an endpoint."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eval.judging.endpoint import Endpoint, is_address, picture
from rge.calls.request import Part
from rge.calls.store import AnswerStore, key_of
from rge.common.errors import UserError
from rge.common.files import read_json
from rge.common.schema import Item
from rge.identity.run_identity import digest, still_valid

QUESTION = "Does the candidate answer the query? Answer with {yes} or {no} only."


class Judge(Protocol):
    """Scores pairs; ``name`` is part of the keys under which scores are kept."""

    name: dict[str, Any]

    def score(self, pairs: Sequence[tuple[Item, Item]]) -> list[float | None]:
        """Probability of yes for (query, candidate) pairs; None where there is no answer."""


class LocalModel:
    """A Qwen vision-language model on this machine: ours, or any that `rge.model.backbone` loads.

    Args:
        path: its directory, or id on the hub.
        dtype: of the weights; None: float32 on CPU, bfloat16 on a GPU.
        max_tokens: longest prompt; a longer one loses its end.

    Attributes:
        name: what decides its scores, but for the software.

    Raises:
        rge.model.backbone.BackboneError: it cannot be loaded.
    """

    def __init__(
        self,
        path: str,
        *,
        batch_size: int,
        device: str | None = None,
        dtype: str | None = None,
        max_tokens: int = 8192,
    ):
        from eval.models.common import place
        from rge.model.backbone import load_backbone
        from rge.model.embedding_model import EmbeddingModel
        from rge.model.prompts import PromptBuilder

        device, dtype = place(device, dtype)
        own = read_json(Path(path) / "rge.json") or {"pixels": {"min": None, "max": None}}
        # <emb> is only added because every prompt builder knows it; the judge's answer never is one.
        backbone = load_backbone(
            path,
            dtype=dtype,
            min_pixels=own["pixels"]["min"],
            max_pixels=own["pixels"]["max"],
            add_emb=True,
        )
        self._embedder = EmbeddingModel(backbone).to(device).eval()
        self._builder = PromptBuilder(backbone.processor, "plain", max_tokens)
        self._batch_size = batch_size
        self.name: dict[str, Any] = {"judge": hash_or_id(path), "dtype": dtype, "max_tokens": max_tokens}


class LocalJudge(LocalModel):
    """A model on this machine that says yes or no.

    All pictures of the query come first, then the candidate's, then the texts.

    Raises:
        UserError: a word is more than one token.
    """

    def __init__(self, path: str, *, yes: str, no: str, **options: Any):
        from eval.judging.yes_no import word_id

        super().__init__(path, **options)
        self._words = (yes, no)
        try:
            self._ids = [word_id(self._embedder, word) for word in (yes, no)]
        except ValueError as error:
            raise UserError(f"judge {path}: {error} (yes=, no=)") from None
        self.name["words"] = [yes, no]

    def score(self, pairs: Sequence[tuple[Item, Item]]) -> list[float | None]:
        """See `Judge`."""
        from eval.judging.yes_no import next_token_logits

        prompts = [self._builder.build(as_item(*pair, *self._words), "query") for pair in pairs]
        logit_N2 = next_token_logits(self._embedder, prompts, self._ids, batch_size=self._batch_size)
        difference_N = (logit_N2[:, 0] - logit_N2[:, 1]).astype(np.float64)
        return [1 / (1 + float(np.exp(min(-one, 700.0)))) for one in difference_N]


class RemoteJudge:
    """A model behind an endpoint; pictures stand where their texts are."""

    def __init__(self, endpoint: Endpoint, *, yes: str, no: str):
        self._endpoint, self._words = endpoint, (yes, no)
        self.name = {"judge": endpoint.model, "words": [yes, no], **endpoint.served}

    def score(
        self,
        pairs: Sequence[tuple[Item, Item]],
        on_score: Callable[[int, float | None], object] = lambda place, score: None,
    ) -> list[float | None]:
        """See `Judge`; ``on_score`` is called with place and score as soon as one is there."""
        yes, no = self._words
        prompts = []
        for query, candidate in pairs:
            parts: list[Part] = [QUESTION.format(yes=yes, no=no), "Query:"]
            parts += [picture(ref) for ref in query.images]
            parts += [text for text in (query.instruction, query.text) if text]
            parts += ["Candidate:", *(picture(ref) for ref in candidate.images)]
            parts += [candidate.text] if candidate.text else []
            prompts.append(parts)
        found = self._endpoint.yes_or_no(
            prompts, yes=yes, no=no, on_verdict=lambda place, one: on_score(place, one.probability)
        )
        return [one.probability for one in found]


def as_item(query: Item, candidate: Item, yes: str, no: str) -> Item:
    """One prompt for a pair: all pictures, then question, query and candidate in this order.

    What is too long is cut at the end, so the question is always whole.
    """
    texts = [QUESTION.format(yes=yes, no=no)]
    shown = [("query", len(query.images)), ("candidate", len(candidate.images))]
    counts = [f"{num} of the {owner}" for owner, num in shown if num]
    if counts:
        texts.append(f"Pictures in this order: {', then '.join(counts)}.")
    asked = " ".join(text for text in (query.instruction, query.text) if text)
    texts.append(f"Query: {asked}" if asked else "Query: the picture.")
    texts.append(f"Candidate: {candidate.text}" if candidate.text else "Candidate: the picture.")
    return Item(f"{query.id} with {candidate.id}", "\n".join(texts), query.images + candidate.images)


class JudgeOptions(Protocol):
    """What options of a command say about its judge."""

    @property
    def judge(self) -> str | None:
        """A directory, an id on the hub, or an address; None: no judge."""

    judge_model: str | None
    judge_key_env: str | None
    yes: str
    no: str
    batch_size: int
    device: str | None
    dtype: str | None


def load_judge(options: JudgeOptions) -> Judge:
    """A judge by its directory or address.

    Raises:
        UserError: no judge, an address without ``judge_model``, or see `LocalJudge`.
    """
    yes, no, judge = options.yes, options.no, options.judge
    if yes.strip().lower() == no.strip().lower():
        raise UserError(f"yes={yes} and no={no} must be different words")
    if judge is None:
        raise UserError("judge= names a vision-language model: a directory or an address")
    if not is_address(judge):
        return LocalJudge(
            judge, yes=yes, no=no, batch_size=options.batch_size, device=options.device, dtype=options.dtype
        )
    if options.judge_model is None:
        raise UserError(f"judge={judge} is an address: judge_model= names the model there")
    endpoint = Endpoint(judge, options.judge_model, options.judge_key_env, concurrency=options.batch_size)
    return RemoteJudge(endpoint, yes=yes, no=no)


def hash_or_id(path: str) -> str:
    """A hash of a model's files; an id on the hub as it stands."""
    from rge.checkpoints.export import checkpoint_hash

    return checkpoint_hash(Path(path)) if Path(path).is_dir() else path


SOFTWARE = "software of local models"
"""Where a store keeps the software that scores and texts in it were made with."""


def local_software(store: AnswerStore) -> str:
    """Hash of the software that scores and texts of models in this process are kept under, see `still_valid`."""
    keys = [key_of(SOFTWARE, number) for number in range(MOST_SOFTWARE)]
    known = store.get_values(keys)
    found = still_valid(list(known.values()), ("rge", "eval.judging"))
    if found not in known.values():
        store.put_values({keys[len(known) % MOST_SOFTWARE]: found})
    return digest(found)


MOST_SOFTWARE = 1000
