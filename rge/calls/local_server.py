"""A small OpenAI-compatible server on this machine, for the built-in oracle, tests and benchmarks.

It implements only the HTTP/1.1 that its clients here need: Content-Length bodies and keep-alive.
"""

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """A response: JSON-serialisable body, text or bytes. Status 0 closes the connection without a response."""

    body: Any
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[[str, dict[str, Any]], Awaitable[Answer]]
"""Takes path and JSON body."""


def chat(text: str, *, stop: str = "stop", input_tokens: int = 100, output_tokens: int = 20) -> Answer:
    """Build a chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": stop}
    usage = {"prompt_tokens": input_tokens, "completion_tokens": output_tokens}
    usage["total_tokens"] = input_tokens + output_tokens
    about = {"id": "local", "object": "chat.completion", "created": 0, "model": "local"}
    return Answer({**about, "choices": [choice], "usage": usage})


class Batches:
    """OpenAI's batch API around a handler of chats."""

    def __init__(self, chats: Handler):
        self.chats = chats
        self.polls = 1
        """At which request for its status a batch is completed."""
        self.num_polls: Counter[str] = Counter()
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}

    async def respond(self, method: str, route: str, data: bytes) -> Answer:
        """Answer a request for a route of the API, without the version."""
        _, kind, *rest = route.split("/")
        if kind == "files" and method == "POST":
            name = f"file-{len(self.files)}"
            start = data.index(b"\r\n\r\n", data.index(b"filename=")) + 4
            self.files[name] = data[start : data.index(b"\r\n--", start)]
            return Answer({"id": name, "object": "file"})
        if kind == "files":
            return Answer(self.files[rest[0]], content_type="application/octet-stream")
        if method == "POST":
            name = f"batch_{len(self.batches)}"
            self.batches[name] = {"id": name, "object": "batch", "status": "in_progress", **json.loads(data)}
            return Answer(self.batches[name])
        if rest:
            return Answer(await self.poll(rest[0]))
        return Answer({"data": list(self.batches.values())[::-1], "has_more": False})

    async def poll(self, name: str) -> dict[str, Any]:
        """Status of a batch; the `polls`-th request for it makes the calls."""
        batch = self.batches[name]
        self.num_polls[name] += 1
        if self.num_polls[name] == self.polls:
            batch["status"] = "completed"
            results: dict[str, list[bytes]] = {"output_file_id": [], "error_file_id": []}
            for line in map(json.loads, self.files[batch["input_file_id"]].splitlines()):
                answer = await self.chats(line["url"], line["body"])
                response = {"status_code": answer.status, "body": answer.body}
                result = {"custom_id": line["custom_id"], "response": response, "error": None}
                kind = "output_file_id" if answer.status == 200 else "error_file_id"
                results[kind].append(json.dumps(result).encode() + b"\n")
            for kind, lines in results.items():
                if lines:
                    batch[kind] = f"{name}-{kind}"
                    self.files[batch[kind]] = b"".join(lines)
        return batch


class LocalServer:
    """Serves JSON POST requests, singly or in batches, from a background thread, as a context manager."""

    def __init__(self, handler: Handler):
        self.handler, self.batches = handler, Batches(handler)
        self.headers: dict[str, str] = {}
        """Of the latest request, with lower-case names."""
        self.num_answered = 0
        """Responses other than ``/models``; counted before sending, so a client that has one sees it counted."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> "LocalServer":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        # Must accept a burst of hundreds of connections.
        server = await asyncio.start_server(self._serve_client, sock=self._socket, backlog=2048)
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").split("\r\n")
                pairs = (line.partition(":") for line in lines if line)
                self.headers = headers = {name.lower(): value.strip() for name, _, value in pairs}
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path = first.split()[:2]
                answer = await self.respond(method, path, data)
                self.num_answered += bool(answer.status) and not path.endswith("/models")
                if not answer.status:
                    break
                writer.write(_encoded(answer))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def respond(self, method: str, path: str, data: bytes) -> Answer:
        """Answer a request."""
        if method == "GET" and path.endswith("/models"):
            return Answer({"data": None}, 404)
        route = path.partition("?")[0].removeprefix("/v1")
        if route.startswith(("/files", "/batches")):
            return await self.batches.respond(method, route, data)
        return await self.handler(path, json.loads(data or b"{}"))


def _encoded(answer: Answer) -> bytes:
    body = answer.body
    if not isinstance(body, bytes):
        body = (body if isinstance(body, str) else json.dumps(body)).encode()
    headers = {"content-type": answer.content_type, "content-length": len(body), **answer.headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    # The reason phrase after the status may be empty.
    return f"HTTP/1.1 {answer.status} \r\n{head}\r\n".encode() + body
