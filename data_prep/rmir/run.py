"""A run of the pipeline: folder, lock, finished stages, and its client for models."""

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_prep.rmir import frames
from data_prep.rmir.config import RmirConfig
from data_prep.rmir.decisions import overruled
from data_prep.rmir.pictures.encoders import identity
from data_prep.rmir.wording import wording
from rge.calls.caller import Caller, Outcome, Read
from rge.calls.failures import RequestRejected
from rge.calls.model_config import cache_names
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore, open_locked
from rge.common.errors import UserError
from rge.common.files import read_json, write_text

Row = dict[str, Any]
EXPORTED = ("licence", "source_column", "author_column", "licence_column")
"""Settings of the library that only the export reads."""
REPLIES, OPEN = "replies.sqlite", "unanswered.json"
"""Files of a run, and of a stage: every answer; unanswered calls by the number of their part."""
HOW_MUCH_AT_ONCE = ("memory_mb", "shard_size", "changed")
"""Settings that change how a stage works and not what comes of it."""

STAGES = ("seed", "caption", "generate", "filter", "retrieve", "judge", "keep", "pool", "split", "audit")
"""All there are, in order; see `stages_of`."""
READS = {
    "seed": (),
    "caption": ("seed",),
    "generate": ("seed",),
    "filter": ("seed", "generate"),
    "retrieve": ("seed", "caption", "generate", "filter"),
    "judge": ("seed", "generate", "retrieve"),
    "keep": ("judge",),
    "pool": ("keep",),
    "split": ("seed", "caption", "generate", "retrieve", "keep", "pool"),
    "audit": ("seed", "caption", "generate", "retrieve", "judge", "keep", "pool", "split"),
}
"""Whose tables a stage reads; any other stage may change and leave it as it is."""


class RunError(UserError):
    """The run cannot go on; the message says why and what to do."""


def stages_of(config: RmirConfig) -> tuple[str, ...]:
    """The stages of a run, in order: captions are written only where a model is named for them."""
    return tuple(stage for stage in STAGES if stage != "caption" or config.caption.model is not None)


def identities(config: RmirConfig) -> list[dict[str, Any]]:
    """`data_prep.rmir.pictures.encoders.identity` of all encoders: of pictures, of captions, and of the further indices.

    A fallback's vectors, or those of yesterday's weights, do not fit the encoder that is there today.
    """
    more = [spec.encoder for spec in config.retrieve.more]
    return [identity(encoder) for encoder in (config.image_encoder, config.caption_encoder, *more)]


