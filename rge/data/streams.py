"""Streaming data sets: one order of all rows, whoever reads them, resumed at the next record.

A stream has shards, such as files. Several are read side by side, a row of each in turn, and rows are shuffled in a buffer:

    epoch e: shards in random order --8 at a time--> rows --shuffled within a buffer--> draws 0, 1, ..., N - 1

The row of a stream's n-th draw depends on the seed and n alone, not on processes, data workers or other sources. So every row
comes once per epoch, and a position is a number: a resumed run skips whole shards unread, and earlier rows within a shard.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from rge.common.files import read_json_lines
from rge.common.schema import Record
from rge.data.config import RecordsConfig, SourceConfig
from rge.data.rows import Opened, Reopened, parsed, rows_of
from rge.data.sources import BrokenRecord, Checks, RecordError, Records, faults_of
from rge.distributed import collectives as dist

BATCH = 64
"""Rows read together."""
SIDE_BY_SIDE = 8
"""Shards read at the same time, so that a batch has rows of several; at most as many as the buffer has rows."""


class Drawn(NamedTuple):
    """A row of a stream."""

    place: str  # ``shard:row``
    row: Mapping[str, Any]  # values by column
    block: range  # numbers of the draws in the same buffer


_Row = tuple[str, Any, int]
"""Its place, a table of the library's, and its number in the table: most processes need few rows of a table."""


class Stream(Reopened):
    """A source whose records are known only once they are read.

    Opening it reads and checks one record; the others are checked when they are drawn.

    `open_stream` opens a ``datasets.IterableDataset`` of tables. In the file `notes`, readers record shards' lengths, so that a
    resumed run can skip them. Pictures are checked only of the first record.
    """

    config: SourceConfig

    def __init__(
        self,
        config: SourceConfig,
        open_stream: Callable[[RecordsConfig], Opened],
        *,
        seed: int = 0,
        notes: Path | None = None,
        **checks: Unpack[Checks],
    ):
        super().__init__(config, open_stream)
        self.name, self.bad = config.label, []
        self.content = {"read": "while training, so its content is unknown"}
        self.need_rationale, self.seed, self.notes = checks.get("need_rationale", False), seed, notes
        stream, columns, folder = self.opened
        row = next((rows_of(table)[0] for table in stream.iter(batch_size=1)), None)
        if row is None:
            raise RecordError("the stream is empty", self.name, kind="empty")
        record, problems = parsed(columns, row, "0:0")
        if record is not None:
            problems = faults_of(record, self.need_rationale, folder, checks.get("pictures"))
        if problems:
            raise RecordError(
                f"the first record already breaks the format: {'; '.join(problems)}", f"{self.name}:0:0"
            )

    def reader(self) -> "Reader":
        """The stream's records by number of the draw."""
        return Reader(self)

    def lengths(self) -> dict[int, int]:
        """Numbers of rows of the shards that have been read to their end, in this run, by any process."""
        notes = [] if self.notes is None else read_json_lines(self.notes)
        return {note["shard"]: note["rows"] for note in notes if note["stream"] == self.config.key}

    def num_rows(self) -> int | None:
        """Number of its rows; None until all of them have been read once."""
        lengths = self.lengths()
        return sum(lengths.values()) if len(lengths) == self.opened[0].num_shards else None


