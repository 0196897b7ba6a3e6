"""A small OpenAI-compatible server on this machine: for the embedded default, for tests and for measuring.

It speaks just enough HTTP/1.1 (POST, JSON, kept-alive connections) for the official client.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

PHRASES = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests"}


@dataclass
class Answer:
    """What is sent back: a JSON body (anything but str), or text as it is."""

    body: Any
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[[str, dict[str, Any]], Awaitable[Answer]]
"""Answers (path, JSON body of the request)."""


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


class LocalServer:
    """Serves in a thread of its own, as a context manager.

    Args:
        handler: answers requests.
        port: 0 takes a free one; `url` says which.
    """

    def __init__(self, handler: Handler, port: int = 0):
        self.handler, self.port = handler, port
        self.num_answered = 0
        """Answers given; counted before they are sent, so that who has an answer finds it counted."""
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
                lines = head.decode("latin-1").split("\r\n")
                length = next(
                    (int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:")),
                    0,
                )
                data = await reader.readexactly(length)
                answer = await self.handler(lines[0].split()[1], json.loads(data or b"{}"))
                body = (
                    answer.body.encode() if isinstance(answer.body, str) else json.dumps(answer.body).encode()
                )
                headers = {
                    "content-type": answer.content_type,
                    "content-length": str(len(body)),
                    **answer.headers,
                }
                phrase = PHRASES.get(answer.status, "Answer")
                self.num_answered += 1
                writer.write(
                    f"HTTP/1.1 {answer.status} {phrase}\r\n".encode()
                    + "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
                    + b"\r\n"
                    + body
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()
