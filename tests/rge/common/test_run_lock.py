"""One run a folder, and a folder that is free again whatever has ended the run."""

import os
import signal
import subprocess
import sys

import pytest
from faults import error_about

from rge.common.files import LOCK, InUseError, held

HOLDER = (
    "import os, sys, time\n"
    "from pathlib import Path\n"
    "from rge.common.files import held\n"
    "with held(Path(sys.argv[1])):\n"
    "    if not os.fork():\n"
    "        print(os.getpid(), flush=True)\n"
    "        time.sleep(60)\n"  # a data worker that outlives its run
    "    time.sleep(60)\n"
)


def test_a_second_process_is_refused_and_a_kill_frees_the_folder(tmp_path):
    folder = tmp_path / "a run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as holder:
        worker = int(holder.stdout.readline())
        try:
            with error_about(InUseError, folder) as caught:
                with held(folder):
                    pytest.fail("two are inside")
            assert str(holder.pid) in caught.value.reason
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # still there
            with held(folder):
                pass
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_lock_of_a_holder_that_has_not_said_its_name(tmp_path):
    script = HOLDER.replace(
        "with held(Path(sys.argv[1])):",
        "import fcntl\nf = open(sys.argv[1] + '/.lock', 'w')\nfcntl.lockf(f, fcntl.LOCK_EX)\nif True:",
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        worker = int(holder.stdout.readline())
        with error_about(InUseError, tmp_path), held(tmp_path):
            pass
        holder.kill()
        os.kill(worker, signal.SIGKILL)


def test_a_disk_without_locks_is_said_and_used(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", refuse)
    with held(tmp_path):
        assert (tmp_path / LOCK).is_file()
    assert (
        "has no locks (Function not implemented): a second run in it cannot be detected"
        in capsys.readouterr().err
    )
