"""A process that fails, is killed or is stopped: the other one ends, soon and with the reason."""

import json
import subprocess
import sys
import threading
import time

import pytest
import torch
from faults import error_about
from paths import WORKERS
from ports import free_port

from rge.distributed import collectives as dist
from rge.distributed import failure_detection as watch
from rge.distributed.config import TrainConfig

SILENCE_S = TrainConfig().silence_s

WORKER = WORKERS / "fellow.py"
CASES = {
    "raises": (3, "rank 1, ", ": FloatingPointError: the loss is nan"),
    "is_killed": (3, "rank 1, ", ": no sign of life for 10 s: killed"),
    "is_stopped": (3, "rank 1, ", ": no sign of life for 10 s: killed"),
    "is_interrupted": (130, "rank 1, ", ": KeyboardInterrupt"),
    "exits": (7, "rank 1, ", ": SystemExit: 7"),
    "main_is_killed": (3, "error: ", "the store on the main process cannot be reached"),
    "main_is_stopped": (3, "error: ", "the store on the main process has not answered for 10 s"),
}
"""Exit code of the process that is left, and what it says."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs of processes at once, in each of which one goes wrong in its own way."""
    folder = tmp_path_factory.mktemp("fellows")
    arguments = [f"{case}={free_port()}" for case in CASES]
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder), *arguments], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_other_process_ends_with_the_reason(pairs, case):
    code, *reason = CASES[case]
    said = (pairs / f"{case}_{int(case.startswith('main'))}").read_text()
    assert json.loads((pairs / "codes.json").read_text())[case] == code, said
    for part in reason:
        assert part in said


def test_nobody_is_waited_for_longer_than_a_minute():
    """What the watch adds up to where the machine does not delay it: missed, told, seen, and time for a last word."""
    assert SILENCE_S + 2 * watch.POLL_S + watch.GRACE_S < 60


class Fellows:
    """A store that two ranks of one process share."""

    def __init__(self, monkeypatch):
        self.store = torch.distributed.HashStore()
        self.rank = 0
        monkeypatch.setattr(dist, "world_size", lambda: 2)
        monkeypatch.setattr(dist, "rank", lambda: self.rank)
        monkeypatch.setattr(dist, "connect_to_store", lambda: self.store)
        monkeypatch.setattr(watch, "POLL_S", 0.01)
        monkeypatch.setattr(watch, "GRACE_S", 600.0)  # or a machine that stalls would end this process
        monkeypatch.setattr(watch._Watch, "_watch_the_store", lambda _: None)  # likewise


def until(condition) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_asked_of_the_store_before_the_thread_that_limits_it(monkeypatch):
    fellows = Fellows(monkeypatch)
    rank = watch._Watch(10.0)
    assert not fellows.store.check(["alive/0"])
    rank.start()
    until(lambda: fellows.store.check(["alive/0"]))
    rank.stop()


def test_the_first_failure_is_everybodys_reason(monkeypatch):
    fellows = Fellows(monkeypatch)
    first = ValueError("record 7 is broken")
    with pytest.raises(ValueError) as own, watch.watch_other_ranks(SILENCE_S):
        raise first
    assert own.value is first
    fellows.rank = 1
    with error_about(watch.RankError, 0) as caught, watch.watch_other_ranks(SILENCE_S):
        raise KeyError("something that followed from it")
    assert caught.value.reason == "ValueError: record 7 is broken"
    # A mistake that all make, such as one in the recipe, is shown as what it is.
    with pytest.raises(ValueError) as own, watch.watch_other_ranks(SILENCE_S):
        raise first
    assert own.value is first


def test_who_leaves_in_peace_is_not_missed(monkeypatch):
    fellows = Fellows(monkeypatch)
    fellows.store.set("alive/1", "left")
    with watch.watch_other_ranks(silence_s=0.05):  # five looks
        until(lambda: int(fellows.store.get("alive/0")) > 10)
    assert not fellows.store.check(["failed"])
    assert fellows.store.get("alive/0") == b"left"


@pytest.mark.parametrize("code", [0, 2])
def test_an_end_of_all_is_nobodys_failure(monkeypatch, code):
    fellows = Fellows(monkeypatch)
    with pytest.raises(SystemExit), watch.watch_other_ranks(SILENCE_S):
        raise watch.CoordinatedExit(code)
    assert not fellows.store.check(["failed"])
    assert fellows.store.get("alive/0") == b"left"


@pytest.mark.parametrize(
    ("ended", "code"),
    [(KeyboardInterrupt(), 130), (SystemExit(0), 3), (SystemExit(7), 7), (SystemExit("no"), 3)],
)
def test_an_end_of_one_is_told_to_the_others(monkeypatch, ended, code):
    fellows = Fellows(monkeypatch)
    with pytest.raises(type(ended)), watch.watch_other_ranks(SILENCE_S):
        raise ended
    told = json.loads(fellows.store.get("failed"))
    assert (told["rank"], told["code"]) == (0, code)
    assert told["reason"].startswith(type(ended).__name__)


def test_who_waits_for_main_goes_on_when_it_comes(monkeypatch):
    fellows = Fellows(monkeypatch)
    fellows.rank = 1
    waiting = threading.Thread(target=watch.after_main, args=("checked",), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    fellows.rank = 0
    watch.after_main("checked")
    waiting.join(600)
    assert not waiting.is_alive()


def test_silence_ends_this_process(monkeypatch, capfd):
    Fellows(monkeypatch).store.set("alive/1", "12")
    ended = []
    monkeypatch.setattr(watch, "GRACE_S", 0.05)
    monkeypatch.setattr(watch.os, "_exit", ended.append)
    with watch.watch_other_ranks(silence_s=0.05):
        until(lambda: ended)
    assert ended == [3]
    assert "error: failure of rank 1, unknown host: no sign of life for 0 s" in capfd.readouterr().err


def test_alone_there_is_nobody_to_watch():
    with pytest.raises(ValueError), watch.watch_other_ranks(SILENCE_S):
        raise ValueError("mine")
    assert not [thread for thread in watch.threading.enumerate() if thread.name == "fellow ranks"]
