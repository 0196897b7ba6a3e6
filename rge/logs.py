"""Progress for people (a bar), for programs (JSON lines) and for trackers."""

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from tqdm import tqdm

from rge.common.commands import progress_bar
from rge.common.errors import brief
from rge.common.files import read_json_lines, write_text
from rge.common.options import nearest
from rge.config import LogConfig, Recipe, to_dict
from rge.identity.run_identity import flattened


def problems(log: LogConfig) -> Iterator[str]:
    """Why trackers of a recipe are not available, one message each."""
    known = [str(name) for name in LoggerType.list() if str(name) != "all"]
    for name in log.trackers:
        if name not in known:
            yield f"log.trackers: there is no tracker {name!r}{nearest(name, known)}"
        elif name not in map(str, get_available_trackers()):
            yield f"log.trackers={name} needs its library, which is not installed: pip install {name}"


def start_trackers(accelerator: Accelerator, recipe: Recipe) -> None:
    """Start a run in every tracker of the recipe, which has no `problems`; a resumed run continues the same run of W&B.

    A tracker that cannot be started, such as W&B without a key or a network, is left out with a warning.
    """
    if not recipe.log.trackers:
        return
    accelerator.project_configuration.logging_dir = str(Path(recipe.out) / "trackers")
    # TensorBoard only takes texts, numbers and booleans.
    config = {
        key: value if isinstance(value, (str, int, float)) else json.dumps(value)
        for key, value in flattened(to_dict(recipe)).items()
    }
    # On a terminal, W&B asks for a key, and would wait for ever.
    limits = {"settings": {"login_timeout": WAITING_S, "init_timeout": WAITING_S}}
    started: list[Any] = []
    for name in dict.fromkeys(recipe.log.trackers):
        accelerator.log_with = [LoggerType(name)]
        with tracker_may_fail(name):
            accelerator.init_trackers(
                recipe.log.project,
                config=config,
                init_kwargs={"wandb": _same_run(Path(recipe.out)) | limits}
                if accelerator.is_main_process
                else {},
            )
            started += accelerator.trackers
    accelerator.trackers = started


@contextmanager
def tracker_may_fail(name: str) -> Iterator[None]:
    """Turn any exception of a tracker into a warning: no tracker may end a run, whose figures are in metrics.jsonl."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the library's own, or its network's
        reason = brief(" ".join(str(error).split())) or type(error).__name__
        fix = "; `wandb login`, or WANDB_MODE=offline, before the next start" if name == "wandb" else ""
        tqdm.write(
            f"warning: the tracker {name} fails and is left out ({reason}){fix}. All figures are in metrics.jsonl",
            file=sys.stderr,
        )


def end_trackers(accelerator: Accelerator) -> None:
    """End every tracker's run; one that still waits for its network after `WAITING_S` is left."""
    for tracker in accelerator.trackers:
        ending = threading.Thread(target=_finish, args=(tracker,), daemon=True)
        ending.start()
        ending.join(WAITING_S)
        if ending.is_alive():
            with tracker_may_fail(tracker.name):
                raise TimeoutError(
                    f"its figures were not sent within {WAITING_S:.0f} s; its own folder has them"
                )
    accelerator.trackers = []


def _finish(tracker: Any) -> None:
    with tracker_may_fail(tracker.name):
        tracker.finish()


WAITING_S = 60.0
"""Time in which a tracker reaches its server, and at the end sends what it still has."""


def _same_run(out: Path) -> dict[str, Any]:
    """Settings by which W&B continues the folder's run, under the folder's name; the user's environment takes precedence.

    The id is stored in the folder, not derived from its path, which may be the same in other containers.
    """
    path = out / "trackers" / "wandb_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, uuid.uuid4().hex)
    settings = {"id": path.read_text(), "resume": "allow", "name": out.resolve().name}
    variables = {"id": "WANDB_RUN_ID", "resume": "WANDB_RESUME", "name": "WANDB_NAME"}
    return {key: value for key, value in settings.items() if not os.environ.get(variables[key])}


SHOWN = ("loss", "reward", "forced_rate", "tokens_per_s", "wait_share", "val_hit_at_1", "val_loss")
"""Metrics next to the bar."""


MUCH_SAVING = 0.1
"""Share of a stage's time above which it is told to save fewer states."""


