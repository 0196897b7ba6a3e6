"""A judge that describes the right answer and scores candidates by the likelihood of that description.

From a query's rationale (or its text, if it has none), the judge describes the right answer once. By Bayes' rule, with a
uniform prior over a query's candidates, the likelihood of the description given a candidate orders them as the candidate's
probability given the description: the noisy-channel model, and UPR's score (Sachan et al., arXiv:2204.07496).

`write_records` makes training records for such a judge, which learns from the LM loss of a cold start.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.judging.rewrite import known_and_open
from rge.calls.store import AnswerStore, value_key
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.files import read_json, relative
from rge.common.registry import PluginOptions
from rge.common.schema import Item, Positive, QueryPart, Record, Target
from rge.data.sources import RecordFile, write_jsonl
from rge.identity.run_identity import digest, still_valid

QUESTION = "What does this show?"
"""Question about a candidate."""
ANSWER_SHOWS = "What does the answer show?"
"""Question after a rationale."""
DESCRIPTION_TOKENS = 64
MAX_PROMPT_TOKENS = 8192
SOFTWARE, MOST_SOFTWARE = "software of local models", 1000
"""Key of a store's records of the software behind its scores and texts, and their maximum number."""


def _with(text: str | None, question: str) -> str:
    return "\n".join(filter(None, (text, question)))


class DescriptionJudge:
    """Describes right answers, and scores candidates by a description's log-likelihood, summed over its tokens.

    Args:
        model: directory or hub id of one that `rge.model.backbone` can load.
        dtype: dtype of the weights; None: float32 on CPU, bfloat16 on a GPU.

    Attributes:
        name: everything that determines its scores except the software; part of the cache keys.

    Raises:
        UserError: it cannot be loaded.
    """

    def __init__(self, model: str, *, batch_size: int, device: str | None = None, dtype: str | None = None):
        from eval.models.common import place
        from eval.models.registry import facts_of
        from rge.checkpoints.export import checkpoint_hash
        from rge.model.backbone import load_backbone
        from rge.model.embedding_model import EmbeddingModel
        from rge.model.prompts import PromptBuilder

        device, dtype = place(device, dtype)
        path = facts_of(model).path
        pixels = (read_json(path / "rge.json") or {"pixels": {"min": None, "max": None}})["pixels"]
        backbone = load_backbone(
            path, dtype=dtype, min_pixels=pixels["min"], max_pixels=pixels["max"], add_emb=True
        )
        self._embedder = EmbeddingModel(backbone).to(device).eval()
        self._builder = PromptBuilder(backbone.processor, "plain", MAX_PROMPT_TOKENS)
        self._batch_size = batch_size
        self.name: dict[str, Any] = {
            "judge": checkpoint_hash(path),
            "dtype": dtype,
            "max_tokens": MAX_PROMPT_TOKENS,
            "asks": "description",
        }

    def score(self, pairs: Sequence[tuple[Item, Item]]) -> list[float]:
        """Log-likelihoods of (description, candidate) pairs, in nats; each candidate's prompt is encoded once."""
        import torch

        from rge.model.packing import Branch

        tokenizer = self._builder.processor.tokenizer
        ids = [tuple(tokenizer(text.text or "", add_special_tokens=False).input_ids) for text, _ in pairs]
        of_candidate: dict[str, list[int]] = defaultdict(list)
        for place, (_, candidate) in enumerate(pairs):
            of_candidate[candidate.id].append(place)
        scores = [0.0] * len(pairs)
        for places in of_candidate.values():
            candidate = pairs[places[0]][1]
            item = replace(candidate, text=_with(candidate.text, QUESTION), instruction=None)
            prompt = self._builder.build(item, "query")
            for start in range(0, len(places), self._batch_size):
                part = places[start : start + self._batch_size]
                packed = self._embedder.pack([prompt], [[Branch(ids[place], sampled=True) for place in part]])
                with torch.no_grad():
                    log_prob_L = self._embedder(packed)[0].log_prob_L.float()
                log_probs = log_prob_L.split([len(ids[place]) for place in part])
                for place, log_prob in zip(part, log_probs, strict=True):
                    scores[place] = float(log_prob.sum())
        return scores

    def describe(self, texts: Sequence[Item], answers: AnswerStore) -> list[Item]:
        """Describe the right answer after each text, greedily and once for equal texts.

        Raises:
            UserError: a text is empty, or the judge never ends a description by itself.
        """
        from rge.rollout.generate import generate

        if empty := [item.id for item in texts if not item.text]:
            raise UserError(f"query {empty[0]!r} has neither a rationale nor a text")
        about = self.name | {"after": ANSWER_SHOWS, "tokens": DESCRIPTION_TOKENS}
        about["software"] = local_software(answers)
        keys = [value_key(about, item.text) for item in texts]
        known, todo = known_and_open(answers, keys, texts)
        prompts = [
            self._builder.build(Item(item.id, _with(item.text, ANSWER_SHOWS)), "query")
            for item in todo.values()
        ]
        with progress_bar(total=len(prompts), desc="describing", unit="answer", disable=not prompts) as bar:
            written = generate(
                self._embedder, prompts, max_new_tokens=DESCRIPTION_TOKENS, batch_size=self._batch_size,
                on_progress=bar.update,
            )  # fmt: skip
        decode = self._builder.processor.tokenizer.decode
        new = {key: [decode(item.ids).strip(), item.forced] for key, item in zip(todo, written, strict=True)}
        answers.put_values(new)
        known |= new
        if texts and all(known[key][1] or not known[key][0] for key in keys):
            raise UserError(
                f"the judge wrote {known[keys[0]][0]!r} and never ended with <emb>: it must be trained to describe the "
                "right answer (rge eval records descriptions=FILE)"
            )
        return [Item(item.id, text=known[key][0] or item.text) for key, item in zip(keys, texts, strict=True)]


