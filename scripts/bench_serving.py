"""Throughput and latency of `rge serve` on this machine, against a loop over `Embedder.encode_query`.

    python scripts/bench_serving.py checkpoint=runs/demo/joint/final [engines=own,vllm] [clients=1,16,1000]

Every query is one of the shipped test set: a question and a picture, with a rationale. For each engine a server is started on
the loopback, asked by so many clients at once (each asks again as soon as it is answered), and stopped; its embeddings are
held against those of the loop. Bounded: at most ``requests`` a row, and ``limit_s`` seconds.
"""

import asyncio
import base64
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from eval.sets.retrieval_set import load_set
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.files import find_shipped
from rge.common.images import picture_bytes
from rge.common.options import one_of, parse_options

AtLeastOne = Annotated[int, Field(ge=1)]


@dataclass(kw_only=True)
class Options:
    """Measure `rge serve`."""

    checkpoint: Path
    """Checkpoint directory."""
    engines: tuple[str, ...] = ("own",)
    """own and/or vllm."""
    clients: tuple[str, ...] = ("1", "16", "1000")
    """Clients at once, a row of the table each."""
    requests: AtLeastOne = 480
    """Requests of a row with fewer clients; with more, each client asks once. A tenth of it with one client."""
    repeats: AtLeastOne = 3
    """Times that a row is measured; the table has the median."""
    limit_s: Annotated[float, Field(gt=0)] = 300.0
    """Time for a row."""


def main(words: list[str]) -> int:
    """Measure and print."""
    options = parse_options(Options, words, "python scripts/bench_serving.py")
    one_of("engines", options.engines, ("own", "vllm"))
    counts = [int(one) for one in options.clients]
    if not all(1 <= one <= 4000 for one in counts):
        raise UserError("clients must be between 1 and 4000")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    from rge.embedder import Embedder

    items = load_set(find_shipped("data_prep/demo/data/test")).query_items("both")
    embedder = Embedder.from_pretrained(options.checkpoint)
    items = items[: max(options.requests, *counts)]
    bodies = [_body(item) for item in items]
    instruction = [one.instruction or "" for one in items]
    few = items[: max(options.requests // 10, 1)]

    def ask(item, row):
        return embedder.encode_query([item.text], [list(item.images)], instruction=instruction[row])

    ask(items[0], 0)
    rows, loops = [], []
    for _ in range(options.repeats):
        began = time.perf_counter()
        times = []
        for row, item in enumerate(few):
            at = time.perf_counter()
            ask(item, row)
            times.append(time.perf_counter() - at)
        loops.append((len(few) / (time.perf_counter() - began), times))
    rows.append(("loop over encode_query", 1, *_figures(loops), 0, None))
    expected = [ask(item, row)[0] for row, item in enumerate(few)]
    base = rows[0][2]
    for engine in options.engines:
        with _server(options.checkpoint, engine) as port:
            asyncio.run(_load(port, bodies[:32], 16, options.limit_s))  # warm
            for count in counts:
                wanted = max(count, options.requests // 10 if count == 1 else options.requests)
                asked = [bodies[row % len(bodies)] for row in range(wanted)]
                runs, lost, worst = [], 0, 1.0
                for _ in range(options.repeats):
                    began = time.perf_counter()
                    answers = asyncio.run(_load(port, asked, count, options.limit_s))
                    seconds = time.perf_counter() - began
                    good = [one for one in answers if one is not None]
                    lost += len(answers) - len(good)
                    runs.append((len(good) / seconds, [one[0] for one in good]))
                    for (_, vector), reference in zip(answers, expected, strict=False):
                        worst = min(worst, float(vector @ reference))
                rows.append((f"rge serve engine={engine}", count, *_figures(runs), lost, worst))
    print(
        f"{'':26} {'clients':>7} {'a second':>9} {'of loop':>8} {'p50 ms':>8} {'p95 ms':>8} {'lost':>5}  least cosine"
    )
    for name, count, rate, p50, p95, lost, worst in rows:
        shown = "" if worst is None else f"{worst:.7f}"
        print(
            f"{name:26} {count:>7} {rate:>9.1f} {rate / base:>8.2f} {p50:>8.0f} {p95:>8.0f} {lost:>5}  {shown}"
        )
    return 1 if any(row[5] for row in rows) else 0


def _figures(runs: list[tuple[float, list[float]]]) -> tuple[float, float, float]:
    """Medians over the runs: requests a second, p50 and p95 in milliseconds."""
    percentiles = [np.percentile(times, [50, 95]) * 1000 for _, times in runs]
    return float(np.median([rate for rate, _ in runs])), *np.median(percentiles, axis=0).tolist()


def _body(item) -> bytes:
    parts = []
    for ref in item.images:
        data = base64.b64encode(picture_bytes(ref)).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    parts.append({"type": "text", "text": item.text or ""})
    body = {"messages": [{"role": "user", "content": parts}], "instruction": item.instruction or "", "encoding_format": "base64"}  # fmt: skip
    return json.dumps(body).encode()


@contextlib.contextmanager
def _server(checkpoint: Path, engine: str) -> Iterator[int]:
    words = [f"checkpoint={checkpoint}", f"engine={engine}", "port=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rge", "serve", *words], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        for line in process.stdout:
            if "http://127.0.0.1:" in line:
                yield int(line.split("http://127.0.0.1:")[1].split()[0])
                break
        else:
            raise UserError(f"rge serve engine={engine} did not start")
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()


async def _load(
    port: int, bodies: list[bytes], clients: int, limit_s: float
) -> list[tuple[float, np.ndarray] | None]:
    """Seconds and embedding of every request, in their order; None of what failed."""
    found: list[tuple[float, np.ndarray] | None] = [None] * len(bodies)
    left = iter(range(len(bodies)))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for row in left:
            body = bodies[row]
            began = time.perf_counter()
            writer.write(
                b"POST /v1/embeddings HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.split("content-length:")[1].split("\r\n")[0])
            answer = json.loads(await reader.readexactly(size))
            if head.split()[1] == "200":
                vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
                found[row] = (time.perf_counter() - began, vector)
        writer.close()

    async with asyncio.timeout(limit_s):
        await asyncio.gather(*(client() for _ in range(min(clients, len(bodies)))), return_exceptions=True)
    return found


if __name__ == "__main__":
    start(main)
