"""Progress for people (a bar), for programs (JSON lines) and for trackers (wandb, when asked for)."""

import json
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from rge.common.files import write_text


def start_trackers(accelerator: Accelerator, project: str, recipe: dict[str, Any]) -> None:
    """Begin a run in every tracker that the recipe names; `log.trackers=[wandb]` with WANDB_MODE=offline needs no network."""
    if accelerator.log_with:
        accelerator.init_trackers(project, config=recipe)


class Logs:
    """Writes one JSON object a logged step to `metrics.jsonl`; only the main process writes.

    After a resume, lines of steps that will be run again are dropped first, so that the file never holds a step
    twice.

    Args:
        accelerator: knows the main process and the trackers.
        folder: where `metrics.jsonl` goes.
        stage: name written into every line.
        first_step: step this run starts at.
        num_steps: steps of the stage, for the bar.
        log_every: steps between lines.
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
        self.accelerator, self.stage, self.num_steps, self.log_every = (
            accelerator,
            stage,
            num_steps,
            log_every,
        )
        self.began = time.perf_counter()
        self.wait_s = self.step_s = 0.0
        self.bar = tqdm(
            total=num_steps,
            initial=first_step,
            desc=stage,
            unit="step",
            disable=not accelerator.is_main_process,
            dynamic_ncols=True,
        )
        self._file = None
        self._offset_s = 0.0
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "metrics.jsonl"
            kept = [line for line in _lines(path) if line["step"] <= first_step] if first_step else []
            self._offset_s = kept[-1]["elapsed_s"] if kept else 0.0
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = path.open("a")

    def wait_share(self) -> float:
        """Share of this run's time so far that training waited for data; near 0 unless workers are too few."""
        return self.wait_s / max(self.wait_s + self.step_s, 1e-9)

    def step(self, step: int, report: dict[str, float]) -> None:
        """Report a finished step; `step` counts from one. Steps that were validated are always written."""
        self.bar.update(1)
        self.wait_s += report.get("wait_s", 0.0)
        self.step_s += report.get("step_s", 0.0)
        report = {**report, "wait_share": self.wait_share()}
        shown = {
            name: f"{report[name]:.3g}"
            for name in ("loss", "forced_rate", "tokens_per_s", "wait_share", "val_hit_at_1", "val_loss")
            if name in report
        }
        self.bar.set_postfix(shown, refresh=False)
        measured = "val_loss" in report
        if step % self.log_every and step != self.num_steps and step != 1 and not measured:
            return
        line: dict[str, Any] = {"stage": self.stage, "step": step, **report}
        line["elapsed_s"] = round(self._offset_s + time.perf_counter() - self.began, 3)
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        values = {
            f"{self.stage}/{name}": value for name, value in line.items() if isinstance(value, (int, float))
        }
        if self.accelerator.log_with:
            # Both stages share a tracker's step axis, so the axis counts logged lines of this process.
            self.accelerator.log(values)

    def close(self) -> None:
        """Close the bar and the file, and say how much time went into waiting; trackers stay open."""
        self.bar.close()
        if self.step_s:
            self.accelerator.print(f"{self.stage}: {self.wait_share():.1%} of the time waited for data")
        if self._file is not None:
            self._file.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for text in path.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            break  # a line cut by a kill: it and nothing after it was finished
    return found
