"""Throughput and latency of `rge serve` against a loop over `encode_query`. `python scripts/bench.py serving checkpoint=demo`.

    python scripts/bench.py serving checkpoint=runs/demo/joint/final [clients=1,16,1000]
    python scripts/bench.py serving checkpoint=demo types=true       # what int8 and binary embeddings cost in accuracy

Every query is a question and a picture of the shipped test set, with a rationale. The server runs on the loopback; each client sends
its next request when the last is answered, and embeddings are compared with the loop's. A lone client and the loop take turns, query
by query, so that both see the same load; their CPU times, which say more on a busy machine, are printed too. A row takes at most
``requests`` requests and `LIMIT_S` seconds.
"""

import asyncio
import base64
import contextlib
import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from benches.harness import Rows, in_turns, show
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError
from rge.common.files import find_shipped
from rge.common.images import picture_bytes
from rge.common.options import AtLeastOne

SET = "data_prep/demo/data/test"
LIMIT_S = 300.0
"""Time for a row."""


@dataclass(kw_only=True)
class Options:
    """Measure `rge serve`."""

    checkpoint: Path
    """Checkpoint directory, or ``demo``."""
    clients: tuple[Annotated[int, Field(ge=1, le=4000)], ...] = (1, 16, 1000)
    """Numbers of concurrent clients, one row of the table each."""
    requests: AtLeastOne = 480
    """Requests per row; a tenth of it with one client, and one per client if there are more clients."""
    types: bool = False
    """Instead: recall of the embedding types of /v2/embed."""


