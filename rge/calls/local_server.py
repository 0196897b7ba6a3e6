"""A small OpenAI-compatible server on this machine, for the built-in oracle, tests and benchmarks.

It implements only the HTTP/1.1 that its clients here need: Content-Length bodies and keep-alive.
"""

import asyncio
import json
import threading
import time
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
RawHandler = Callable[[str, str, dict[str, str], bytes], Awaitable[Answer]]
"""Takes method, path, headers (lower-case names) and body."""


def chat(
    text: str, *, stop: str = "stop", input_tokens: int = 100, output_tokens: int = 20, model: str = "local"
) -> Answer:
    """Build a chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": stop}
    usage = {"prompt_tokens": input_tokens, "completion_tokens": output_tokens}
    usage["total_tokens"] = input_tokens + output_tokens
    about = {"id": "local", "object": "chat.completion", "created": 0, "model": model}
    return Answer({**about, "choices": [choice], "usage": usage})


class Batches:
    """OpenAI's batch API around a chat handler, as a raw handler; a batch completes at its `polls`-th status request."""

    def __init__(self, chats: Handler, polls: int = 1):
        self.chats, self.polls = chats, polls
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.num_single_calls = 0
        self._num_polls: dict[str, int] = {}

    async def __call__(self, method: str, path: str, headers: dict[str, str], data: bytes) -> Answer:
        """Handle a request."""
        route, _, _ = path.removeprefix("/v1").partition("?")
        if route == "/files":
            name = f"file-{len(self.files)}"
            self.files[name] = data[data.index(b"\r\n\r\n{") + 4 : data.rindex(b"\r\n--")]
            if b'name="purpose"' in self.files[name]:  # form fields may come in any order
                self.files[name] = self.files[name].partition(b"\r\n--")[0]
            return Answer({"id": name, "object": "file"})
        if route.startswith("/files/"):
            return Answer(self.files[route.split("/")[2]], content_type="application/octet-stream")
        if route == "/batches" and method == "POST":
            return Answer(self.create(json.loads(data)))
        if route == "/batches":
            return Answer({"data": list(self.batches.values())[::-1], "has_more": False})
        if route.startswith("/batches/"):
            return Answer(await self.poll(route.split("/")[2]))
        self.num_single_calls += 1
        return await self.chats(path, json.loads(data))

    def create(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Create a batch."""
        name = f"batch_{len(self.batches)}"
        about = {"id": name, "object": "batch", "status": "in_progress", "created_at": time.time()}
        self.batches[name] = about | settings
        return self.batches[name]

    async def poll(self, name: str) -> dict[str, Any]:
        """Status of a batch; the `polls`-th request for it runs the batch."""
        batch = self.batches[name]
        self._num_polls[name] = self._num_polls.get(name, 0) + 1
        if self._num_polls[name] == self.polls:
            lines = [json.loads(line) for line in self.files[batch["input_file_id"]].splitlines()]
            good: list[dict[str, Any]] = []
            bad: list[dict[str, Any]] = []
            for line in lines:
                answer = await self.chats(line["url"], line["body"])
                row = {"custom_id": line["custom_id"], "error": None}
                row["response"] = {"status_code": answer.status, "body": answer.body}
                (good if answer.status == 200 else bad).append(row)
            for field, rows in (("output_file_id", good), ("error_file_id", bad)):
                batch[field] = None
                if rows:
                    batch[field] = f"{name}-{field}"
                    self.files[batch[field]] = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            batch["status"] = "completed"
        return batch


class LocalServer:
    """Serves from a background thread, as a context manager.

    Args:
        handler: handles JSON POST requests.
        raw: handles all requests instead of `handler`.
    """

    def __init__(self, handler: Handler | None = None, *, raw: RawHandler | None = None):
        self.handler, self.raw = handler, raw
        self.num_answered = 0
        """Responses other than ``/models``; counted before sending, so a client that has one sees it counted."""
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
        server = await asyncio.start_server(self._serve_client, "127.0.0.1", 0, backlog=2048)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").split("\r\n")
                pairs = (line.partition(":") for line in lines if line)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path = first.split()[:2]
                answer = await self._answer(method, path, headers, data)
                if not answer.status:
                    break
                writer.write(_encoded(answer))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, headers: dict[str, str], data: bytes) -> Answer:
        if method == "GET" and path.endswith("/models"):
            return Answer({"data": None}, 404)
        if self.raw is not None:
            answer = await self.raw(method, path, headers, data)
        else:
            assert self.handler is not None
            answer = await self.handler(path, json.loads(data or b"{}"))
        self.num_answered += bool(answer.status)
        return answer


def _encoded(answer: Answer) -> bytes:
    body = answer.body
    if not isinstance(body, bytes):
        body = (body if isinstance(body, str) else json.dumps(body)).encode()
    headers = {"content-type": answer.content_type, "content-length": len(body), **answer.headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    # The reason phrase after the status may be empty.
    return f"HTTP/1.1 {answer.status} \r\n{head}\r\n".encode() + body
