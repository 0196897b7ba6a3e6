"""Training records for a judge that describes (`rge.judging.description`)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rge.common.errors import UserError
from rge.common.files import relative
from rge.common.registry import PluginOptions
from rge.common.schema import Positive, QueryPart, Record, Target
from rge.data.sources import RecordFile, write_jsonl
from rge.judging.description import ANSWER_SHOWS, QUESTION


@dataclass
class JudgeRecordsOptions(PluginOptions):
    """Make training records for a judge (eval rerank): what pictures show, and what a rationale's right answer shows."""

    src: tuple[Path, ...]
    """Files of training records with rationales."""
    descriptions: tuple[Path, ...]
    """Files of training records whose rationales say what the positive shows, such as the demo's naming.jsonl."""
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
        raise UserError(
            "no positive of src= is described; they are matched by identity, or by id", key="descriptions"
        )
    pictures: dict[str, set[str]] = defaultdict(set)
    for record in (*records, *described):
        for target in (*record.positives, *record.negatives):
            for ref in target.pictures:
                if isinstance(ref, str):
                    pictures[_identity(target)].add(_relative_to(ref, out))
    for identity, text in sorted(description_of.items()):
        for ref in sorted(pictures[identity]):
            yield identity, QueryPart(text=QUESTION, images=[ref]), text
    for group, rationale, text in sorted(answers):
        yield group, QueryPart(text=f"{rationale}\n{ANSWER_SHOWS}"), text


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