def measure(options: Options) -> Rows:
    """Measure and print."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    from rge import Embedder

    embedder = Embedder.from_pretrained(options.checkpoint)
    if options.types:
        return _types(embedder)
    items = load_set(find_shipped(SET)).query_items("both")[: max(options.requests, *options.clients)]
    bodies = [_body(item) for item in items]
    few = max(options.requests // 10, 1)

    def loop(row: int) -> np.ndarray:
        item = items[row]
        return embedder.encode_query(item.text, list(item.pictures), instruction=item.instruction or "")

    loop(0)
    rows: Rows = {}
    with _server(options.checkpoint) as (port, cpu):
        asyncio.run(_load(port, bodies[:32], 16))  # warm
        for count in options.clients:
            if count == 1:
                rows |= _in_turns(loop, bodies[:few], port, cpu)
                continue
            asked = [bodies[row % len(bodies)] for row in range(max(count, options.requests))]
            began = time.perf_counter()
            answers = asyncio.run(_load(port, asked, count))
            seconds = time.perf_counter() - began
            times = [answer[0] for answer in answers if answer is not None]
            pairs = zip(answers, map(loop, range(few)), strict=False)
            cosine = min((answer[1] @ expected for answer, expected in pairs if answer), default=0)
            row = _row(seconds, times) | {"lost": len(answers) - len(times), "1 - least cosine": 1 - cosine}
            rows[f"rge serve, {count} clients"] = row
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return show(rows)


def _row(seconds: float, times: list[float]) -> dict[str, float]:
    p50, p95 = np.percentile(times, [50, 95]) * 1000
    return {"a second": len(times) / seconds, "p50 ms": p50, "p95 ms": p95}


def _in_turns(
    loop: Callable[[int], np.ndarray], bodies: list[bytes], port: int, cpu: Callable[[], float]
) -> Rows:
    """One query by the loop, one by the server, and so on."""
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def ask(row: int) -> np.ndarray:
        connection.request("POST", "/v1/embeddings", bodies[row], {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        return np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")

    sides = {"loop over encode_query": loop, "rge serve, 1 client": ask}
    found: dict[str, list[np.ndarray]] = {name: [] for name in sides}

    def embed_next(name: str) -> None:
        found[name].append(sides[name](len(found[name])))

    before = cpu()
    wall, used = in_turns({name: partial(embed_next, name) for name in sides}, len(bodies))
    looped, served = found
    cpu_s = {looped: sum(used[looped]), served: cpu() - before}
    worst = 1 - min(1.0, *(float(a @ b) for a, b in zip(*found.values(), strict=True)))
    return {
        name: _row(sum(times), times)
        | {"CPU ms a query": 1000 * cpu_s[name] / len(bodies), "1 - least cosine": worst}
        for name, times in wall.items()
    }


def _body(item: Any) -> bytes:
    parts: list[dict[str, Any]] = []
    for ref in item.pictures:
        data = base64.b64encode(picture_bytes(ref)).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    parts.append({"type": "text", "text": item.text or ""})
    body = {"messages": [{"role": "user", "content": parts}], "instruction": item.instruction or ""}
    return json.dumps(body | {"encoding_format": "base64"}).encode()


@contextlib.contextmanager
def _server(checkpoint: Path) -> Iterator[tuple[int, Callable[[], float]]]:
    """Its port, and its CPU time in seconds."""
    words = [f"checkpoint={checkpoint}", "port=0", "access_log=false"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rge", "serve", *words], stdout=subprocess.PIPE, text=True
    )

    def cpu() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    try:
        for line in process.stdout or ():
            if "http://127.0.0.1:" in line:
                yield int(line.split("http://127.0.0.1:")[1].split()[0]), cpu
                break
        else:
            raise UserError("rge serve did not start")
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()


async def _load(port: int, bodies: list[bytes], clients: int) -> list[tuple[float, np.ndarray] | None]:
    """Seconds and embedding of each request, in order; None if it failed."""
    found: list[tuple[float, np.ndarray] | None] = [None] * len(bodies)
    left = iter(range(len(bodies)))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for row in left:
            body = bodies[row]
            began = time.perf_counter()
            writer.write(
                b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.split("content-length:")[1].split("\r\n")[0])
            answer = json.loads(await reader.readexactly(size))
            if head.split()[1] == "200":
                vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
                found[row] = (time.perf_counter() - began, vector)
        writer.close()

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(client() for _ in range(min(clients, len(bodies)))), return_exceptions=True)
    return found


def _types(embedder: Any) -> Rows:
    """Recall of coarser embeddings: of the right documents, and of the ten nearest by float32."""
    from rge.serving.protocols import encode_embeddings

    wanted = load_set(find_shipped(SET))
    items = wanted.query_items("both")
    queries = embedder.encode(items, side="query", mode=embedder.query_mode).embeddings
    pool = embedder.encode(list(wanted.corpus_items()), side="candidate", mode="direct").embeddings
    pool = pool[wanted.file_rows_C]  # judgements count candidates in the order of their ids
    right = [{*rows.tolist()} for rows, _ in wanted.positives]

    def as_float(part: np.ndarray, kind: str) -> np.ndarray:
        if kind == "binary":
            packed = np.array(encode_embeddings(part, "ubinary"), dtype=np.uint8)
            return np.unpackbits(packed, axis=1).astype(np.float32) * 2 - 1
        coarse = np.array(encode_embeddings(part, kind))  # type: ignore[arg-type]
        return coarse / np.linalg.norm(coarse, axis=1, keepdims=True)

    nearest = np.argsort(-queries @ pool.T, axis=1, kind="stable")[:, :10]
    found = {}
    print(f"{len(items)} queries, {len(pool)} documents, {pool.shape[1]} components")
    for kind, size in (("float", 4.0), ("int8", 1.0), ("binary", 0.125)):
        scores = as_float(queries, kind) @ as_float(pool, kind).T
        ranked = np.argsort(-scores, axis=1, kind="stable")[:, :10]
        judged = [(own, row) for own, row in zip(right, ranked.tolist(), strict=True) if own]
        recalls = [
            np.mean([len(own & {*row[:k]}) / min(len(own), k) for own, row in judged]) for k in (1, 10)
        ]
        kept = np.mean([len({*a} & {*b}) / 10 for a, b in zip(ranked, nearest, strict=True)])
        found[kind] = {"hit@1": float(recalls[0]), "recall@10": float(recalls[1]), "kept": float(kept)}
        found[kind]["bytes"] = size * pool.shape[1]
    return show(found)
