"""One run of the pipeline: its folder, its lock, which stages are done, and how models are asked."""

import fcntl
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_prep.rmir import frames
from data_prep.rmir.config import RmirConfig, to_dict
from data_prep.rmir.pictures.encoders import identity
from data_prep.rmir.wording import wording
from rge.calls.caller import LOST_RUNS, Caller, Counts, Outcome, Read
from rge.calls.failures import RequestRejected
from rge.calls.model_config import known_as
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore
from rge.common.errors import UserError
from rge.common.files import write_text
from rge.common.schema import safe_id

EXPORTED = ("licence", "source_column", "author_column", "licence_column")
"""Settings of the library that only the export reads."""
HOW_MUCH_AT_ONCE = ("memory_mb", "shard_size")
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
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _settings(config: RmirConfig, stage: str, encoders: Sequence[dict[str, Any]]) -> list[Any]:
    # One rule a stage; a stage that begins to read another setting must say so here.
    image, caption, *more = encoders
    whole = to_dict(config)
    names = known_as(config.models)

    def answers_of(label: str) -> list[Any]:
        model = config.models[label]
        return [names[label], model.answers_by(), model.reasks, model.max_side_px]

    if stage == "seed":
        library = {
            key: value for key, value in whole["library"].items() if key not in (*EXPORTED, *HOW_MUCH_AT_ONCE)
        }
        return [library, image, caption, whole["seed"]]
    if stage == "caption":
        return [whole[stage], wording(config.prompts).caption, answers_of(whole[stage]["model"])]
    if stage in ("generate", "filter"):
        texts = wording(config.prompts)
        asked = (
            texts.filter
            if stage == "filter"
            else texts.asked(config.generate.categories, content_policy=config.generate.content_policy)
        )
        return [whole[stage], asked, answers_of(whole[stage]["model"])]
    if stage == "retrieve":
        indices = [
            {**spec, "encoder": encoder}
            for spec, encoder in zip(whole["retrieve"]["more"], more, strict=True)
        ]
        settings = {key: value for key, value in whole["retrieve"].items() if key not in HOW_MUCH_AT_ONCE}
        return [{**settings, "more": indices}]
    if stage == "judge":
        return [
            whole["judge"],
            wording(config.prompts).judge,
            [answers_of(spec.model) for spec in config.judge.judges],
        ]
    if stage == "keep":
        return [config.keep.min_confidence]
    if stage == "split":
        library = {key: value for key, value in whole["library"].items() if key in EXPORTED}
        return [whole["split"], whole["export"], config.keep.remove_doubted_inputs, library]
    if stage == "audit":
        families = [config.models[spec.model].family or spec.model for spec in config.judge.judges]
        return [config.audit.ks, families]
    return []


def done(
    config: RmirConfig, stage: str, encoders: Sequence[dict[str, Any]] | None = None
) -> dict[str, Any] | None:
    """What a finished stage reported; None where it is not finished, or was finished with other settings.

    Args:
        config: of the run.
        stage: one of `stages_of`.
        encoders: see `fingerprint`.
    """
    try:
        found = json.loads((Path(config.out) / stage / "done.json").read_text())
    except (OSError, ValueError):
        return None
    if stage == "split" and _has_blanks(Path(config.out) / "dataset" / "test"):
        return None
    return found if found["fingerprint"] == fingerprint(config, stage, encoders) else None


def _has_blanks(test: Path) -> bool:
    """Whether a test set was written before ids lost their white space: it cannot be read, and is written again."""
    tables = [test / f"{name}.parquet" for name in ("corpus", "queries")]
    ids = [
        name
        for path in tables
        if path.is_file()
        for name in pq.read_table(path, columns=["id"])["id"].to_pylist()
    ]
    return any(name != safe_id(name) for name in ids)


@dataclass
class _Shard:
    # Items whose calls are under way; written as soon as all of them are answered, whatever the shards before it wait for.
    items: Sequence[Any]
    paths: dict[str, Path]
    first: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    num_requests: int | None = None