def fingerprint(config: RmirConfig, stage: str, encoders: Sequence[dict[str, Any]] | None = None) -> str:
    """Of everything that a stage's result depends on, and of nothing else: what it reads of the config, and of which stages.

    Args:
        config: of the run.
        stage: one of `stages_of`.
        encoders: of `identities`; None looks at them now, which reads local weights.
    """
    encoders = encoders or identities(config)
    found = {
        "settings": _settings(config, stage, encoders),
        "stages": {
            before: fingerprint(config, before, encoders)
            for before in READS[stage]
            if before in stages_of(config)
        },
    }
    if stage != "seed" and (version := _extended(Path(config.out) / "seed" / "library.json")):
        found["library"] = version
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _extended(path: Path) -> str | None:
    """Which extension of the library a finished seed set holds; None where it was never extended."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return _extension(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)
def _extension(path: Path, _time_ns: int, _size: int) -> str | None:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not found["extensions"]:
        return None
    settled = [found["extensions"], found["gone"], found["captions"]]
    return hashlib.sha256(json.dumps(settled, sort_keys=True).encode()).hexdigest()


def _settings(config: RmirConfig, stage: str, encoders: Sequence[dict[str, Any]]) -> list[Any]:
    """One rule a stage; a stage that begins to read another setting must say so here."""
    image, caption, *more = encoders
    whole = asdict(config)
    texts = wording(config.prompts)
    names = cache_names(config.models)

    def answers_of(label: str) -> list[Any]:
        model = config.models[label]
        return [names[label], model.cache_settings(), model.reasks, model.max_side_px]

    def without(section: str, left_out: Collection[str]) -> dict[str, Any]:
        return {key: value for key, value in whole[section].items() if key not in left_out}

    def asked(text: str) -> list[Any]:
        return [whole[stage], text, answers_of(whole[stage]["model"])]

    def indices() -> list[dict[str, Any]]:
        specs = zip(whole["retrieve"]["more"], more, strict=True)
        return [{**spec, "encoder": encoder} for spec, encoder in specs]

    panel = [spec.model for spec in config.judge.judges]
    exported = {key: whole["library"][key] for key in EXPORTED}
    policy = config.generate.content_policy
    rules: dict[str, Callable[[], list[Any]]] = {
        "seed": lambda: [
            without("library", (*EXPORTED, *HOW_MUCH_AT_ONCE)),
            image,
            caption,
            whole["seed"],
            frames.SCHEMAS["inspected"].names,
        ],
        "caption": lambda: asked(texts.caption),
        "generate": lambda: asked(texts.asked(config.generate.categories, content_policy=policy)),
        "filter": lambda: asked(texts.filter),
        "retrieve": lambda: [without("retrieve", HOW_MUCH_AT_ONCE) | {"more": indices()}],
        "judge": lambda: [whole["judge"], texts.judge, [answers_of(label) for label in panel]],
        "keep": lambda: [config.keep.min_confidence],
        "pool": lambda: [states] if (states := overruled(Path(config.out))) else [],
        "split": lambda: [whole["split"], whole["export"], config.keep.remove_doubted_inputs, exported],
        "audit": lambda: [config.audit.ks, [config.models[label].family or label for label in panel]],
    }
    return rules[stage]()


class Run:
    """The folder of a run.

    Args:
        config: its settings.
        progress: show progress bars.
        read_only: only look; another process may work in the folder.

    Raises:
        RunError: another process works in the same folder.
    """

    def __init__(self, config: RmirConfig, *, progress: bool = True, read_only: bool = False):
        self.config, self.progress, self.out = config, progress, Path(config.out)
        self._lock = None if read_only else open_locked(self.out / ".lock")
        # Read once: weights that change during the run must not pass for those it began with.
        self.encoders = identities(config)
        replies = self.out / REPLIES
        self.store = AnswerStore(None if read_only and not replies.is_file() else replies)
        self._caller: Caller | None = None

    def close(self) -> None:
        """Release the folder."""
        self.store.close()
        if self._lock is not None:
            self._lock.close()

    def path(self, stage: str, name: str = "") -> Path:
        """A file or folder of a stage."""
        return self.out / stage / name

    def rows(self, stage: str, name: str, schema: str | None = None) -> list[dict[str, Any]]:
        """Rows of a table that a finished stage wrote."""
        found = self.path(stage, name)
        return frames.read_rows(
            found if found.is_dir() else found.with_name(f"{name}.parquet"), schema or name
        )

    def by(self, key: str, stage: str, name: str, schema: str | None = None) -> dict[str, dict[str, Any]]:
        """The same by a column."""
        return {row[key]: row for row in self.rows(stage, name, schema)}

    def queries(self) -> list[dict[str, Any]]:
        """What the stage ``generate`` wrote."""
        return self.rows("generate", "queries", "generated")

    def images(self) -> list[dict[str, Any]]:
        """The seed set, in its order; where the library has no caption, with that of the stage ``caption``.

        Returns:
            Rows of the table ``images``, and ``caption_by``: library, the name of the model that wrote it, or None.
        """
        images = self.rows("seed", "images")
        written: dict[str, str] = {}
        if (model := self.config.caption.model) is not None:
            written = {row["id"]: row["caption"] for row in self.rows("caption", "captions")}
        for image in images:
            image["caption_by"] = "library" if image["caption"] else None
            if model is not None and image["id"] in written:
                image["caption"] = written[image["id"]]
                image["caption_by"] = self.config.models[model].name
        return images

    def caption_vectors(self) -> Path:
        """File with the vectors of the captions of `images`, in their order; pictures without one have none."""
        return self.path("seed" if self.config.caption.model is None else "caption", "captions.npy")

    # ------------------------------------------------------------------------------------------------ finished stages

    def done(self, stage: str) -> dict[str, Any] | None:
        """What a finished stage reported; None where it is not finished, or was finished with other settings."""
        try:
            found = json.loads(self.path(stage, "done.json").read_text())
        except (OSError, ValueError):
            return None
        if found.get("unanswered") and self.config.on_unanswered == "wait":
            return None
        return found if found["fingerprint"] == self.fingerprint(stage) else None

    def fingerprint(self, stage: str) -> str:
        """`fingerprint` with the encoders as they were when the run began."""
        return fingerprint(self.config, stage, self.encoders)

    def run(self, stage: str, work: Callable[["Run"], dict[str, Any]]) -> dict[str, Any]:
        """Run a stage, or return what it reported when it was finished before.

        A stage whose settings changed starts anew; its answers are kept, so only what really changed is asked again. One with
        unanswered calls asks those again.
        """
        if (found := self.done(stage)) and not found.get("unanswered"):
            return found
        self._renew(stage)
        spent = self.store.total_cost()
        asked = self.store.num_replies()
        before = self._met()
        began = time.perf_counter()
        counts = work(self)
        report = {
            "stage": stage,
            "fingerprint": self.fingerprint(stage),
            "counts": counts,
            "unanswered": sum(self.open_parts(stage).values()),
            "seconds": round(time.perf_counter() - began, 2),
            "calls": self.store.num_replies() - asked,
            "cost": round(self.store.total_cost() - spent, 6),
            "met": dict(self._met() - before),
        }
        write_text(self.path(stage, "done.json"), json.dumps(report, indent=1) + "\n")
        return report

    def _met(self) -> Counter[str]:
        counts = Counter(vars(self._caller.counts) if self._caller is not None else {})
        del counts["asked"], counts["cached"]
        return counts

    def _renew(self, stage: str) -> None:
        # Parts are only good for the settings they were made with.
        # The size of a shard decides which rows a part holds.
        if not self.begun(stage):
            self.empty(stage)
            write_text(self.path(stage, "settings"), self._made_with(stage))

    def begun(self, stage: str) -> bool:
        """Whether a stage was begun with these settings, so that its parts are good for them."""
        marker = self.path(stage, "settings")
        return marker.is_file() and marker.read_text() == self._made_with(stage)

    def _made_with(self, stage: str) -> str:
        shard = f" {self.config.queries_per_shard}" if stage != "seed" else ""
        return self.fingerprint(stage) + shard

    def empty(self, stage: str) -> None:
        """Delete what a stage wrote."""
        folder = self.path(stage)
        if folder.is_dir():
            for file in sorted(folder.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()

    # ---------------------------------------------------------------------------------------------------------- calls

    def picture(self, image: dict[str, Any], model: str) -> Picture:
        """A seed picture as part of a prompt."""
        return Picture(image["ref"], image["sha256"], self.config.models[model].max_side_px)

    def in_shards(self, stage: str, items: Sequence[Any], asking: "Asking") -> None:
        """Ask about items, and write what comes of so many at a time; what is written is not done again.

        No shard waits for the one before: while the last calls of one are under way, those of the next are made. An item with
        an unanswered call is not settled: its shard waits, or, with ``on_unanswered=proceed``, is written without it for now.

        Raises:
            RunError: calls are unanswered; the same command asks only those.
            RequestRejected: all calls were rejected.
        """
        if self._caller is None:  # one for all stages: what it learns of an endpoint's limits lasts
            config = self.config
            self._caller = Caller(config.models, self.store, progress=self.progress, budget=config.budget)
        shards = _Shards(self, stage, items, asking)
        total = sum(asking.count(item) for shard in shards.todo for item in shard.items)
        self._caller.run(shards.requests(), shards.take, read=asking.read, title=stage, total=total)
        shards.close()

    def open_parts(self, stage: str) -> dict[str, int]:
        """Unanswered calls by the number of the part that was written without what they are about."""
        return read_json(self.path(stage, OPEN)) or {}

    def outdate(self, stage: str) -> None:
        """Redo the stages that read this one's tables, directly or not, from the kept answers."""
        outdated = {stage}
        for later in stages_of(self.config):
            if outdated & set(READS[later]):
                outdated.add(later)
                self.empty(later)