class Logs:
    """Writes a line of JSON per logged step to `metrics.jsonl`; only the main process writes.

    After a resume, lines of steps that will be repeated are dropped first, so that the file contains no step twice.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        stage: str,
        first_step: int,
        num_steps: int,
        log_every: int,
    ):
        self.accelerator, self.stage = accelerator, stage
        self.num_steps, self.log_every = num_steps, log_every
        self.began = time.perf_counter()
        self.wait_s = self.step_s = self.save_s = 0.0
        self.bar = progress_bar(
            total=num_steps,
            initial=first_step,
            desc=stage,
            unit="step",
            disable=not accelerator.is_main_process,
            dynamic_ncols=True,
        )
        self._file = None
        self._warns_of_truncation = accelerator.is_main_process
        self._offset_s = 0.0
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "metrics.jsonl"
            lines = read_json_lines(path) if first_step else []
            kept = [line for line in lines if line["step"] <= first_step]
            self._offset_s = kept[-1]["elapsed_s"] if kept else 0.0
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = path.open("a")

    def wait_share(self) -> float:
        """Share of the time so far that training waited for data; near 0 unless there are too few workers."""
        return self.wait_s / max(self.wait_s + self.step_s, 1e-9)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count the time in which training waits for a state: for its copy, and for the state before to be written."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.save_s += time.perf_counter() - began

    def is_due(self, step: int) -> bool:
        """Whether a step is logged; `step` counts from one."""
        return step % self.log_every == 0 or step in (1, self.num_steps)

    def skipped(self, step: int, reason: FloatingPointError) -> None:
        """Say that a step does not update the weights."""
        if self.accelerator.is_main_process:
            self.bar.write(f"{self.stage}: step {step} is skipped (optim.skip_nonfinite): {reason}")

    def step(
        self, step: int, report: dict[str, Any], coverage: Callable[[int], dict[str, Any]] | None = None
    ) -> None:
        """Report a finished step; `step` counts from one. Validated and skipped steps, and the first after a mining, are always logged.

        `coverage` says what has been read of each source after so many steps; it is only called for logged steps.
        """
        if (num_cut := report.get("cut_prompts", 0)) and self._warns_of_truncation:
            self._warns_of_truncation = False  # once
            self.bar.write(
                f"{self.stage}: {num_cut:.0f} prompts of step {step} were longer than data.max_prompt_tokens and lost the end of "
                "their text; cut_prompts in metrics.jsonl counts them in each step"
            )
        self.wait_s += report.get("wait_s", 0.0)
        self.step_s += report.get("step_s", 0.0)
        report = {**report, "wait_share": self.wait_share()}
        shown = {name: f"{report[name]:.3g}" for name in SHOWN if name in report}
        self.bar.update(1)
        self.bar.set_postfix(shown, refresh=False)
        if self.is_due(step) or {"val_loss", "skipped_steps", "mined_mean"} & report.keys():
            self._write(
                step, report, coverage(step) if coverage is not None and self._file is not None else {}
            )

    def _write(self, step: int, report: dict[str, Any], coverage: dict[str, Any]) -> None:
        line: dict[str, Any] = {"stage": self.stage, "step": step, **report, **coverage}
        line["elapsed_s"] = round(self._offset_s + time.perf_counter() - self.began, 3)
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        values = {
            f"{self.stage}/{name}": value
            for name, value in flattened(line).items()
            if isinstance(value, (int, float))
        }
        for tracker in list(self.accelerator.trackers):
            logged = False
            with tracker_may_fail(tracker.name):
                # W&B's only step axis must increase over all stages, so it counts the logged lines of this process.
                tracker.log(values, step=None if tracker.name == "wandb" else step)
                logged = True
            if not logged:
                self.accelerator.trackers.remove(tracker)

    def close(self) -> None:
        """Close the bar and the file, and print the shares of time spent waiting; trackers stay open."""
        self.bar.close()
        if self.step_s:
            saving = self.save_s / (self.wait_s + self.step_s + self.save_s)
            advice = "; a larger save_every saves fewer" if saving > MUCH_SAVING else ""
            self.accelerator.print(
                f"{self.stage}: spent {self.wait_share():.1%} of the time waiting for data, and {saving:.1%} for states to be "
                f"saved{advice}"
            )
        if self._file is not None:
            self._file.close()