class Run:
    """The folder of a run.

    Args:
        config: its settings.
        progress: show progress bars.

    Raises:
        RunError: another process works in the same folder.
    """

    def __init__(self, config: RmirConfig, *, progress: bool = True):
        self.config, self.progress, self.out = config, progress, Path(config.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock = (self.out / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(
                f"another process works in {self.out}; wait for it, or give another out="
            ) from None
        # Looked at once: weights that change while the run works must not pass for those it began with.
        self.encoders = identities(config)
        self.store = AnswerStore(self.out / "replies.sqlite")
        self._caller: Caller | None = None

    def close(self) -> None:
        """Give the folder free."""
        self.store.close()
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
        return done(self.config, stage, self.encoders)

    def fingerprint(self, stage: str) -> str:
        """`fingerprint` with the encoders as they were when the run began."""
        return fingerprint(self.config, stage, self.encoders)

    def run(self, stage: str, work: Callable[["Run"], dict[str, Any]]) -> dict[str, Any]:
        """Run a stage, or return what it reported when it was finished before.

        A stage whose settings changed starts anew; its answers are kept, so only what really changed is asked again.
        """
        if found := self.done(stage):
            return found
        self._renew(stage)
        spent = self.store.total_cost()
        asked = self.store.num_replies()
        self._num_answered = 0
        self._rejected: list[str] = []
        before = self._met()
        began = time.perf_counter()
        counts = work(self)
        if self._rejected and not self._num_answered:
            self._empty(stage)  # or the rows without answers would pass for its result next time
            raise RequestRejected(
                f"{stage}: all {len(self._rejected)} calls were rejected, such as: {self._rejected[0]}. The stage is not "
                "done; change the model's settings and run the same command again"
            )
        report = {
            "stage": stage,
            "fingerprint": self.fingerprint(stage),
            "counts": counts,
            "seconds": round(time.perf_counter() - began, 2),
            "calls": self.store.num_replies() - asked,
            "cost": round(self.store.total_cost() - spent, 6),
            "met": {
                kind: number - before[kind] for kind, number in self._met().items() if number > before[kind]
            },
        }
        write_text(self.path(stage, "done.json"), json.dumps(report, indent=1) + "\n")
        return report

    def _met(self) -> dict[str, int]:
        counts = self._caller.counts if self._caller is not None else Counts()
        return {
            kind: value
            for kind, value in vars(counts).items()
            if isinstance(value, int) and kind not in ("asked", "cached")
        }

    def _renew(self, stage: str) -> None:
        # Parts are only good for the settings they were made with.
        # The size of a shard decides which rows a part holds.
        made_with = self.fingerprint(stage)
        if stage != "seed":
            made_with += f" {self.config.queries_per_shard}"
        marker = self.path(stage, "settings")
        if marker.is_file() and marker.read_text() == made_with:
            return
        self._empty(stage)
        write_text(marker, made_with)

    def _empty(self, stage: str) -> None:
        folder = self.path(stage)
        if folder.is_dir():
            for file in sorted(folder.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()

    # ---------------------------------------------------------------------------------------------------------- calls

    def picture(self, image: dict[str, Any], model: str) -> Picture:
        """A seed picture as part of a prompt."""
        return Picture(image["ref"], image["sha256"], self.config.models[model].max_side_px)

    def in_shards(
        self,
        stage: str,
        items: Sequence[Any],
        tables: dict[str, str],
        *,
        requests: Callable[[Any], Iterable[Request]],
        read: Read,
        rows: Callable[[Sequence[Any], Iterator[Outcome]], dict[str, list]],
        count: Callable[[Any], int] = lambda item: 1,
    ) -> None:
        """Ask about items, and write what comes of so many at a time; what is written is not done again.

        No shard waits for the one before: while the last calls of one are under way, those of the next are made.

        Args:
            stage: where the tables go.
            items: in a fixed order.
            tables: schema of each table.
            requests: of an item; their ``model`` is a name of the config.
            read: an answer that it cannot read is asked for again.
            rows: by table, for some items and the outcomes of all their requests in order.
            count: requests of an item, for the progress bar.

        Raises:
            RunError: calls were lost, fewer than `LOST_RUNS` times so far; everything answered is kept, the same command
                asks the rest.
        """
        if self._caller is None:  # one for all stages: what it learns of an endpoint's limits lasts
            self._caller = Caller(self.config.models, self.store, progress=self.progress)
        caller = self._caller
        for name in tables:  # without items a table is empty, not missing
            self.path(stage, name).mkdir(parents=True, exist_ok=True)
        size = self.config.queries_per_shard
        todo = []
        for number, start in enumerate(range(0, len(items), size)):
            paths = {name: self.path(stage, name) / f"part-{number:05d}.parquet" for name in tables}
            if not all(path.is_file() for path in paths.values()):
                todo.append((items[start : start + size], paths))
        owners: dict[int, _Shard] = {}
        lost: list[Outcome] = []
        held_back: list[_Shard] = []
        asked = 0

        def finish(shard: _Shard) -> None:
            outcomes = [shard.outcomes[place] for place in range(len(shard.outcomes))]
            self._rejected += [str(outcome.error) for outcome in outcomes if outcome.failed]
            self._num_answered += sum(not outcome.failed for outcome in outcomes)
            if self._num_answered or not outcomes:
                write(shard, outcomes)
            else:
                held_back.append(shard)  # whether the endpoint works at all is not known yet

        def write(shard: _Shard, outcomes: list[Outcome]) -> None:
            missing = [outcome for outcome in outcomes if outcome.lost]
            again = caller.held_up_by(missing, works=bool(self._num_answered))
            lost.extend(again)
            if again:
                return
            if missing:
                print(
                    f"{stage}: {len(missing)} calls had no answer in {LOST_RUNS} runs and were passed over, such as: "
                    f"{missing[0].error}",
                    file=sys.stderr,
                    flush=True,
                )
            found = rows(shard.items, iter(outcomes))
            for name, path in shard.paths.items():
                frames.write_rows(path, tables[name], found[name])

        def all_requests() -> Iterator[Request]:
            nonlocal asked
            for some, paths in todo:
                shard = _Shard(some, paths, asked)
                for item in shard.items:
                    for request in requests(item):
                        owners[asked] = shard
                        asked += 1
                        yield request
                shard.num_requests = asked - shard.first
                if len(shard.outcomes) == shard.num_requests:
                    finish(shard)

        def take(position: int, outcome: Outcome) -> None:
            shard = owners.pop(position)
            shard.outcomes[position - shard.first] = outcome
            if len(shard.outcomes) == shard.num_requests:
                finish(shard)

        total = sum(count(item) for some, _ in todo for item in some)
        self._caller.run(all_requests(), take, read=read, title=stage, total=total)
        for shard in held_back:
            write(shard, [shard.outcomes[place] for place in range(len(shard.outcomes))])
        if lost:
            raise RunError(
                f"{stage}: {len(lost)} of {asked} calls got no answer, such as: {lost[0].error}. The other answers "
                f"are kept; run the same command again. A call without an answer in {LOST_RUNS} runs is passed over, where "
                "others are answered"
            )


def reasons(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many rows were rejected for each reason, most frequent first."""
    return dict(Counter(row["reason"] for row in rows).most_common())
