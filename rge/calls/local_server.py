"""A small OpenAI-compatible server on this machine, for the built-in oracle, tests and benchmarks.

It speaks just enough HTTP/1.1 (bodies with a length, kept-alive connections) for its clients here.
"""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PHRASES = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests"}


@dataclass
class Answer:
    """What is sent back: a JSON body, or text or bytes as they are; at status 0 nothing, and the connection ends."""

    body: Any
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[[str, dict[str, Any]], Awaitable[Answer]]
"""Answers (path, JSON body of the request)."""
RawHandler = Callable[[str, str, dict[str, str], bytes], Awaitable[Answer]]
"""Answers (method, path, headers with names in lower case, body)."""


def chat(
    text: str, *, stop: str = "stop", input_tokens: int = 100, output_tokens: int = 20, model: str = "local"
) -> Answer:
    """A chat completion."""
    message = {"role": "assistant", "content": text}
    usage = {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
    }
    choice = {"index": 0, "message": message, "finish_reason": stop}
    return Answer(
        {
            "id": "local",
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": [choice],
            "usage": usage,
        }
    )


class Batches:
    """OpenAI's batch mode around a server of chats, as a raw handler; a batch has ended after so many looks at it."""

    def __init__(self, chats: Handler, looks: int = 1):
        self.chats, self.looks = chats, looks
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.num_by_calls = 0
        self._looked: dict[str, int] = {}

    async def __call__(self, method: str, path: str, headers: dict[str, str], data: bytes) -> Answer:
        """Answer a request."""
        place, _, _ = path.removeprefix("/v1").partition("?")
        if place == "/files":
            name = f"file-{len(self.files)}"
            self.files[name] = data[data.index(b"\r\n\r\n{") + 4 : data.rindex(b"\r\n--")]
            if b'name="purpose"' in self.files[name]:  # the form's fields come in any order
                self.files[name] = self.files[name].partition(b"\r\n--")[0]
            return Answer({"id": name, "object": "file"})
        if place.startswith("/files/"):
            return Answer(self.files[place.split("/")[2]], content_type="application/octet-stream")
        if place == "/batches" and method == "POST":
            return Answer(self.create(json.loads(data)))
        if place == "/batches":
            return Answer({"data": list(self.batches.values())[::-1], "has_more": False})
        if place.startswith("/batches/"):
            return Answer(await self.look(place.split("/")[2]))
        self.num_by_calls += 1
        return await self.chats(path, json.loads(data))

    def create(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Begin a batch."""
        name = f"batch_{len(self.batches)}"
        self.batches[name] = {
            "id": name,
            "object": "batch",
            "status": "in_progress",
            "created_at": time.time(),
            **asked,
        }
        return self.batches[name]

    async def look(self, name: str) -> dict[str, Any]:
        """The state of a batch; at the last of `looks` it is worked through."""
        batch = self.batches[name]
        self._looked[name] = self._looked.get(name, 0) + 1
        if self._looked[name] == self.looks:
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
    """Serves in a thread of its own, as a context manager.

    Args:
        handler: answers requests.
        port: 0 takes a free one; `url` says which.
        raw: answers in its place, for what is not a POST of JSON.
        models: entries of ``/models``; without, the server has no such list.
    """

    def __init__(
        self,
        handler: Handler | None = None,
        port: int = 0,
        *,
        raw: RawHandler | None = None,
        models: Sequence[Mapping[str, Any]] | None = None,
    ):
        self.handler, self.port, self.raw, self.models = handler, port, raw, models
        self.num_answered = 0
        """Answers given but for the list of models; counted before they are sent, so that a client that has one finds it counted."""
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        """Base address for a client."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> "LocalServer":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        # A burst of hundreds of connections must not be refused.
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, backlog=2048)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").split("\r\n")
                pairs = (line.partition(":") for line in lines if line)
                given = {name.lower(): value.strip() for name, _, value in pairs}
                data = await reader.readexactly(int(given.get("content-length", 0)))
                method, path = first.split()[:2]
                answer = await self._answer(method, path, given, data)
                if not answer.status:
                    break
                writer.write(_encoded(answer))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, given: dict[str, str], data: bytes) -> Answer:
        if method == "GET" and path.endswith("/models"):
            return Answer({"data": self.models}, 404 if self.models is None else 200)
        if self.raw is not None:
            answer = await self.raw(method, path, given, data)
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
    phrase = PHRASES.get(answer.status, "Answer")
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {answer.status} {phrase}\r\n{head}\r\n".encode() + body
