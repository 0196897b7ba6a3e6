"""One run of the pipeline: its folder, its lock, which stages are done, and how models are asked."""

import fcntl
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rge.calls.store import ReplyCache
from rge.calls.caller import Caller, Outcome
from rge.calls.request import Part, Picture, Request
from data_prep.options import UserError
from data_prep.rmir import frames
from data_prep.rmir.config import RmirConfig, to_dict
from data_prep.rmir.pictures.encoders import identity
from rge.common.files import write_text

STAGES = ("seed", "generate", "filter", "retrieve", "judge", "keep", "pool", "split", "audit")
SETTINGS = {
    "seed": ("library", "image_encoder", "caption_encoder", "seed"),
    "generate": ("generate",),
    "filter": ("filter",),
    "retrieve": ("retrieve",),
    "judge": ("judge",),
    "keep": ("keep",),
    "pool": (),
    "split": ("split", "export"),
    "audit": ("audit",),
}
"""Sections of the config that a stage's result depends on, besides the stages before it."""


class RunError(UserError):
    """The run cannot go on; the message says why and what to do."""


def identities(config: RmirConfig) -> list[dict[str, Any]]:
    """`data_prep.rmir.pictures.encoders.identity` of all encoders: of pictures, of captions, and of the further indices.

    A fallback's vectors, or those of yesterday's weights, do not fit the encoder that is there today.
    """
    more = [spec.encoder for spec in config.retrieve.more]
    return [identity(encoder) for encoder in (config.image_encoder, config.caption_encoder, *more)]


def fingerprint(config: RmirConfig, stage: str, encoders: Sequence[dict[str, Any]] | None = None) -> str:
    """Of everything that a stage's result depends on: its settings and those of the stages before it.

    Args:
        config: of the run.
        stage: one of `STAGES`.
        encoders: of `identities`; None looks at them now, which reads local weights.
    """
    whole = to_dict(config)
    names = [name for step in STAGES[: STAGES.index(stage) + 1] for name in SETTINGS[step]]
    models = {name: model["name"] for name, model in whole["models"].items()}
    whole["image_encoder"], whole["caption_encoder"], *more = encoders or identities(config)
    for spec, encoder in zip(whole["retrieve"]["more"], more, strict=True):
        spec["encoder"] = encoder
    text = json.dumps([{name: whole[name] for name in names}, models], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def done(
    config: RmirConfig, stage: str, encoders: Sequence[dict[str, Any]] | None = None
) -> dict[str, Any] | None:
    """What a finished stage reported; None where it is not finished, or was finished with other settings.

    Args:
        config: of the run.
        stage: one of `STAGES`.
        encoders: see `fingerprint`.
    """
    try:
        found = json.loads((Path(config.out) / stage / "done.json").read_text())
    except (OSError, ValueError):
        return None
    return found if found["fingerprint"] == fingerprint(config, stage, encoders) else None


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
        self.cache = ReplyCache(self.out / "replies.sqlite")
        self._pictures: dict[str, Picture] = {}

    def close(self) -> None:
        """Give the folder free."""
        self.cache.close()
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
        spent = self.total_cost()
        asked = self.cache.num_replies()
        began = time.perf_counter()
        counts = work(self)
        report = {
            "stage": stage,
            "fingerprint": self.fingerprint(stage),
            "counts": counts,
            "seconds": round(time.perf_counter() - began, 2),
            "calls": self.cache.num_replies() - asked,
            "cost": round(self.total_cost() - spent, 6),
        }
        write_text(self.path(stage, "done.json"), json.dumps(report, indent=1) + "\n")
        return report

    def _renew(self, stage: str) -> None:
        # Parts are only good for the settings they were made with.
        # The size of a shard decides which rows a part holds.
        made_with = self.fingerprint(stage)
        if stage != "seed":
            made_with += f" {self.config.queries_per_shard}"
        marker = self.path(stage, "settings")
        if marker.is_file() and marker.read_text() == made_with:
            return
        folder = self.path(stage)
        if folder.is_dir():
            for file in sorted(folder.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
        write_text(marker, made_with)

    def total_cost(self) -> float:
        """Of all models so far."""
        return sum(figures["cost"] for figures in self.cache.ledger().values())

    # ---------------------------------------------------------------------------------------------------------- calls

    def picture(self, image: dict[str, Any], model: str) -> Picture:
        """A seed picture as part of a prompt."""
        return Picture(image["ref"], image["sha256"], self.config.models[model].max_side_px)

    def ask(
        self, title: str, requests: Sequence[tuple[str, tuple[Part, ...], dict[str, Any]]]
    ) -> list[Outcome]:
        """Ask models of the config.

        Args:
            title: of the progress bar.
            requests: (model of the config, parts of the prompt, settings of the request).

        Raises:
            RunError: calls were lost; everything answered is kept, the same command asks the rest.
        """
        names = {name: model.name for name, model in self.config.models.items()}
        models = {model.name: model for model in self.config.models.values()}
        caller = Caller(models, self.cache, progress=title if self.progress else None)
        outcomes = caller.run(
            [Request(names[model], parts, **settings) for model, parts, settings in requests]
        )
        if lost := [outcome for outcome in outcomes if outcome.lost]:
            raise RunError(
                f"{title}: {len(lost)} of {len(requests)} calls got no answer, such as: {lost[0].error}. The other answers "
                "are kept; run the same command again"
            )
        return outcomes

    def in_shards(
        self,
        stage: str,
        items: Sequence[Any],
        tables: dict[str, str],
        work: Callable[[Sequence[Any]], dict[str, list]],
    ) -> None:
        """Work through items some at a time; a shard whose tables are all written is not done again.

        Args:
            stage: where the tables go.
            items: in a fixed order.
            tables: schema of each table.
            work: rows by table, for some items.
        """
        size = self.config.queries_per_shard
        for number, start in enumerate(range(0, len(items), size)):
            paths = {name: self.path(stage, name) / f"part-{number:05d}.parquet" for name in tables}
            if all(path.is_file() for path in paths.values()):
                continue
            found = work(items[start : start + size])
            for name, path in paths.items():
                frames.write_rows(path, tables[name], found[name])


def reasons(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many rows were rejected for each reason, most frequent first."""
    return dict(Counter(row["reason"] for row in rows).most_common())
