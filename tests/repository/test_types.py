"""Types hold: what `make lint` checks, as a test, so that other tests run beside it."""

import subprocess
import sys

import pytest
from paths import ROOT


@pytest.mark.slow(60)
def test_types_hold():
    done = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