def local_software(store: AnswerStore) -> str:
    """Hash of the software of models in this process, for cache keys; see `still_valid`."""
    keys = [value_key(SOFTWARE, number) for number in range(MOST_SOFTWARE)]
    known = store.get_values(keys)
    software = still_valid(list(known.values()), ("rge", "eval.judging"))
    if software not in known.values():
        store.put_values({keys[len(known) % MOST_SOFTWARE]: software})
    return digest(software)


@dataclass
class JudgeRecordsOptions(PluginOptions):
    """Make training records for a judge (eval rerank): what pictures show, and what a rationale's right answer shows."""

    src: tuple[Path, ...]
    """Files of training records with rationales."""
    descriptions: tuple[Path, ...]
    """Files of training records whose rationales say what the positive shows, in words that hold for every picture with
    its identity, such as the demo's naming.jsonl."""
    out: Path
    """File of records to write."""


def write_records(options: JudgeRecordsOptions) -> Path:
    """Write the records and return their file.

    Raises:
        UserError: a file cannot be read, or no positive with a rationale has a description.
    """
    records, described = _read(options.src), _read(options.descriptions)
    made = [
        Record(
            id=f"judge.{number}", group=group, source="judge", split="train", query=query,
            positives=[Positive(id=f"text {number}", text=text, rationale=text)],
        )
        for number, (group, query, text) in enumerate(_to_describe(records, described, options.out))
    ]  # fmt: skip
    write_jsonl(options.out, made)
    print(f"{options.out}: {len(made)} records from {len(records) + len(described)}")
    return options.out


def _to_describe(
    records: Sequence[Record], described: Sequence[Record], out: Path
) -> Iterator[tuple[str, QueryPart, str]]:
    """(group, prompt, text) triples: descriptions of pictures, and descriptions of answers after rationales."""
    description_of = {_identity(positive): positive.rationale for _, positive in _reasoned(described)}
    answers = {
        (group, positive.rationale, description_of[_identity(positive)])
        for group, positive in _reasoned(records)
        if _identity(positive) in description_of
    }
    if not answers:
        raise UserError("descriptions= describes no positive of src=; they are matched by identity, or by id")
    pictures: dict[str, set[str]] = defaultdict(set)
    for record in (*records, *described):
        for target in (*record.positives, *record.negatives):
            if isinstance(target.image, str):
                pictures[_identity(target)].add(_relative_to(target.image, out))
    for identity, text in sorted(description_of.items()):
        for ref in sorted(pictures[identity]):
            yield identity, QueryPart(text=QUESTION, images=[ref]), text
    for group, rationale, text in sorted(answers):
        yield group, QueryPart(text=_with(rationale, ANSWER_SHOWS)), text


def _reasoned(records: Sequence[Record]) -> Iterator[tuple[str, Any]]:
    """(group, positive) pairs of the positives with a rationale."""
    for record in records:
        yield from ((record.group, positive) for positive in record.positives if positive.rationale)


def _read(files: Sequence[Path]) -> list[Record]:
    return [file[place] for file in map(RecordFile, files) for place in range(len(file))]


def _identity(target: Target) -> str:
    return target.identity or target.id


def _relative_to(ref: str, out: Path) -> str:
    path, mark, row = ref.partition("#")
    return relative(path, out.parent) + mark + row
