"""The training-free judge of PinPoint (arXiv:2603.04598): does the candidate satisfy the query, yes or no?

The score is sigmoid(l_yes - l_no) of the token after the prompt, for any vision-language model in this process or behind an
endpoint that returns ``top_logprobs``. Every casing of a word, with or without a leading space, counts for it:
l is the logarithm of their summed probability. The model sees the query with its instruction, and one candidate, each with its
parts in their order. Source: the paper's description, whose prompt is unknown. Differs: the released code asks for
"True" or "False", sends only the first picture of a query, and ranks a candidate last if either word is missing.

The query stands first. In this process its keys and values are computed once for all of its candidates; endpoints cache
common prefixes themselves. A model in which all tokens of a picture see one another gets one whole prompt per pair.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from rge.calls.caller import Caller
from rge.calls.grouping import Outcome
from rge.calls.request import Picture, Request
from rge.calls.wire.bodies import served_model
from rge.calls.wire.replies import as_dict, dict_items, parse
from rge.common.errors import UserError
from rge.common.images import picture_bytes
from rge.common.parts import Part, TextPart, refs_of
from rge.common.schema import Item
from rge.content.visuals import as_pictures, pieces, surrounded
from rge.judging.scorer import SCORERS, Judge, LocalModel, Score, Scorer, need_answers

WORDS = ("yes", "no")
QUERY, CANDIDATE = "Query: ", "\nCandidate:"
QUESTION = "Does this candidate satisfy the query? Answer yes or no."
MAX_PROMPT_TOKENS = 16_384
TOP_LOGPROBS = 20
"""Tokens of which an endpoint returns the probability; OpenAI and vLLM allow no more by default."""
NEITHER = "neither yes nor no"
"""Why there is no score if an endpoint's most probable tokens lack both words."""
RARELY = 0.5
"""Probability of yes or no, on average, below which the judge does not do what it is asked."""


@SCORERS.register("yes_no")
def yes_no(judge: Judge) -> Scorer:
    """The local form or that of an endpoint."""
    return LocalYesNo(judge) if judge.endpoint is None else EndpointYesNo(judge)


def _words(query: Item) -> Item:
    """The query with its instruction as part of its text."""
    content = [*query.content]
    if query.instruction:
        texts = (place for place, part in enumerate(content) if isinstance(part, TextPart))
        content.insert(next(texts, len(content)), TextPart(query.instruction))
    return replace(query, content=tuple(content), instruction=None)


class LocalYesNo(Scorer):
    """A model in this process.

    `counts` has ``pairs``, ``tokens`` that were computed, ``tokens_alone`` that separate prompts would have had, ``cut`` candidates
    whose text was shortened, and ``unlike`` pairs for which yes and no together have a probability below 0.5.

    Args:
        judge: the model.
        share: compute a query once for all of its candidates.
    """

    def __init__(self, judge: Judge, *, share: bool = True):
        super().__init__()
        self.model = LocalModel(judge, MAX_PROMPT_TOKENS)
        self._batch_size = judge.batch_size
        self._share = share and not self.model.embedder.family.whole_pictures
        self.ids = word_ids(self.model.builder.tokenizer)
        self.name = self.model.about | {"asks": "yes_no", "wording": [QUERY, CANDIDATE, QUESTION]}

    def score(self, pairs: Sequence[tuple[Item, Item]]) -> list[Score]:
        """Scores of pairs; those of one query in a row share its keys and values."""
        scores: list[Score] = []
        for _, group in groupby(pairs, key=lambda pair: pair[0].id):
            of_query = list(group)
            for start in range(0, len(of_query), self._batch_size):
                part = of_query[start : start + self._batch_size]
                scores += self._score(part[0][0], [candidate for _, candidate in part], start == 0)
        return scores

    def _score(self, query: Item, candidates: Sequence[Item], is_first: bool) -> list[Score]:
        import torch

        from rge.model.packing import Branch

        embedder, builder = self.model.embedder, self.model.builder
        head, rests = builder.build_pairs(_words(query), candidates, wording=(QUERY, CANDIDATE, QUESTION))
        alone = sum(len(head) + len(rest) for rest in rests)
        with torch.inference_mode():
            if self._share:
                if is_first:
                    self._encoded = embedder(embedder.pack_prompts([head]))[0].encoded
                branches = [Branch(rest.input_ids.tolist(), read_state=True, pictured=rest) for rest in rests]
                packed = embedder.pack([head], [branches], encoded=self._encoded)
                computed = sum(map(len, rests)) + 1 + (len(head) - 1) * is_first
            else:
                wholes = [joined(head, rest) for rest in rests]
                last = [[Branch(rest.input_ids[-1:].tolist(), read_state=True)] for rest in rests]
                packed, computed = embedder.pack(wholes, last), alone
            log_prob_NV = embedder.next_logits(packed).double().log_softmax(dim=-1)
        yes_N, no_N = (log_prob_NV[:, list(ids)].logsumexp(dim=-1) for ids in self.ids)
        unlike = int((torch.logaddexp(yes_N, no_N).exp() < RARELY).sum())
        cut = sum(rest.num_cut_tokens > 0 for rest in rests)
        self.count(pairs=len(rests), tokens=computed, tokens_alone=alone, cut=cut, unlike=unlike)
        return [Score(value) for value in (yes_N - no_N).sigmoid().tolist()]


