"""Streaming data sets: shuffled, sharded over workers, resumed at the next record.

A stream has shards, such as files. Every data worker of every process is a reader with its own shards, if there are enough;
readers that share a shard take turns in its rows:

    epoch e: shards in random order --dealt out--> reader --rows, shuffled within a buffer--> records 0, 1, ...

A reader's n-th row depends only on the seed and n. A position is therefore a number: a resumed run skips whole shards unread,
and earlier rows within a shard.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from rge.common.files import read_json_lines
from rge.common.schema import Record
from rge.config import RecordsConfig, SourceConfig
from rge.data.rows import Opened, Reopened, parsed, rows_of
from rge.data.sources import BrokenRecord, Checks, RecordError, Records, faults_of

BATCH = 64
"""Rows read together."""
Row = tuple[str, Mapping[str, Any]]
"""Its place, ``shard:row``, and its values by column."""


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
            raise RecordError(f"training records {self.name}: the stream is empty")
        record, problems = parsed(columns, row, "0:0")
        if record is not None:
            problems = faults_of(record, self.need_rationale, folder, checks.get("pictures"))
        if problems:
            raise RecordError(
                f"training records break the format, the first one already:\n{self.name}:0:0: "
                + "; ".join(problems)
            )

    def reader(self, number: int, of: int) -> "Reader":
        """One of several readers that together read every row once per epoch."""
        return Reader(self, number, of)


class Reader(Records):
    """A reader's records by number, efficient in ascending order."""

    def __init__(self, stream: Stream, number: int, of: int):
        self.stream, self.name, self.bad = stream, stream.name, []
        self._dataset, self._columns, self._folder = stream.opened
        self._shards = self._dataset.num_shards
        # The largest number of groups that divides readers and shards evenly; a group shares its shards row by row.
        groups = max(n for n in range(1, of + 1) if of % n == 0 and self._shards % n == 0)
        self._group, self._groups = number % groups, groups
        self._turn, self._turns = number // groups, of // groups
        self._number = number
        notes = [] if stream.notes is None else read_json_lines(stream.notes)
        key = stream.config.key  # of the streams that are noted in this file
        self._lengths = {note["shard"]: note["rows"] for note in notes if note["stream"] == key}
        self._blocks: Iterator[tuple[int, list[Row]]] | None = None
        self._first, self._block = 0, list[Row]()

    def __getitem__(self, index: int) -> Record:
        """The record with that number.

        Raises:
            BrokenRecord: it breaks the format.
            RecordError: the stream cannot be read on, or has changed.
        """
        place, row = self._row(index)
        record, problems = parsed(self._columns, row, place, self._folder)
        if record is not None:
            problems = faults_of(record, self.stream.need_rationale)
        if record is None or problems:
            raise BrokenRecord("; ".join(problems))
        return record

    def place(self, index: int) -> str:
        """Shard and row."""
        return self._row(index)[0]

    def replacements_of(self, index: int) -> range:
        """Records in the same buffer."""
        self._row(index)
        return range(self._first, self._first + len(self._block))

    def _row(self, index: int) -> Row:
        if self._blocks is None or index < self._first:
            self._blocks, self._first, self._block = self._blocks_from(index), 0, []
        while index >= self._first + len(self._block):
            self._first, self._block = next(self._blocks)
        return self._block[index - self._first]

    def _blocks_from(self, index: int) -> Iterator[tuple[int, list[Row]]]:
        """Buffers with the number of their first record, from the one with `index` on."""
        size = self.stream.config.shuffle_buffer
        begins, epoch = 0, 0
        while True:
            mine = self._num_rows_of_epoch(epoch)
            if mine and begins + mine <= index:
                begins, epoch = begins + mine, epoch + 1
                continue
            done = max(0, (index - begins) // size) * size
            number, rows = done // size, self._rows(epoch, done)
            while block := list(islice(rows, size)):
                chance = np.random.default_rng([self.stream.seed, _MIXED, self._number, epoch, number])
                yield begins + number * size, [block[place] for place in chance.permutation(len(block))]
                number += 1
            mine = self._num_rows_of_epoch(epoch)  # all shards are known now
            assert mine is not None
            if not mine:
                raise RecordError(
                    f"{self.name} has fewer rows than readers (processes times data.num_workers): launch fewer, or set "
                    "streaming: false"
                )
            begins, epoch = begins + mine, epoch + 1

    def _order(self, epoch: int) -> list[int]:
        order = np.random.default_rng([self.stream.seed, _SHARDS, epoch]).permutation(self._shards)
        return order[self._group :: self._groups].tolist()

    def _num_rows_of_epoch(self, epoch: int) -> int | None:
        """Number of this reader's rows per epoch; None while a shard's length is unknown."""
        lengths = [self._lengths.get(shard) for shard in self._order(epoch)]
        if None in lengths:
            return None
        return len(range(self._turn, sum(length for length in lengths if length is not None), self._turns))

    def _rows(self, epoch: int, done: int) -> Iterator[Row]:
        """This reader's rows of an epoch after the first `done`, with their places."""
        next_one = self._turn + done * self._turns  # counted over the rows of all shards of the group
        begins = 0
        for shard in self._order(epoch):
            length = self._lengths.get(shard)
            if length is not None and begins + length <= next_one:
                begins += length
                continue
            row = 0
            for table in self._tables(shard):
                while next_one < begins + row + table.num_rows:
                    place = next_one - begins - row
                    yield f"{shard}:{row + place}", rows_of(table.slice(place, 1))[0]
                    next_one += self._turns
                row += table.num_rows
            self._note(shard, row)
            begins += row

    def _tables(self, shard: int) -> Iterator[Any]:
        try:
            yield from self._dataset.shard(num_shards=self._shards, index=shard).iter(batch_size=BATCH)
        except Exception as error:  # the library raises what its readers, and the network's, run into
            raise RecordError(
                f"the stream {self.name} cannot be read further, in shard {shard}: {type(error).__name__}: {error}; run the same "
                "command again to continue"
            ) from error

    def _note(self, shard: int, rows: int) -> None:
        known = self._lengths.get(shard)
        if known == rows:
            return
        if known is not None:
            raise RecordError(
                f"{self.name} has changed since this run began: its shard {shard} had {known} rows and now has {rows}; pin a "
                "revision, and start again with another out="
            )
        self._lengths[shard] = rows
        if self.stream.notes is not None:
            self.stream.notes.parent.mkdir(parents=True, exist_ok=True)
            note = {"stream": self.stream.config.key, "shard": shard, "rows": rows}
            with self.stream.notes.open("a", encoding="utf-8") as notes:
                notes.write(json.dumps(note) + "\n")


_SHARDS, _MIXED = 0x5A4D, 0x313D
"""Salts: make these draws independent of other uses of the seed."""
