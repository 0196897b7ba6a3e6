"""A judge that reads the other way round: how likely a text about the query is, given the candidate.

By Bayes' rule, among the candidates of one query, the likelihood of what is asked given a candidate orders them as the
probability of the candidate does, as far as candidates are alike likely beforehand: the noisy channel, and UPR's score
(Sachan et al., arXiv:2204.07496). The text is the query's rationale (its text, where the ranking was made without), or what the
judge itself, having read that, says the right answer shows.

`write_records` makes training records for such a judge of records with rationales; the LM loss of a cold start then teaches it.
"""

import os
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.judging.judges import LocalModel, local_software
from rge.calls.store import AnswerStore, key_of
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.registry import PluginOptions
from rge.common.schema import Item, Positive, QueryPart, Record, Target
from rge.data.sources import RecordFile
from rge.data.sources import write_records as records_to_file

QUESTION = {"likelihood": "What question does this answer, and why?", "description": "What does this show?"}
"""What is asked about a candidate, by ``ask=``."""
ANSWER_SHOWS = "What does the answer show?"
"""What is asked about a rationale, with ``ask=description``."""
DESCRIPTION_TOKENS = 64


def asked_for(queries: Sequence[Item], rationales: Sequence[str | None]) -> list[Item]:
    """What is to be likely: each query's rationale, or its text where it has none."""
    return [
        Item(query.id, text=rationale or query.text)
        for query, rationale in zip(queries, rationales, strict=True)
    ]


def shown(candidate: Item, question: str) -> Item:
    """What it is to be likely after: the candidate and the question."""
    return replace(candidate, text=_with(candidate.text, question), instruction=None)


def _with(text: str | None, question: str) -> str:
    return "\n".join(filter(None, (text, question)))


class LikelihoodJudge(LocalModel):
    """Log likelihood, summed over the tokens, of a text after a candidate.

    Args:
        question: asked about the candidate, see `QUESTION`.
    """

    def __init__(self, path: str, *, question: str, **options: Any):
        super().__init__(path, **options)
        self._question = question
        self.name["asks"] = "likelihood"

    def score(self, pairs: Sequence[tuple[Item, Item]]) -> list[float | None]:
        """Log likelihoods of (text, candidate) pairs, in nats; a candidate's prompt is encoded once for all of its texts."""
        import torch

        from rge.model.packing import Branch

        tokenizer = self._builder.processor.tokenizer
        ids = [tuple(tokenizer(text.text or "", add_special_tokens=False).input_ids) for text, _ in pairs]
        if empty := [text.id for (text, _), one in zip(pairs, ids, strict=True) if not one]:
            raise UserError(
                f"query {empty[0]!r} has neither a rationale nor a text, so there is no likelihood"
            )
        of_candidate: dict[str, list[int]] = defaultdict(list)
        for place, (_, candidate) in enumerate(pairs):
            of_candidate[candidate.id].append(place)
        found: list[float | None] = [None] * len(pairs)
        for places in of_candidate.values():
            prompt = self._builder.build(shown(pairs[places[0]][1], self._question), "query")
            for start in range(0, len(places), self._batch_size):
                part = places[start : start + self._batch_size]
                packed = self._embedder.pack([prompt], [[Branch(ids[place], sampled=True) for place in part]])
                with torch.no_grad():
                    log_prob_L = self._embedder(packed)[0].log_prob_L
                sums = [
                    float(one.sum()) for one in log_prob_L.float().split([len(ids[place]) for place in part])
                ]
                for place, value in zip(part, sums, strict=True):
                    found[place] = value
        return found

    def describe(self, texts: Sequence[Item], answers: AnswerStore) -> list[Item]:
        """What the right answer shows, in the judge's own words, after each text; written greedily, once for equal texts.

        Raises:
            UserError: a text is empty, or the judge never ends a description itself.
        """
        from rge.rollout.generate import generate

        if empty := [one.id for one in texts if not one.text]:
            raise UserError(
                f"query {empty[0]!r} has neither a rationale nor a text, so nothing can be described"
            )
        about = self.name | {"after": ANSWER_SHOWS, "tokens": DESCRIPTION_TOKENS}
        about["software"] = local_software(answers)
        keys = [key_of(about, one.text) for one in texts]
        known = answers.get_values(list(dict.fromkeys(keys)))
        todo = {key: one for key, one in zip(keys, texts, strict=True) if key not in known}
        prompts = [
            self._builder.build(Item(one.id, _with(one.text, ANSWER_SHOWS)), "query") for one in todo.values()
        ]
        with progress_bar(total=len(prompts), desc="describing", unit="answer", disable=not prompts) as bar:
            written = generate(
                self._embedder, prompts, max_new_tokens=DESCRIPTION_TOKENS, batch_size=self._batch_size,
                on_progress=bar.update,
            )  # fmt: skip
        decode = self._builder.processor.tokenizer.decode
        new = {key: [decode(one.ids).strip(), one.forced] for key, one in zip(todo, written, strict=True)}
        answers.put_values(new)
        known |= new
        if texts and all(known[key][1] or not known[key][0] for key in keys):
            raise UserError(
                f"the judge wrote {known[keys[0]][0]!r} and never ended with <emb>: ask=description needs one that was "
                "trained to describe the right answer (rge eval records descriptions=FILE)"
            )
        return [Item(one.id, text=known[key][0] or one.text) for key, one in zip(keys, texts, strict=True)]


