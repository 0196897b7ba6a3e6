"""Records left out by ``data.on_bad=skip``: counted, listed in the stage's folder, limited in number."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rge.common.files import read_json_lines, write_text
from rge.data.collate import Batch
from rge.data.config import DataConfig
from rge.data.mixture import Mixture
from rge.data.sources import BadRecord, RecordError, Records
from rge.distributed import collectives as dist

NAME = "bad_records.jsonl"

LEAST = 1000
"""Minimum assumed number of records of a stream, so that the first bad one is not a large share."""


class BadRecords:
    """A stage's bad records so far, equal on all processes; the main process lists them in ``bad_records.jsonl``.

    One line per record: ``step`` (the first that drew it; 0 for those that break the format), ``source``, ``place``
    (byte, row, or ``shard:row`` of a stream), ``id`` and ``reason``. After a resume, records of later steps are found again.

    The number of a stream's records is that drawn so far by the `mixture`, but at least `LEAST`. Too many bad records are a
    `RecordError`.
    """

    def __init__(
        self,
        settings: DataConfig,
        files: Sequence[Records],
        folder: Path,
        first_step: int,
        mixture: Mixture,
    ):
        self.path = folder / NAME
        self.skips, self.max_share = settings.on_bad == "skip", settings.max_bad_share
        self.num_records = sum(len(file) + len(file.bad) for file in files if file.size is not None)
        self.mixture, self.step = mixture, first_step
        self.found: dict[tuple[str, int | str], dict[str, Any]] = {}
        if not self.skips:
            return
        known = dist.from_main(read_json_lines(self.path) if dist.rank() == 0 else None)
        self._add(0, [bad for file in files for bad in file.bad])
        for line in known:
            if 0 < line["step"] <= first_step:
                self.found.setdefault((line["source"], line["place"]), line)
        self._write()
        self._check()

    def after_step(self, step: int, batch: Batch) -> dict[str, float]:
        """Add the records skipped in the step's batch, on all processes; returns the number of distinct ones so far."""
        if not self.skips:
            return {}
        before, self.step = len(self.found), step
        self._add(step, [bad for of_one_rank in dist.gather_objects(batch.bad) for bad in of_one_rank])
        if len(self.found) > before:
            self._write()
            if before == 0 and dist.rank() == 0:
                tqdm.write(f"a bad record was skipped; all bad records are listed in {self.path}")
            self._check()
        return {"bad_records": len(self.found)}

    def _add(self, step: int, found: Sequence[BadRecord]) -> None:
        for bad in found:
            self.found.setdefault((bad.source, bad.place), {"step": step, **asdict(bad)})

    def _check(self) -> None:
        number = self.num_records
        drawn = zip(self.mixture.drawn_before(self.step), self.mixture.sizes, strict=True)
        if of_streams := [count for count, size in drawn if size is None]:
            number += max(LEAST, sum(of_streams))
        if len(self.found) > self.max_share * number:
            last = list(self.found.values())[-1]
            raise RecordError(
                f"{len(self.found)} of {number} records are bad, more than data.max_bad_share={self.max_share}; they "
                f"are listed in {self.path}. This is the last: {last['reason']}",
                last["source"],
                f"record {last['id']!r}",
            ).about("data.max_bad_share")

    def _write(self) -> None:
        if dist.rank() or not (self.found or self.path.exists()):
            return
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in self.found.values()))
