"""A run of the pipeline: its folder, lock, finished stages and model client."""

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_prep.rmir import frames
from data_prep.rmir.config import RmirConfig
from data_prep.rmir.decisions import overruled
from data_prep.rmir.pictures.encoders import identity
from data_prep.rmir.wording import wording
from rge.calls.caller import Caller, Outcome, Read, check_answered
from rge.calls.model_config import cache_names
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore
from rge.common.errors import UserError
from rge.common.files import held, read_json, write_json, write_text

Row = dict[str, Any]
EXPORTED = ("licence", "source_column", "author_column", "licence_column")
"""Library settings that only the export reads."""
REPLIES, SPENT, OPEN = "replies.sqlite", "spent.json", "unanswered.json"
"""A run's files of all answers and of what each stage spent, and a stage's file of unanswered calls, by part number."""
NOT_IN_FINGERPRINT = ("memory_mb", "shard_size", "changed", "exclude")
"""Settings that change how a stage works but not its result."""
ITERATIONS = 20
"""Of k-means."""

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
"""All stages, in order, with the stages whose tables each reads; only changes to these outdate it."""
STAGES = tuple(READS)


def stages_of(config: RmirConfig) -> tuple[str, ...]:
    """The stages of a run, in order; ``caption`` is included only if ``caption.model`` is set."""
    return tuple(stage for stage in STAGES if stage != "caption" or config.caption.model is not None)


def identities(config: RmirConfig) -> list[dict[str, Any]]:
    """`data_prep.rmir.pictures.encoders.identity` of the encoders of pictures, captions and further indices."""
    more = [spec.encoder for spec in config.retrieve.more]
    return [identity(encoder) for encoder in (config.image_encoder, config.caption_encoder, *more)]