@dataclass
class JudgeRecordsOptions(PluginOptions):
    """Make records that teach a judge to write a query's rationale after a candidate (rerank ask=likelihood).

    With descriptions= it learns to write what a candidate shows, and what the right answer of a rationale shows (ask=description).
    """

    src: tuple[Path, ...]
    """Files of training records with rationales."""
    out: Path
    """File of records to write."""
    descriptions: tuple[Path, ...] = ()
    """Files of training records whose rationales say what the positive shows, in words that hold for its identity wherever it is
    drawn: the demo's naming.jsonl."""
    draws: int = 3
    """Records for each positive: each shows a picture of the positive's identity, drawn from all that src has; with descriptions=,
    for each picture."""
    seed: int = 0
    """Seed of the draws; with descriptions= nothing is drawn."""


def write_records(options: JudgeRecordsOptions) -> Path:
    """Write the records and return their file.

    Raises:
        UserError: src cannot be read, none of its positives has a rationale, none of them is described, or a seed is given where
            nothing is drawn.
    """
    if options.draws < 1:
        raise UserError(f"draws must be at least 1, got {options.draws}")
    if options.descriptions and options.seed:
        raise UserError(
            f"seed={options.seed} has no effect with descriptions=, which takes every picture draws= times: drop it"
        )
    records = _read(options.src)
    described = _read(options.descriptions)
    pictures: dict[str, set[str]] = defaultdict(set)
    for record in (*records, *described):
        for target in (*record.positives, *record.negatives):
            if isinstance(target.image, str):
                pictures[_identity(target)].add(_beside(target.image, options.out))
    drawn_from = {identity: sorted(refs) for identity, refs in pictures.items()}
    asked = (
        _to_describe(records, described, drawn_from, options.draws)
        if options.descriptions
        else _to_ask(records, drawn_from, options)
    )
    made = [
        Record(
            id=f"judge.{number}", group=group, source="judge", split="train", query=query,
            positives=[Positive(id=f"text {number}", text=text, rationale=text)],
        )
        for number, (group, query, text) in enumerate(asked)
    ]  # fmt: skip
    if not made:
        raise UserError(f"{options.src[0]} has no positive with a rationale, so there is nothing to learn")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    records_to_file(options.out, made)
    print(f"{options.out}: {len(made)} records from {len(records) + len(described)}")
    return options.out


def _to_ask(
    records: Sequence[Record], drawn_from: Mapping[str, Sequence[str]], options: JudgeRecordsOptions
) -> Iterator[tuple[str, QueryPart, str]]:
    """Group, prompt and text for ``ask=likelihood``: the rationale after a picture of its positive."""
    rng = random.Random(options.seed)
    for record in records:
        for positive in record.positives:
            refs = drawn_from.get(_identity(positive), [])
            if not positive.rationale or not (refs or positive.text):
                continue
            for _ in range(options.draws if refs else 1):
                query = QueryPart(
                    text=_with(positive.text, QUESTION["likelihood"]),
                    images=[rng.choice(refs)] if refs else [],
                )
                yield record.group, query, positive.rationale


def _to_describe(
    records: Sequence[Record],
    described: Sequence[Record],
    drawn_from: Mapping[str, Sequence[str]],
    draws: int,
) -> Iterator[tuple[str, QueryPart, str]]:
    """Group, prompt and text for ``ask=description``: what each picture shows, and what the answer of each rationale shows.

    Raises:
        UserError: no positive with a rationale is described.
    """
    said = {
        _identity(one): one.rationale for record in described for one in record.positives if one.rationale
    }
    found = {
        (record.group, positive.rationale, said[_identity(positive)])
        for record in records
        for positive in record.positives
        if positive.rationale and _identity(positive) in said
    }
    if not found:
        raise UserError("descriptions= describes no positive of src=: they are found by identity, or by id")
    for identity, text in sorted(said.items()):
        for ref in drawn_from.get(identity, []):
            for _ in range(draws):
                yield identity, QueryPart(text=QUESTION["description"], images=[ref]), text
    for group, rationale, text in sorted(found):
        yield group, QueryPart(text=_with(rationale, ANSWER_SHOWS)), text


def _read(files: Sequence[Path]) -> list[Record]:
    return [file[place] for file in map(RecordFile, files) for place in range(len(file))]


def _identity(target: Target) -> str:
    return target.identity or target.id


def _beside(ref: str, out: Path) -> str:
    """A reference as a file in another folder writes it."""
    path, mark, row = ref.partition("#")
    return os.path.relpath(path, out.parent) + mark + row
