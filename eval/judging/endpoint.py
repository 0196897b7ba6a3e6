"""A vision-language model behind an OpenAI-compatible endpoint: texts, and yes or no as a probability.

Calls are made by `rge.calls`: limited, retried, pictures without metadata. A call without an answer stops the run, and everything
answered so far is kept by the caller (`rge.calls.store.AnswerStore`). What is refused, rejected or empty would be so again:
it counts as answered with nothing.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rge.calls.caller import Caller, Outcome
from rge.calls.model_config import ModelConfig
from rge.calls.providers.listing import served_as
from rge.calls.replies import Reply
from rge.calls.request import Part, Picture, Request
from rge.calls.store import AnswerStore
from rge.common.errors import UserError
from rge.common.images import picture_bytes
from rge.common.schema import ImageRef

TOP_LOGPROBS = 20
"""Most alternatives that the API gives for a token."""
CONCURRENCY = 8


@dataclass(frozen=True)
class Verdict:
    """An answer of yes or no.

    Attributes:
        probability: of yes, among yes and no; None where neither is among the most likely tokens, or nothing was answered.
        said: the token that was answered, or why none was.
    """

    probability: float | None
    said: str


class Endpoint:
    """One model behind one address.

    Args:
        key_env: environment variable that holds the key; None: it needs none.

    Attributes:
        served: see `rge.calls.providers.listing.served_as`; part of the keys under which answers are kept.

    Raises:
        UserError: the variable is not set, or the endpoint cannot be reached.
    """

    def __init__(self, url: str, model: str, key_env: str | None = None, *, concurrency: int = CONCURRENCY):
        self.url, self.model = url, model
        config = ModelConfig(
            name=model, base_url=url, key_env=key_env, concurrency=concurrency, send_seed=False, reasks=0
        )
        self.served = served_as(config)
        # What is kept of an answer is for the caller to say: the answers themselves are not.
        self._caller = Caller({model: config}, AnswerStore(None))

    def write(
        self,
        prompts: Sequence[Sequence[Part]],
        *,
        max_tokens: int,
        system: str | None = None,
        on_text: Callable[[int, str], object] = lambda place, text: None,
    ) -> list[str]:
        """Texts, greedily decoded; empty where the model refuses, answers nothing, or the request is rejected.

        ``on_text``: called with place and text as soon as one is there; not for empty ones.

        Raises:
            UserError: a call has no answer; after all others.
        """
        requests = [Request(self.model, tuple(parts), system, max_tokens=max_tokens) for parts in prompts]
        texts = [""] * len(requests)
        failed: dict[int, Outcome] = {}

        def take(place: int, outcome: Outcome) -> None:
            if outcome.unanswered or outcome.rejected:
                failed[place] = outcome
            elif outcome.reply is not None and (text := outcome.reply.text.strip()):
                texts[place] = text
                on_text(place, text)

        self._caller.run(requests, take)
        self._check(failed, len(requests))
        return texts

    def yes_or_no(
        self,
        prompts: Sequence[Sequence[Part]],
        *,
        yes: str,
        no: str,
        on_verdict: Callable[[int, Verdict], object] = lambda place, verdict: None,
    ) -> list[Verdict]:
        """Sigmoid of the difference of two tokens' log probabilities.

        Tokens that differ in case or surrounding blanks only are added up. Where one of the two is not among the most
        likely tokens, the least likely one that is listed stands for it, which is an upper bound.

        ``on_verdict``: called with place and verdict as soon as one is there; of a request that the endpoint rejects at the
        end, when it is known not to reject all.

        Raises:
            UserError: a call has no answer, after all others; or the endpoint gives no log probabilities.
        """
        requests = [
            Request(self.model, tuple(parts), max_tokens=1, top_logprobs=TOP_LOGPROBS) for parts in prompts
        ]
        verdicts: dict[int, Verdict] = {}
        failed: dict[int, Outcome] = {}

        def take(place: int, outcome: Outcome) -> None:
            if outcome.unanswered or outcome.rejected:
                failed[place] = outcome
                return
            said = str(outcome.error)
            verdicts[place] = (
                Verdict(None, said) if outcome.reply is None else self._verdict(outcome.reply, yes, no)
            )
            on_verdict(place, verdicts[place])

        self._caller.run(requests, take)
        for place, outcome in failed.items():
            if outcome.rejected:
                verdicts[place] = Verdict(None, str(outcome.error))
                on_verdict(place, verdicts[place])
        self._check(failed, len(requests))
        return [verdicts[place] for place in range(len(requests))]

    def _verdict(self, reply: Reply, yes: str, no: str) -> Verdict:
        if not reply.top_logprobs:
            raise UserError(
                f"{self.model} at {self.url} gives no log probabilities (logprobs), which a reranker needs"
            )
        listed = [(token.strip().lower(), logprob) for token, logprob in reply.top_logprobs]
        sums = [
            _log_sum([logprob for token, logprob in listed if token == word.strip().lower()])
            for word in (yes, no)
        ]
        if sums == [None, None]:
            return Verdict(None, reply.first_token)
        least = min(logprob for _, logprob in listed)
        for_yes, for_no = (least if value is None else value for value in sums)
        return Verdict(1 / (1 + math.exp(min(for_no - for_yes, 700.0))), reply.first_token)

    def _check(self, failed: Mapping[int, Outcome], num: int) -> None:
        if unanswered := [outcome for outcome in failed.values() if outcome.unanswered]:
            raise UserError(
                f"{len(unanswered)} of {num} calls of {self.model} at {self.url} have no answer, the first: "
                f"{unanswered[0].error}; what was answered is kept, the same command continues"
            )


def picture(ref: ImageRef) -> Picture:
    """A picture as a part of a prompt."""
    return Picture(ref, hashlib.sha256(picture_bytes(ref)).hexdigest())


def is_address(text: str) -> bool:
    """Whether it names an endpoint and not a directory."""
    return text.startswith(("http://", "https://"))


def _log_sum(values: Sequence[float]) -> float | None:
    if not values:
        return None
    most = max(values)
    return most + math.log(sum(math.exp(value - most) for value in values))