def joined(head: Any, rest: Any) -> Any:
    """The whole prompt of a beginning and a rest from `rge.model.prompts.PromptBuilder.build_pairs`, but for its last token."""
    import torch

    from rge.model.prompts import intervals_of

    def both(name: str, dim: int = 0) -> Any:
        found = [part for part in (getattr(head, name), getattr(rest, name)) if part is not None]
        return torch.cat(found, dim=dim) if found else None

    return replace(
        head,
        input_ids=both("input_ids")[:-1],
        type_ids=both("type_ids")[:-1],
        position_3T=both("position_3T", dim=1)[:, :-1],
        pixels=both("pixels"),
        image_grid=both("image_grid"),
        interval_G=intervals_of([head, rest]),
    )


def word_ids(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of yes and of no: of every casing that is one token, with and without a leading space.

    A tokenizer without such a token for a word, such as one of bytes, gives the first token of its lower-case form.

    Raises:
        UserError: both words begin with the same token.
    """

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    found = []
    for word in WORDS:
        forms = [space + form for form in (word, word.title(), word.upper()) for space in ("", " ")]
        single = {ids[0] for ids in map(ids_of, forms) if len(ids) == 1}
        found.append(tuple(sorted(single or {ids_of(word)[0]})))
    if set(found[0]) & set(found[1]):
        raise UserError("yes and no begin with the same token in this judge's vocabulary: use another judge")
    return found[0], found[1]


class EndpointYesNo(Scorer):
    """A model behind an endpoint with ``top_logprobs``; `counts` has ``pairs`` and ``calls``.

    Raises:
        UserError: the endpoint's settings are invalid, or it cannot be reached.
    """

    local = False

    def __init__(self, judge: Judge):
        super().__init__()
        assert judge.endpoint is not None
        wanted = {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        model = replace(judge.endpoint, extra_body={**wanted, **judge.endpoint.extra_body}, reasks=0)
        self._store, self._model = judge.answers, model
        self._caller = Caller({"judge": model}, judge.answers, progress=False)
        self.name = {
            "judge": model.name,
            "asks": "yes_no",
            "wording": [QUERY, CANDIDATE, QUESTION],
            "sent": model.cache_settings() | {"max_side_px": model.max_side_px},
        } | served_model(model)

    def score(self, pairs: Sequence[tuple[Item, Item]]) -> list[Score]:
        """Scores of pairs.

        Raises:
            UserError: calls are unanswered; all other answers are stored, so the same command repeats only these calls.
        """
        outcomes = self._caller.run([self._request(*pair) for pair in pairs])
        self.count(pairs=len(pairs), calls=sum(not outcome.cached for outcome in outcomes))
        need_answers(outcomes, self._model.endpoint)
        return [self._score(outcome) for outcome in outcomes]

    def _request(self, query: Item, candidate: Item) -> Request:
        both = ((_words(query), QUERY, CANDIDATE), (candidate, "", f"\n{QUESTION}"))
        parts = (part for one in both for part in self._shown(*one))
        return Request("judge", tuple(parts), max_tokens=1)

    def _shown(self, item: Item, before: str, after: str) -> list[str | Picture]:
        """An item in its order: pages and frames are sent as pictures."""
        shown = partial(_picture, max_side_px=self._model.max_side_px)
        return surrounded(pieces(as_pictures(item.content), shown), before, after)

    def _score(self, outcome: Outcome) -> Score:
        # A judge that only thinks has no text in its single token, but its probabilities are as good as those of any other.
        raw = self._store.get(outcome.key)
        top = [] if raw is None else _top_log_probs(raw)
        if (value := probability(top)) is not None:
            return Score(value)
        if outcome.error is not None:
            return Score(None, outcome.error.kind)
        if not top:
            return Score(None, "no top_logprobs in the answer")
        return Score(None, NEITHER)


def _picture(part: Part, max_side_px: int) -> Iterator[Picture]:
    for ref in refs_of(part):
        yield Picture(ref, hashlib.sha256(picture_bytes(ref)).hexdigest(), max_side_px)


def _top_log_probs(raw: bytes) -> list[tuple[str, float]]:
    """The most probable first tokens of an answer and their log probabilities; empty if there are none."""
    choices = dict_items(as_dict(parse(raw)).get("choices"))
    content = dict_items(as_dict(choices[0].get("logprobs")).get("content")) if choices else []
    top = dict_items(content[0].get("top_logprobs")) if content else []
    return [
        (str(one.get("token")), float(one["logprob"]))
        for one in top
        if isinstance(one.get("logprob"), int | float) and math.isfinite(one["logprob"])
    ]


def probability(top: Sequence[tuple[str, float]]) -> float | None:
    """sigmoid(l_yes - l_no) from the most probable tokens; None if both words are missing.

    A single missing word gets the least probability listed, the largest that it can have.
    """
    mass = dict.fromkeys(WORDS, 0.0)
    for token, log_prob in top:
        if (word := token.strip(" \u0120\u2581\n\t").lower()) in mass:
            mass[word] += math.exp(log_prob)
    if not any(mass.values()):
        return None
    least = min(math.exp(log_prob) for _, log_prob in top)
    yes, no = (mass[word] or least for word in WORDS)
    return yes / (yes + no)