def fingerprints(config: RmirConfig, encoders: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Hash of exactly what each stage's result depends on: the settings that it reads (`identities` too), and the stages before it."""
    settings = _settings(config, encoders)
    library = read_json(Path(config.out) / "seed" / "library.json") or {}
    extended = library.get("extensions") and [library[key] for key in ("extensions", "gone", "captions")]
    found: dict[str, str] = {}
    for name in stages_of(config):
        before = {earlier: found[earlier] for earlier in READS[name] if earlier in found}
        depends_on: dict[str, Any] = {"settings": settings[name], "stages": before}
        if extended and name != "seed":
            depends_on["library"] = _hash(extended)
        found[name] = _hash(depends_on)
    return found


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _settings(config: RmirConfig, encoders: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Settings that each stage reads; extend its rule when it starts to read another one."""
    image, caption, *more = encoders
    whole, texts, names = asdict(config), wording(config.prompts), cache_names(config.models)

    def answers_of(label: str) -> list[Any]:
        model = config.models[label]
        # the first number: of what counts as an answer
        return [2, names[label], model.cache_settings(), model.reasks, model.max_side_px]

    def without(section: str, *left_out: str) -> dict[str, Any]:
        return {key: value for key, value in whole[section].items() if key not in left_out}

    def asked(stage: str, text: str) -> list[Any]:
        return [whole[stage], text, answers_of(whole[stage]["model"])]

    specs = zip(whole["retrieve"]["more"], more, strict=True)
    indices = [{**spec, "encoder": encoder} for spec, encoder in specs]
    panel = [spec.model for spec in config.judge.judges]
    exported = {key: whole["library"][key] for key in EXPORTED}
    policy, inspected = config.generate.content_policy, frames.SCHEMAS["inspected"].names
    library = without("library", *EXPORTED, *NOT_IN_FINGERPRINT)
    return {
        # iterations: a setting of earlier versions; keeps the fingerprints of their runs
        "seed": [library, image, caption, whole["seed"] | {"iterations": ITERATIONS}, inspected],
        "caption": asked("caption", texts.caption) if config.caption.model is not None else [],
        "generate": asked("generate", texts.asked(config.generate.categories, content_policy=policy)),
        "filter": asked("filter", texts.filter),
        "retrieve": [without("retrieve", *NOT_IN_FINGERPRINT) | {"more": indices}],
        "judge": [whole["judge"], texts.judge, [answers_of(label) for label in panel]],
        "keep": [config.keep.min_confidence],
        "pool": [states] if (states := overruled(Path(config.out))) else [],
        # the first number: of what a stage writes
        "split": [2, whole["split"], whole["export"], config.keep.remove_doubted_inputs, exported],
        "audit": [2, config.audit.ks, [config.models[label].family or label for label in panel]],
    }


class Run:
    """The folder of a run.

    ``read_only`` takes no lock and writes nothing, since another process may be running.

    Raises:
        UserError: another process is using the folder.
    """

    def __init__(self, config: RmirConfig, *, progress: bool = True, read_only: bool = False):
        self.config, self.progress, self.out = config, progress, Path(config.out)
        self._lock = ExitStack()
        if not read_only:
            self._lock.enter_context(held(self.out))
        # Read once, so that weights replaced during the run are not mistaken for those it started with.
        self.encoders = identities(config)
        replies = self.out / REPLIES
        self.store = AnswerStore(
            None if read_only and not replies.is_file() else replies, read_only=read_only
        )
        self._caller: Caller | None = None

    def close(self) -> None:
        """Release the folder."""
        self.store.close()
        self._lock.close()

    def path(self, stage: str, name: str = "") -> Path:
        """A file or folder of a stage."""
        return self.out / stage / name

    def rows(self, stage: str, table: str) -> frames.Rows:
        """`data_prep.rmir.frames.stage_rows` of this run."""
        return frames.stage_rows(self.out, stage, table)

    def by(self, key: str, stage: str, table: str) -> frames.RowsBy:
        """Like `rows`, by the values of a column."""
        return frames.stage_rows_by(key, self.out, stage, table)

    def images(self) -> frames.Rows:
        """The seed set in order, with captions from the stage ``caption`` where the library has none.

        Returns:
            Rows of the table ``images`` with ``caption_by``: library, the name of the model that wrote it, or None.
        """
        images = self.rows("seed", "images").table
        nobody = pa.scalar(None, pa.string())
        caption, has = images["caption"], pc.fill_null(pc.not_equal(images["caption"], ""), False)
        writer = pc.if_else(has, "library", nobody)
        if (model := self.config.caption.model) is not None:
            written = self.rows("caption", "captions").table
            place = pc.index_in(images["id"], value_set=written["id"].combine_chunks())
            is_written = pc.is_valid(place)
            caption = pc.if_else(is_written, written["caption"].take(place), caption)
            writer = pc.if_else(is_written, self.config.models[model].published_name, writer)
        at = images.schema.get_field_index("caption")
        images = images.set_column(at, "caption", caption).append_column("caption_by", writer)
        return frames.Rows(images, self.out)

    def caption_vectors(self) -> Path:
        """File with the vectors of the captions of `images`, in order, without rows for missing captions."""
        return self.path("seed" if self.config.caption.model is None else "caption", "captions.npy")

    # ------------------------------------------------------------------------------------------------ finished stages

    def done(self, stage: str) -> dict[str, Any] | None:
        """Report of a finished stage; None if it is not finished, or was finished with other settings."""
        found = read_json(self.path(stage, "done.json"))
        if not found or (found.get("unanswered") and self.config.on_unanswered == "wait"):
            return None
        return found if found["fingerprint"] == self.fingerprint(stage) else None

    def fingerprint(self, stage: str) -> str:
        """That of a stage, with the encoders as of the start of the run."""
        return fingerprints(self.config, self.encoders)[stage]

    def run(self, stage: str, work: Callable[["Run"], dict[str, Any]]) -> dict[str, Any]:
        """Run a stage, or return its report if it is finished.

        A stage with changed settings starts over, but reuses stored answers, so only requests that changed are sent. A
        stage with unanswered calls repeats only these.
        """
        if (found := self.done(stage)) and not found.get("unanswered"):
            return found
        spent, met = self._spent(), self._call_counts()
        # Parts are valid only for the settings (including the shard size) they were made with.
        if not self.begun(stage):
            self.empty(stage)
            write_text(self.path(stage, "settings"), self._made_with(stage))
        before = {key: number - spent.get(stage, {}).get(key, 0) for key, number in self._totals().items()}
        write_json(self.out / SPENT, {"stages": spent, "running": {"stage": stage, "before": before}})
        began = time.perf_counter()
        counts = work(self)
        report = {
            "stage": stage,
            "fingerprint": self.fingerprint(stage),
            "counts": counts,
            "unanswered": sum(self.open_parts(stage).values()),
            "seconds": round(time.perf_counter() - began, 2),
            **self._since(before),
            "met": dict(self._call_counts() - met),
        }
        write_json(self.path(stage, "done.json"), report)
        write_json(self.out / SPENT, {"stages": self._spent()})
        return report

    def _spent(self) -> dict[str, dict[str, float]]:
        """Calls and cost of each stage over all commands and settings, including those of a stage that was stopped."""
        found = read_json(self.out / SPENT)
        if not found:  # a run of an earlier version
            reports = {stage: read_json(self.path(stage, "done.json")) for stage in STAGES}
            found = {
                "stages": {
                    stage: {key: report[key] for key in ("calls", "cost")}
                    for stage, report in reports.items()
                    if report
                }
            }
        if running := found.get("running"):
            found["stages"][running["stage"]] = self._since(running["before"])
        return found["stages"]

    def _totals(self) -> dict[str, float]:
        cost = sum(entry.cost for entry in self.store.ledger())
        return {"calls": self.store.num_replies(), "cost": cost}

    def _since(self, before: dict[str, float]) -> dict[str, float]:
        return {key: round(number - before[key], 6) for key, number in self._totals().items()}

    def _call_counts(self) -> Counter[str]:
        counts = Counter(vars(self._caller.counts) if self._caller is not None else {})
        del counts["asked"], counts["cached"]
        return counts

    def begun(self, stage: str) -> bool:
        """Whether a stage was started with these settings, so that its parts are valid."""
        marker = self.path(stage, "settings")
        return marker.is_file() and marker.read_text() == self._made_with(stage)

    def _made_with(self, stage: str) -> str:
        shard = f" {self.config.queries_per_shard}" if stage != "seed" else ""
        return self.fingerprint(stage) + shard

    def empty(self, stage: str) -> None:
        """Delete what a stage wrote; its folder may be a link to another disk."""
        for file in sorted(self.path(stage).rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()

    # ---------------------------------------------------------------------------------------------------------- calls

    def picture(self, image: dict[str, Any], model: str) -> Picture:
        """A seed picture as part of a prompt."""
        return Picture(image["ref"], image["sha256"], self.config.models[model].max_side_px)

    def in_shards(self, stage: str, items: Sequence[Any], asking: "Asking") -> None:
        """Make the calls about items, and write the results shard by shard; shards already written are skipped.

        Shards overlap: while the last calls of one are pending, those of the next are made. A shard with unanswered calls
        is not written, or, with ``on_unanswered=proceed``, written without their items for now.

        Raises:
            UserError: calls are unanswered (running the same command again repeats only these), or all calls of a model were
                rejected.
        """
        if self._caller is None:  # shared by all stages, since it learns the endpoints' limits
            config = self.config
            self._caller = Caller(config.models, self.store, progress=self.progress, budget=config.budget)
        shards = _Shards(self, stage, items, asking)
        total = sum(asking.num_calls(shard.items) for shard in shards.todo)
        self._caller.run(shards.requests(), shards.take, read=asking.read, title=stage, total=total)
        shards.close()

    def open_parts(self, stage: str) -> dict[str, int]:
        """Number of unanswered calls, by the part that was written without them."""
        return read_json(self.path(stage, OPEN)) or {}

    def outdate(self, stage: str) -> None:
        """Discard the results of all stages that depend on this one; they are redone from stored answers."""
        outdated = {stage}
        for later in stages_of(self.config):
            if outdated & set(READS[later]):
                outdated.add(later)
                self.empty(later)


@dataclass(frozen=True)
class Asking:
    """A stage's requests for each of its items, and the rows it makes of the answers."""

    tables: tuple[str, ...]  # to write
    requests: Callable[[Any], Iterable[Request]]  # for an item; their ``model`` is a name in the config
    read: Read  # parses an answer; requests whose answers it rejects are repeated
    # (table, row) pairs for an item and the outcomes of its requests
    rows: Callable[[Any, list[Outcome]], Iterable[tuple[str, Row]]]
    count: Callable[[Any], int] | None = None  # requests of an item, for the progress bar; None: one

    def num_calls(self, items: Sequence[Any]) -> int:
        """Requests of all items."""
        return len(items) if self.count is None else sum(map(self.count, items))


@dataclass
class _Shard:
    """Items whose calls are pending; written when all of them are settled, independently of other shards."""

    part: str  # its number
    items: Sequence[Any]
    outcomes: list[dict[int, Outcome]] = field(default_factory=list)  # of each item, by number of the request
    pending: int = 1  # calls, and one more until all of them have been requested
    models: set[str] = field(default_factory=set)  # whose calls these are

    @property
    def unanswered(self) -> list[Outcome]:
        """Outcomes of its unanswered calls."""
        return [outcome for of_item in self.outcomes for outcome in of_item.values() if outcome.unanswered]


class _Shards:
    """The shards of a stage that are not written yet."""

    def __init__(self, run: Run, stage: str, items: Sequence[Any], asking: Asking):
        self.run, self.stage, self.asking = run, stage, asking
        for name in asking.tables:  # a stage without items has empty tables, not missing ones
            run.path(stage, name).mkdir(parents=True, exist_ok=True)
        self.open_parts, size = run.open_parts(stage), run.config.queries_per_shard
        starts = range(0, len(items), size)
        self.num_calls = asking.num_calls(items)
        shards = [_Shard(str(number), items[start : start + size]) for number, start in enumerate(starts)]
        self.todo = [shard for shard in shards if not self._is_written(shard)]
        self.asked = 0
        # By model. A part is only written after each of its models has answered some call.
        num_written = len(shards) - len(self.todo)
        self.num_answered: defaultdict[str, int] = defaultdict(lambda: num_written)
        self.rejected: defaultdict[str, list[Outcome]] = defaultdict(list)
        self.unanswered: list[Outcome] = []
        self._held_back: list[_Shard] = []
        self._owners: dict[int, tuple[_Shard, dict[int, Outcome], int, str]] = {}

    def _file(self, shard: _Shard, table: str) -> Path:
        return self.run.path(self.stage, table) / f"part-{shard.part:0>5}.parquet"

    def _is_written(self, shard: _Shard) -> bool:
        files = (self._file(shard, table) for table in self.asking.tables)
        return shard.part not in self.open_parts and all(file.is_file() for file in files)

    def requests(self) -> Iterator[Request]:
        """Requests for all items."""
        for shard in self.todo:
            for item in shard.items:
                outcomes: dict[int, Outcome] = {}
                shard.outcomes.append(outcomes)
                for place, request in enumerate(self.asking.requests(item)):
                    self._owners[self.asked] = shard, outcomes, place, request.model
                    shard.models.add(request.model)
                    shard.pending += 1
                    self.asked += 1
                    yield request
            self._settle_one(shard)

    def take(self, position: int, outcome: Outcome) -> None:
        """Record the outcome of a request."""
        shard, outcomes, place, model = self._owners.pop(position)
        outcomes[place] = outcome
        self.num_answered[model] += not (outcome.rejected or outcome.unanswered)
        if self.num_answered[model]:
            self.rejected.pop(model, None)  # of use only while a model may reject everything
        elif outcome.rejected:
            self.rejected[model].append(outcome)
        self._settle_one(shard)

    def _settle_one(self, shard: _Shard) -> None:
        shard.pending -= 1
        if shard.pending:
            return
        if all(self.num_answered[model] for model in shard.models):
            self._write(shard)
        else:
            self._held_back.append(shard)  # not yet known whether the endpoints work at all

    def _write(self, shard: _Shard) -> None:
        missing, before = shard.unanswered, self.open_parts.get(shard.part, 0)
        self.unanswered += missing
        if missing and (self.run.config.on_unanswered == "wait" or len(missing) == before):
            return
        if before:
            self.run.outdate(self.stage)
        if missing:
            self._note_open(shard, len(missing))
        found = [
            row
            for item, outcomes in zip(shard.items, shard.outcomes, strict=True)
            if not any(outcome.unanswered for outcome in outcomes.values())
            for row in self.asking.rows(item, [outcomes[place] for place in sorted(outcomes)])
        ]
        for name in self.asking.tables:
            frames.write_rows(self._file(shard, name), (row for table, row in found if table == name))
        if before and not missing:
            self._note_open(shard, 0)
        shard.outcomes.clear()  # the answers are on the disk

    def _note_open(self, shard: _Shard, number: int) -> None:
        self.open_parts[shard.part] = number
        found = {part: calls for part, calls in self.open_parts.items() if calls}
        write_json(self.run.path(self.stage, OPEN), found)

    def close(self) -> None:
        """Write the shards that were held back, and raise as `Run.in_shards` does."""
        wait = self.run.config.on_unanswered == "wait"
        silent = [model for model in self.rejected if not self.num_answered[model]]
        missing = [outcome for shard in self._held_back for outcome in shard.unanswered]
        if silent and not missing:
            rejected = self.rejected[silent[0]]
            self.run.store.forget_rejections(
                outcome.key for model in silent for outcome in self.rejected[model]
            )
            raise UserError(
                f"all {len(rejected)} calls were rejected, such as: {rejected[0].error}. The stage is not done; change the "
                "model's settings and run the same command again",
                place=self.stage,
                key=f"models.{silent[0]}",
                kind="rejected",
            )
        if silent and wait:  # written, they would count as answered next time
            self.unanswered += missing
        else:
            for shard in self._held_back:
                self._write(shard)
        check_answered(self.unanswered, self.num_calls, wait=wait, stage=self.stage)


def reasons(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Number of rejected rows by reason, most frequent first."""
    return dict(Counter(row["reason"] for row in rows).most_common())