class Reader(Records):
    """A stream's records by number of the draw.

    `read` reads the rows of a step, in any process; `give` hands them to the process that makes records of them. A record that
    was not given, which replaces a bad one, is read when it is asked for.
    """

    def __init__(self, stream: Stream):
        self.stream, self.name, self.bad = stream, stream.name, []
        self._dataset, self._columns, self._folder = stream.opened
        self._shards = self._dataset.num_shards
        self._lengths = stream.lengths()
        self._given: Mapping[int, Drawn] = {}
        self._blocks: Iterator[tuple[int, list[_Row]]] | None = None
        self._held = deque[
            tuple[int, list[_Row]]
        ]()  # numbers of their first draws, and their rows; without a gap

    def read(self, indices: Sequence[int]) -> dict[int, Drawn]:
        """The rows of these draws, all of them later than those of earlier calls."""
        if indices:
            self._forget_before(min(indices))
        return {index: self._read(index) for index in sorted(indices)}

    def give(self, rows: Mapping[int, Drawn]) -> None:
        """Take the rows that will be asked for next, by number."""
        if rows:
            self._forget_before(min(drawn.block.start for drawn in rows.values()))
        self._given = rows

    def __getitem__(self, index: int) -> Record:
        """The record with that number.

        Raises:
            BrokenRecord: it breaks the format.
            RecordError: the stream cannot be read on, or has changed.
        """
        drawn = self._drawn(index)
        record, problems = parsed(self._columns, drawn.row, drawn.place, self._folder)
        if record is not None:
            problems = faults_of(record, self.stream.need_rationale)
        if record is None or problems:
            raise BrokenRecord("; ".join(problems))
        return record

    def place(self, index: int) -> str:
        """Shard and row."""
        return self._drawn(index).place

    def replacements_of(self, index: int) -> range:
        """Records in the same buffer."""
        return self._drawn(index).block

    def _drawn(self, index: int) -> Drawn:
        return self._given.get(index) or self._read(index)

    def _forget_before(self, index: int) -> None:
        while len(self._held) > 1 and self._held[1][0] <= index:
            self._held.popleft()

    def _read(self, index: int) -> Drawn:
        if self._blocks is None or (self._held and index < self._held[0][0]):
            self._blocks = self._blocks_from(index)
            self._held.clear()
        while not self._held or index >= self._held[-1][0] + len(self._held[-1][1]):
            self._held.append(next(self._blocks))
        first, block = next(one for one in reversed(self._held) if one[0] <= index)
        place, table, number = block[index - first]
        return Drawn(place, rows_of(table.slice(number, 1))[0], range(first, first + len(block)))

    def _blocks_from(self, index: int) -> Iterator[tuple[int, list[_Row]]]:
        """Buffers with the number of their first draw, from the one with `index` on."""
        size = self.stream.config.shuffle_buffer
        begins, epoch = 0, 0
        while True:
            whole = self._num_rows_of_epoch()
            if whole and begins + whole <= index:
                passed = (index - begins) // whole
                begins, epoch = begins + passed * whole, epoch + passed
                continue
            number = max(0, index - begins) // size
            rows = self._rows(epoch, number * size)
            while block := list(islice(rows, size)):
                chance = np.random.default_rng([self.stream.seed, _MIXED, epoch, number])
                yield begins + number * size, [block[place] for place in chance.permutation(len(block))]
                number += 1
            whole = self._num_rows_of_epoch()  # all shards are known now
            assert whole is not None
            if not whole:
                raise RecordError("it is empty, and was not when this run began", self.name, kind="empty")
            begins, epoch = begins + whole, epoch + 1

    def _num_rows_of_epoch(self) -> int | None:
        """None while a shard's length is unknown."""
        return sum(self._lengths.values()) if len(self._lengths) == self._shards else None

    def _rows(self, epoch: int, done: int) -> Iterator[_Row]:
        """The rows of an epoch after the first `done`."""
        opened: dict[int, _Shard] = {}

        def found(shard: int, row: int) -> tuple[Any, int] | None:
            if shard not in opened:
                opened[shard] = _Shard(self._tables(shard))
            at = opened[shard].at(row)
            if at is None:
                self._note(shard, opened.pop(shard).length)
            return at

        # A shard that was not noted is taken as endless. If it turns out to end earlier, its length is known, and so on.
        while True:
            turns = self._turns_after(epoch, done)
            begun = [(shard, row) for shard, row in turns.open if row]
            if all(found(shard, row - 1) for shard, row in begun):
                break
            opened.clear()
        while (place := turns.next(lambda shard, row: found(shard, row) is None)) is not None:
            shard, row = place
            yield f"{shard}:{row}", *opened[shard].here

    def _turns_after(self, epoch: int, done: int) -> "_Turns":
        order = np.random.default_rng([self.stream.seed, _SHARDS, epoch]).permutation(self._shards)
        turns = _Turns(order.tolist(), min(SIDE_BY_SIDE, self.stream.config.shuffle_buffer))
        while done > 0:
            done -= (passed := turns.pass_over(done, self._lengths))
            if not passed:
                if turns.next(lambda shard, row: row >= self._lengths.get(shard, math.inf)) is None:
                    break
                done -= 1
        return turns

    def _tables(self, shard: int) -> Iterator[Any]:
        try:
            yield from self._dataset.shard(num_shards=self._shards, index=shard).iter(batch_size=BATCH)
        except Exception as error:  # the library raises what its readers, and the network's, run into
            raise RecordError(
                f"it cannot be read further: {type(error).__name__}: {error}; run the same command again to continue",
                self.name,
                f"shard {shard}",
            ) from error

    def _note(self, shard: int, rows: int) -> None:
        known = self._lengths.get(shard)
        if known == rows:
            return
        if known is not None:
            raise RecordError(
                f"it has changed since this run began: had {known} rows and now has {rows}; pin a revision, and start again with "
                "another out=",
                self.name,
                f"shard {shard}",
                kind="changed",
            )
        self._lengths[shard] = rows
        if self.stream.notes is not None and dist.rank() == 0:  # every process reads all shards
            self.stream.notes.parent.mkdir(parents=True, exist_ok=True)
            note = {"stream": self.stream.config.key, "shard": shard, "rows": rows}
            with self.stream.notes.open("a", encoding="utf-8") as notes:
                notes.write(json.dumps(note) + "\n")


