"""Processes that work for this one: what they give, and how they end."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import worker_jobs
from faults import error_about

from rge.common import registry
from rge.common.errors import UserError
from rge.common.prompt_profiles import PROFILES
from rge.distributed import workers as module
from rge.distributed.workers import WorkerError, Workers

ENDLESS = """
import signal, sys, time, worker_jobs
from rge.distributed.workers import Workers

def tell(_, result):
    sys.stdout.write(f"{result[2]}\\n")
    sys.stdout.flush()
    time.sleep(0.05)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's job in the background lacks
try:
    Workers(worker_jobs.make, ["a", "b"]).run(iter(lambda: 2, None), tell)
except KeyboardInterrupt:
    sys.stdout.write("interrupted")
    sys.exit(7)
"""


@pytest.fixture
def workers():
    made = Workers(worker_jobs.make, ["a", "b"])
    yield made
    made.close()


def done(workers, jobs):
    results, progress = {}, []
    workers.run(jobs, results.__setitem__, progress.append)
    assert sum(progress) == len(results)
    return results


def pids(workers):
    return [one.process.pid for one in workers._workers]


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, limit_s=20.0):
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_worker_knows_what_plugins_registered(tmp_path, monkeypatch):
    """Modules of ``plugins=``, and those that a script imported itself."""
    monkeypatch.setattr(PROFILES, "_entries", dict(PROFILES._entries))
    monkeypatch.setattr(registry, "_plugins", {})
    for name in ("asked_for", "imported"):
        (tmp_path / f"{name}.py").write_text(
            "from rge.common.prompt_profiles import PROFILES, register_profile\n"
            f"register_profile({name!r}, PROFILES['plain'])\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.load_plugins(["asked_for"])
    importlib.import_module("imported")
    assert registry.plugins_loaded() == ["asked_for", "imported"]
    made = Workers(worker_jobs.make_reader, ["a", "b"])
    found = {}
    try:
        made.run(["plain", "asked_for", "imported", "unknown"], found.__setitem__)
    finally:
        made.close()
    assert [found[number] for number in range(4)] == [True, True, True, False]


def test_every_job_is_done_once_by_whoever_is_idle(workers):
    found, until = {}, time.monotonic() + 60

    def jobs():
        number = 0
        while number < 40 or (len({pid for *_, pid in found.values()}) < 2 and time.monotonic() < until):
            yield number
            number += 1

    workers.run(jobs(), found.__setitem__)
    assert [found[number][0] for number in range(len(found))] == [n * n for n in range(len(found))]
    assert {(device, pid) for _, device, pid in found.values()} == set(zip("ab", pids(workers), strict=True))
    before = pids(workers)
    assert done(workers, [3])[0][0] == 9
    assert done(workers, []) == {}
    assert pids(workers) == before  # started once
    assert os.getpid() not in before


def test_jobs_are_drawn_when_there_is_somebody_to_do_them(workers):
    drawn, ahead = [], []

    def jobs():
        for number in range(20):
            drawn.append(number)
            yield number

    results = []
    workers.run(jobs(), lambda *_: (results.append(1), ahead.append(len(drawn) - len(results))))
    assert max(ahead) <= 3  # one a worker, and the next


def test_an_error_of_a_job_ends_the_call_and_nothing_else(workers):
    before = done(workers, [1, 2]) and pids(workers)
    with pytest.raises(FileNotFoundError, match="no such picture") as raised:
        done(workers, [1, "fail", *range(200)])
    assert "in work" in raised.value.__notes__[0]  # where it came from
    assert [square for square, _, _ in done(workers, [5, 6]).values()] in ([25, 36], [36, 25])
    assert pids(workers) == before

    def broken():
        yield 1
        raise ValueError("no more")

    with pytest.raises(ValueError):
        done(workers, broken())
    assert done(workers, [7])[0][0] == 49  # not the answer to what was asked before


def test_one_that_dies_ends_all_and_the_next_call_starts_anew(workers):
    before = done(workers, [1, 2]) and pids(workers)
    with error_about(WorkerError, "died"):
        done(workers, ["sleep", "die"])
    assert all(map(is_gone, before))
    assert done(workers, [5])[0][0] == 25
    assert not set(before) & set(pids(workers))


def test_what_cannot_start_is_said():
    with pytest.raises(UserError, match="no such device: broken"):
        done(Workers(worker_jobs.make, ["a", "broken"]), range(3))
    with error_about(WorkerError, "died"):
        done(Workers(worker_jobs.make, ["gone", "gone"]), range(3))


def test_silence_has_a_limit(workers, monkeypatch):
    before = done(workers, [1, 2]) and pids(workers)
    monkeypatch.setattr(module, "SILENCE_S", 0.3)
    with error_about(WorkerError, "silent"):
        done(workers, ["sleep", "sleep"])
    assert all(map(is_gone, before))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_process_that_started_them(number):
    tests = str(Path(worker_jobs.__file__).parent)
    path = os.pathsep.join([tests, *filter(None, sys.path)])
    program = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )
    found = set()
    while len(found) < 2:
        found.add(int(program.stdout.readline()))
    os.killpg(program.pid, number)  # as a terminal does
    rest, _ = program.communicate(timeout=20)
    assert program.returncode == (7 if number == signal.SIGINT else -number)
    assert ("interrupted" in rest) == (number == signal.SIGINT)
    wait_until(lambda: all(map(is_gone, found)))


def test_they_end_with_the_object():
    made = Workers(worker_jobs.make, ["a"])
    done(made, [1])
    (pid,) = pids(made)
    del made
    wait_until(lambda: is_gone(pid))