@dataclass(frozen=True)
class Asking:
    """What a stage asks about each of its items, and what it writes of the answers."""

    tables: dict[str, str]  # schema of each table that is written
    requests: Callable[[Any], Iterable[Request]]  # of an item; their ``model`` is a name of the config
    read: Read  # an answer that it cannot read is asked for again
    # (table, row) of an item and the outcomes of its requests
    rows: Callable[[Any, list[Outcome]], Iterable[tuple[str, Row]]]
    count: Callable[[Any], int] = lambda item: 1  # requests of an item, for the progress bar


@dataclass
class _Shard:
    # Items whose calls are under way; written as soon as all of them are settled, whatever the shards before it wait for.
    number: int
    items: Sequence[Any]
    outcomes: list[dict[int, Outcome]] = field(default_factory=list)  # of each item, by number of the request
    under_way: int = 0
    complete: bool = False  # all of its requests are known

    def calls(self) -> list[Outcome]:
        """What became of all its requests."""
        return [one for some in self.outcomes for one in some.values()]

    def unanswered(self) -> list[Outcome]:
        """Its calls without an answer."""
        return [one for one in self.calls() if one.unanswered]

    def settled(self) -> Iterator[tuple[Any, list[Outcome]]]:
        """Its items without an unanswered call, and what became of their requests, in order."""
        for item, some in zip(self.items, self.outcomes, strict=True):
            outcomes = [some[place] for place in sorted(some)]
            if not any(one.unanswered for one in outcomes):
                yield item, outcomes