class _Shard:
    """One shard's rows, in ascending order."""

    def __init__(self, tables: Iterator[Any]):
        self._tables, self._first, self._table = tables, 0, None
        self.length = 0  # of what has been read
        self.here: tuple[Any, int]  # the row that was asked for last

    def at(self, row: int) -> tuple[Any, int] | None:
        """A table and the row's number in it; None if the shard ends before."""
        while row >= self.length:
            table = next(self._tables, None)
            if table is None:
                return None
            self._first, self._table = self.length, table
            self.length += table.num_rows
        self.here = self._table, row - self._first
        return self.here


class _Turns:
    """The shards of an epoch that are read side by side; one that ends makes room for the next.

    Attributes:
        open: the shards, each with its next row.
    """

    def __init__(self, order: Sequence[int], most: int):
        self.open = [(shard, 0) for shard in order[:most]]
        self._waiting, self._turn = deque(order[most:]), 0

    def next(self, is_over: Callable[[int, int], bool]) -> tuple[int, int] | None:
        """Shard and row of the next one; None at the end. `is_over` says whether a shard ends before a row."""
        while self.open:
            shard, row = self.open[self._turn]
            if not is_over(shard, row):
                self.open[self._turn] = shard, row + 1
                self._turn = (self._turn + 1) % len(self.open)
                return shard, row
            if self._waiting:
                self.open[self._turn] = self._waiting.popleft(), 0
            else:
                del self.open[self._turn]
                self._turn %= max(len(self.open), 1)
        return None

    def pass_over(self, most: int, lengths: Mapping[int, int]) -> int:
        """Pass over whole rounds until a shard of known length ends, at most so many rows; returns how many."""
        if self._turn or not self.open:
            return 0
        left = [lengths[shard] - row for shard, row in self.open if shard in lengths]
        rounds = max(0, min([most // len(self.open), *left]))
        self.open = [(shard, row + rounds) for shard, row in self.open]
        return rounds * len(self.open)


_SHARDS, _MIXED = 0x5A4D, 0x313D
"""Salts: make these draws independent of other uses of the seed."""
