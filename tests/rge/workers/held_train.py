"""rge/train.py, held after one step of a stage: a test stops or kills it in mid-run, however fast either of them is.

    held_train.py STAGE STEP FILE TRAIN_PY [key=value ...]

Once the line of STEP is in metrics.jsonl, the process waits for FILE to be there.
"""

import runpy
import sys
import time
from pathlib import Path
from typing import Any

from rge.logs import Logs

stage, held_at, go_on = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
report_step = Logs.step


def report_and_hold(self: Logs, step: int, *report: Any) -> None:
    report_step(self, step, *report)
    while (self.stage, step) == (stage, held_at) and not go_on.exists():
        time.sleep(0.005)


Logs.step = report_and_hold
del sys.argv[:4]
runpy.run_path(sys.argv[0], run_name="__main__")