class _Shards:
    """The shards of a stage that are not written yet."""

    def __init__(self, run: Run, stage: str, items: Sequence[Any], asking: Asking):
        self.run, self.stage, self.asking = run, stage, asking
        for name in asking.tables:  # without items a table is empty, not missing
            run.path(stage, name).mkdir(parents=True, exist_ok=True)
        self.open_parts, size = run.open_parts(stage), run.config.queries_per_shard
        starts = range(0, len(items), size)
        shards = [_Shard(number, items[start : start + size]) for number, start in enumerate(starts)]
        self.todo = [shard for shard in shards if not self._is_written(shard)]
        self.asked = 0
        self.num_answered = len(shards) - len(self.todo)  # a part is written once anything was answered
        self.rejected: list[Outcome] = []
        self.unanswered: list[Outcome] = []
        self._held_back: list[_Shard] = []
        self._owners: dict[int, tuple[_Shard, dict[int, Outcome], int]] = {}

    def _part(self, shard: _Shard, name: str) -> Path:
        return self.run.path(self.stage, name) / f"part-{shard.number:05d}.parquet"

    def _is_written(self, shard: _Shard) -> bool:
        parts = (self._part(shard, name) for name in self.asking.tables)
        return str(shard.number) not in self.open_parts and all(part.is_file() for part in parts)

    def requests(self) -> Iterator[Request]:
        """Of all items."""
        for shard in self.todo:
            for item in shard.items:
                outcomes: dict[int, Outcome] = {}
                shard.outcomes.append(outcomes)
                for place, request in enumerate(self.asking.requests(item)):
                    self._owners[self.asked] = shard, outcomes, place
                    shard.under_way += 1
                    self.asked += 1
                    yield request
            shard.complete = True
            self._finish_if_settled(shard)

    def take(self, position: int, outcome: Outcome) -> None:
        """Note what became of a request."""
        shard, outcomes, place = self._owners.pop(position)
        outcomes[place] = outcome
        shard.under_way -= 1
        self._finish_if_settled(shard)

    def _finish_if_settled(self, shard: _Shard) -> None:
        if not shard.complete or shard.under_way:
            return
        outcomes = shard.calls()
        self.rejected += [one for one in outcomes if one.rejected]
        self.num_answered += sum(not (one.rejected or one.unanswered) for one in outcomes)
        if self.num_answered or not outcomes:
            self._write(shard)
        else:
            self._held_back.append(shard)  # whether the endpoint works at all is not known yet

    def _write(self, shard: _Shard) -> None:
        missing = shard.unanswered()
        self.unanswered += missing
        before = self.open_parts.get(str(shard.number), 0)
        proceed = self.run.config.on_unanswered == "proceed"
        if missing and (not proceed or len(missing) == before):
            return
        if before:
            self.run.outdate(self.stage)
        if missing:
            self._note_open(shard, len(missing))
        found = [row for item, outcomes in shard.settled() for row in self.asking.rows(item, outcomes)]
        for name, schema in self.asking.tables.items():
            rows = (row for table, row in found if table == name)
            frames.write_rows(self._part(shard, name), schema, rows)
        if before and not missing:
            self._note_open(shard, 0)

    def _note_open(self, shard: _Shard, number: int) -> None:
        self.open_parts[str(shard.number)] = number
        found = {part: calls for part, calls in self.open_parts.items() if calls}
        write_text(self.run.path(self.stage, OPEN), json.dumps(found))

    def close(self) -> None:
        """Write what was held back.

        Raises:
            RunError: calls are unanswered, and are to be waited for.
            RequestRejected: all calls were rejected.
        """
        for shard in self._held_back:
            self._write(shard)
        if self.unanswered:
            said = (
                f"{self.stage}: {len(self.unanswered)} of {self.asked} calls are unanswered, such as: "
                f"{self.unanswered[0].error}. The other answers are kept; run the same command again, and only these are asked"
            )
            if self.run.config.on_unanswered == "wait":
                raise RunError(f"{said}. on_unanswered=proceed continues without what they are about")
            print(f"{said}; what they are about is left out until then", file=sys.stderr, flush=True)
        if self.rejected and not self.num_answered and not self.run.open_parts(self.stage):
            self.run.empty(self.stage)  # or the rows without answers would pass for its result next time
            self.run.store.forget_rejections([outcome.key for outcome in self.rejected])
            raise RequestRejected(
                f"{self.stage}: all {len(self.rejected)} calls were rejected, such as: {self.rejected[0].error}. The stage is not "
                "done; change the model's settings and run the same command again"
            )


def reasons(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many rows were rejected for each reason, most frequent first."""
    return dict(Counter(row["reason"] for row in rows).most_common())
