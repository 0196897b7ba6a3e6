"""Read training records, and decide which of them make up step s: a pure function of seed and step.

Because the batch of a step depends on nothing but the seed, a run resumes exactly by knowing its step, on any number
of processes.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from tqdm import tqdm

from rge.prompts import EMB_TOKEN
from rge.schema import Record, Target


class RecordError(ValueError):
    """Training records break the format; the message lists file, line, field and reason."""


MAX_REPORTED = 20


class RecordFile:
    """The records of one JSON-lines file, read by position so that a file may be larger than memory.

    Every record is checked once when the file is opened.

    Args:
        path: the file.
        need_rationale: every positive must have an oracle rationale.
        progress: show a progress bar while checking.

    Raises:
        RecordError: no such file, an empty file, or records that break the format (all of them are listed, at most
            `MAX_REPORTED` in full).
    """

    def __init__(self, path: str | Path, *, need_rationale: bool = False, progress: bool = False):
        self.path = Path(path)
        if not self.path.is_file():
            raise RecordError(f"training records {self.path} do not exist")
        offsets: list[int] = []
        problems: list[str] = []
        seen: dict[str, int] = {}
        offset = 0
        size = self.path.stat().st_size
        quick = size < 100_000_000  # a second or two
        bar = tqdm(
            total=size,
            unit="B",
            unit_scale=True,
            desc=f"checking {self.path.name}",
            disable=quick or not progress,
        )
        with self.path.open("rb") as lines, bar:
            for number, line in enumerate(lines, start=1):
                bar.update(len(line))
                start, offset = offset, offset + len(line)
                if not line.strip():
                    continue
                found = _problems(line, need_rationale, seen, number)
                problems += [f"{self.path}:{number}: {problem}" for problem in found]
                offsets.append(start)
        if problems:
            more = f"\n... and {len(problems) - MAX_REPORTED} more" if len(problems) > MAX_REPORTED else ""
            raise RecordError(
                "training records break the format:\n" + "\n".join(problems[:MAX_REPORTED]) + more
            )
        if not offsets:
            raise RecordError(f"training records {self.path}: the file is empty")
        self._offsets = np.array(offsets, dtype=np.int64)

    def __len__(self) -> int:
        """Number of records."""
        return len(self._offsets)

    def __getitem__(self, index: int) -> Record:
        """The record at `index`, its picture references made absolute."""
        with self.path.open("rb") as lines:
            lines.seek(self._offsets[index])
            return _absolute(Record.model_validate_json(lines.readline()), self.path.parent)

    def texts(self) -> list[str]:
        """Every text of every record: what a tokenizer is trained on."""
        found: list[str] = []
        for index in range(len(self)):
            record = self[index]
            found += [record.instruction or "", record.query.text or ""]
            for target in (*record.positives, *record.negatives):
                found.append(target.text or "")
                found.append(getattr(target, "rationale", None) or "")
        return [text for text in dict.fromkeys(found) if text]


def _problems(line: bytes, need_rationale: bool, seen: dict[str, int], number: int) -> list[str]:
    try:
        record = Record.model_validate_json(line)
    except ValidationError as error:
        return [
            f"{'.'.join(str(part) for part in issue['loc']) or 'record'}: {issue['msg']}"
            for issue in error.errors(include_url=False, include_input=False)
        ]
    if record.id in seen:
        return [f"id: {record.id!r} stands already in line {seen[record.id]}"]
    seen[record.id] = number
    if need_rationale:
        return [
            f"positives.{index}.rationale: {fault} (record {record.id!r})"
            for index, positive in enumerate(record.positives)
            if (fault := _rationale_fault(positive.rationale or ""))
        ]
    return []


def _rationale_fault(rationale: str) -> str | None:
    if not rationale.strip():
        return "missing or blank, and the LM loss needs it"
    if EMB_TOKEN in rationale:
        return f"contains {EMB_TOKEN}, which the trainer appends itself"
    return None


def _absolute(record: Record, folder: Path) -> Record:
    def target(item: Target) -> Target:
        return item if item.image is None else item.model_copy(update={"image": str(folder / item.image)})

    return record.model_copy(
        update={
            "query": record.query.model_copy(
                update={"images": [str(folder / image) for image in record.query.images]}
            ),
            "positives": [target(positive) for positive in record.positives],
            "negatives": [target(negative) for negative in record.negatives],
        }
    )


def identity(target: Target) -> int:
    """What a target stands for, as a signed 64-bit number: equal for equal identities, on every machine."""
    digest = hashlib.blake2b((target.identity or target.id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


@dataclass(frozen=True, slots=True)
class Draw:
    """One record of a batch.

    Attributes:
        source: number of the source.
        index: number of the record in it.
        seed: for everything random about this record in this step (drawn positive, augmentation, sampling).
    """

    source: int
    index: int
    seed: int


class Mixture:
    """Which records make up each step's global batch.

    Every source is gone through in a new random order each epoch; its share of the batches follows its weight, exact
    over time: of n records drawn so far, a source with share s has s * n, give or take the rounding of one record a
    source (with share 0.3 of 8 it gets 2 or 3 records a step, seldom one more or less, 2.4 on average).

    Args:
        sizes: number of records of each source.
        weights: share of each source, relative.
        batch_size: records of a step, all processes together.
        seed: of everything.

    Raises:
        ValueError: an empty source.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int):
        if min(sizes) < 1:
            raise ValueError("every source needs at least one record")
        self.sizes, self.batch_size, self.seed = list(sizes), batch_size, seed
        share = np.array(weights, dtype=np.float64)
        self.share = share / share.sum()
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def steps_per_epoch(self) -> int:
        """Steps after which as many records were drawn as the sources hold together."""
        return max(1, -(-sum(self.sizes) // self.batch_size))

    def batch(self, step: int) -> list[Draw]:
        """The global batch of a step, `batch_size` draws, sources interleaved at random."""
        before, after = self._counts(step), self._counts(step + 1)
        draws: list[tuple[int, int]] = []
        for source, size in enumerate(self.sizes):
            for count in range(before[source], after[source]):
                index = int(self._order(source, count // size)[count % size])
                draws.append((source, index))
        generator = np.random.default_rng([self.seed, 1, step])
        seeds = generator.integers(0, 2**63, size=len(draws))
        mixed = generator.permutation(len(draws))
        return [Draw(draws[place][0], draws[place][1], int(seeds[place])) for place in mixed]

    def _counts(self, step: int) -> list[int]:
        # Records drawn from each source before `step`: whole numbers that sum to step * batch_size. A source takes its
        # share of what the sources before it leave. Every count then only ever grows with the step, which differences
        # of rounded cumulative shares do not: they would draw a negative number from a small source now and then.
        counts, left, share_left = [], step * self.batch_size, 1.0
        for share in self.share[:-1]:
            counts.append(math.floor(left * share / share_left + 1e-6))
            left, share_left = left - counts[-1], share_left - share
        return [*counts, left]

    def _order(self, source: int, epoch: int) -> np.ndarray:
        key = (source, epoch)
        if key not in self._orders:
            if len(self._orders) > 4 * len(self.sizes):
                self._orders.clear()
            self._orders[key] = np.random.default_rng([self.seed, 0, source, epoch]).permutation(
                self.sizes[source]
            )
        return self._orders[key]


def read_texts(paths: Sequence[str | Path]) -> list[str]:
    """All texts of several record files, without repeats, in order."""
    return list(dict.fromkeys(text for path in paths for text in RecordFile(path).texts()))


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write records as JSON lines, complete or not at all."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as out:
        for record in records:
            out.write(json.dumps(record.model_dump(exclude_none=True), ensure_ascii=False) + "\n")
    temporary.replace(path)
