"""A judge that describes the right answer and scores candidates by the likelihood of that description.

From a query's rationale (or its text, if it has none), the judge describes the right answer once. By Bayes' rule, with a
uniform prior over a query's candidates, the likelihood of the description given a candidate orders them as the candidate's
probability given the description: the noisy-channel model, and UPR's score (Sachan et al., arXiv:2204.07496). The model must be
trained for it, see `eval.judging.records`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from rge.calls.store import AnswerStore, value_key
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.parts import TextPart, content_of
from rge.common.schema import Item
from rge.judging.scorer import SCORERS, Judge, LocalModel, Score, Scorer, local_software

QUESTION = "What does this show?"
"""Question about a candidate."""
ANSWER_SHOWS = "What does the answer show?"
"""Question after a rationale."""
DESCRIPTION_TOKENS = 64
MAX_PROMPT_TOKENS = 8192


@SCORERS.register("description")
class DescriptionJudge(Scorer):
    """Describes right answers, and scores candidates by a description's log-likelihood, summed over its tokens.

    Raises:
        UserError: the model cannot be loaded.
    """

    first: Literal["query", "candidate"] = "candidate"

    def __init__(self, judge: Judge):
        super().__init__()
        self.model = LocalModel(judge, MAX_PROMPT_TOKENS)
        self._batch_size = judge.batch_size
        self.name = self.model.about | {"asks": "description", "wording": [QUESTION, ANSWER_SHOWS]}

    def prepare(
        self, queries: Sequence[Item], rationales: Mapping[str, str], answers: AnswerStore
    ) -> list[Item]:
        """Descriptions of the right answers, see `describe`."""
        return self.describe(
            [Item(q.id, content_of(rationales.get(q.id) or q.text)) for q in queries], answers
        )

    def score(self, pairs: Sequence[tuple[Item, Item]]) -> list[Score]:
        """Log-likelihoods of (description, candidate) pairs, in nats; each candidate's prompt is encoded once."""
        import torch

        from rge.model.packing import Branch

        tokenizer = self.model.builder.processor.tokenizer
        ids = [tuple(tokenizer(text.text or "", add_special_tokens=False).input_ids) for text, _ in pairs]
        of_candidate: dict[str, list[int]] = defaultdict(list)
        for place, (_, candidate) in enumerate(pairs):
            of_candidate[candidate.id].append(place)
        scores = [0.0] * len(pairs)
        for places in of_candidate.values():
            candidate = pairs[places[0]][1]
            item = replace(candidate, content=(*candidate.content, TextPart(QUESTION)), instruction=None)
            prompt = self.model.builder.build(item, "query")
            for start in range(0, len(places), self._batch_size):
                part = places[start : start + self._batch_size]
                packed = self.model.embedder.pack(
                    [prompt], [[Branch(ids[place], sampled=True) for place in part]]
                )
                with torch.no_grad():
                    log_prob_L = self.model.embedder(packed)[0].log_prob_L.float()
                log_probs = log_prob_L.split([len(ids[place]) for place in part])
                for place, log_prob in zip(part, log_probs, strict=True):
                    scores[place] = float(log_prob.sum())
        return list(map(Score, scores))

    def describe(self, texts: Sequence[Item], answers: AnswerStore) -> list[Item]:
        """Describe the right answer after each text, greedily and once for equal texts.

        Raises:
            UserError: a text is empty, or the judge never ends a description by itself.
        """
        from rge.rollout.generate import generate

        if empty := [item.id for item in texts if not item.text]:
            raise UserError(f"query {empty[0]!r} has neither a rationale nor a text")
        about = self.name | {"tokens": DESCRIPTION_TOKENS}
        about["software"] = local_software(answers)
        keys = [value_key(about, item.text) for item in texts]
        known = answers.get_values(keys)
        todo = {key: item for key, item in zip(keys, texts, strict=True) if key not in known}
        prompts = [
            self.model.builder.build(Item(item.id, (*item.content, TextPart(ANSWER_SHOWS))), "query")
            for item in todo.values()
        ]
        with progress_bar(total=len(prompts), desc="describing", unit="answer", disable=not prompts) as bar:
            written = generate(
                self.model.embedder, prompts, max_new_tokens=DESCRIPTION_TOKENS, batch_size=self._batch_size,
                on_progress=bar.update,
            )  # fmt: skip
        decode = self.model.builder.processor.tokenizer.decode
        new = {key: [decode(item.ids).strip(), item.forced] for key, item in zip(todo, written, strict=True)}
        answers.put_values(new)
        known |= new
        if texts and all(known[key][1] or not known[key][0] for key in keys):
            raise UserError(
                f"the judge wrote {known[keys[0]][0]!r} and never ended with <emb>: it must be trained to describe the "
                "right answer (rge eval records descriptions=FILE)",
                kind="untrained",
            )
        return [
            Item(item.id, content_of(known[key][0] or item.text))
            for key, item in zip(keys, texts, strict=True)
        ]
