"""Throughput of model calls against a server that answers in a second, and what a kill costs.

    python scripts/bench_calls.py [calls=2000] [concurrency=256] [delay_s=1.0]

The server is a process of its own and counts the answers it sent. First every call runs through; then, on a fresh cache,
the caller is killed (SIGKILL) once a random number of answers is out, and started again. Last line: the figures as JSON.
"""

import asyncio
import json
import math
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass

from rge.calls.caller import Caller
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.calls.request import Request
from rge.calls.store import AnswerStore
from rge.common.commands import start
from rge.common.options import parse_options


@dataclass
class Options:
    """How long many calls at once take, and what a kill costs."""

    calls: int = 2000
    """Prompts asked."""
    concurrency: int = 256
    """Calls under way at once."""
    delay_s: float = 1.0
    """What the server waits before it answers."""


def serve(delay_s: float) -> None:
    """Answer after a delay until standard input ends; a POST to /counts tells how often each prompt was answered."""
    seen: Counter[str] = Counter()

    async def handler(path: str, body: dict) -> Answer:
        if path.endswith("/counts"):
            return Answer(dict(seen))
        text = body["messages"][-1]["content"][0]["text"]
        await asyncio.sleep(delay_s)
        seen[text] += 1
        return chat("<answer>yes</answer>")

    with LocalServer(handler) as server:
        print(server.url, flush=True)
        sys.stdin.read()


def ask(url: str, cache: str, calls: int, concurrency: int) -> None:
    """The caller: one prompt after the other."""
    model = ModelConfig(name="local", base_url=url, concurrency=concurrency)
    kept = AnswerStore(cache)
    caller = Caller({"local": model}, kept)
    caller.run([Request("local", (f"question {number}",)) for number in range(calls)])
    assert kept.num_replies() == calls
    assert not caller.counts.failed, caller.counts


def counts(url: str) -> Counter[str]:
    """What the server has answered so far."""
    request = urllib.request.Request(f"{url}/counts", data=b"{}", method="POST")  # noqa: S310 - our own server
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return Counter(json.load(answer))


def main(words: list[str]) -> None:
    """Measure and print."""
    if words[:1] == ["serve"]:
        return serve(float(words[1]))
    if words[:1] == ["ask"]:
        return ask(words[1], words[2], int(words[3]), int(words[4]))
    options = parse_options(Options, words)
    calls, concurrency, delay_s = options.calls, options.concurrency, options.delay_s
    ideal_s = math.ceil(calls / concurrency) * delay_s
    this = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen([*this, "serve", str(delay_s)], stdin=-1, stdout=-1, text=True)
        url = server.stdout.readline().strip()
        began = time.perf_counter()
        subprocess.run([*this, "ask", url, f"{folder}/whole", str(calls), str(concurrency)], check=True)
        whole_s = time.perf_counter() - began
        cpu_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        first = counts(url)

        resumed = [*this, "ask", url, f"{folder}/killed", str(calls), str(concurrency)]
        process = subprocess.Popen(resumed)
        # A moment of the calls, not of the start: that takes a while of its own.
        goal = random.randint(calls // 10, calls * 6 // 10)
        while (counts(url) - first).total() < goal and process.poll() is None:
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(2 * delay_s)
        at_kill = counts(url) - first
        cache = AnswerStore(f"{folder}/killed")
        prompts = [f"question {number}" for number in range(calls)]
        kept = {prompt for prompt in prompts if cache.get(Request("local", (prompt,)).key())}
        subprocess.run(resumed, check=True)
        after = counts(url) - first
        repeated = sum(after[prompt] - at_kill[prompt] for prompt in kept)
        server.stdin.close()
        server.wait()
    figures = {
        "calls": calls,
        "concurrency": concurrency,
        "ideal_s": ideal_s,
        "wall_s": round(whole_s, 2),
        "beyond_ideal_s": round(whole_s - ideal_s, 2),
        "caller_cpu_s": round(cpu_s, 2),
        "answered_before_kill": sum(at_kill.values()),
        "kept_before_kill": len(kept),
        "kept_and_repeated": repeated,
        "under_way_at_kill_and_repeated": sum(after.values()) - calls,
    }
    for name, value in figures.items():
        print(f"{name:<22} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    start(main)
