"""OpenAI's batch API, also offered by compatible servers: answers within a day, at half the price.

Creating a batch is not idempotent: if the response is lost, the batch is searched for in the provider's list by its file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rge.calls.failures import AttemptFailed, Gone, QueueFull, Rejection
from rge.calls.providers.errors import SHOWN_CHARACTERS, codes, failure
from rge.calls.providers.transport import PATH, Connection, Json
from rge.calls.replies import as_dict, dict_items, parse

MAX_CALLS, MAX_BYTES = 50_000, 100_000_000
"""Limits of one batch; OpenAI's are 50,000 calls and 200 MB."""
TRANSFER_TIMEOUT_S = 3600.0
"""Time limit of an upload or download."""
URL = f"/v1{PATH}"
QUEUE_FULL = "token_limit_exceeded"
"""The error code of a full queue, when a batch is created or fails."""


@dataclass(frozen=True)
class BatchApi:
    """The batch API of one endpoint.

    All requests raise `AttemptFailed`, `Rejection` (`Gone` if a batch, a file or the whole API does not exist) or `StopCalls`.
    """

    connection: Connection

    async def upload(self, label: str, bodies: Mapping[str, bytes]) -> str:
        """Upload requests by their ``custom_id``, which is free. Returns the provider's id of the file."""
        lines = b"".join(
            b'{"custom_id": "%s", "method": "POST", "url": "%s", "body": %s}\n'
            % (id.encode(), URL.encode(), body)
            for id, body in bodies.items()
        )
        form: Json = {
            "files": {"file": (f"{label}.jsonl", lines, "application/jsonl")},
            "data": {"purpose": "batch"},
        }
        return _id(await self._json("POST", "/files", TRANSFER_TIMEOUT_S, **form))

    async def create(self, label: str, file: str) -> str:
        """Create a batch and return its id. The only request that must not be repeated."""
        settings = {"endpoint": URL, "completion_window": "24h", "metadata": {"label": label}}
        return _id(await self._json("POST", "/batches", json={"input_file_id": file, **settings}))

    async def find(self, file: str) -> str | None:
        """The id of the batch of a file; None: it was not created."""
        params: Json = {"limit": 100}
        while True:
            page = await self._json("GET", "/batches", params=params)
            rows = dict_items(page.get("data"))
            for row in rows:
                if row.get("input_file_id") == file:
                    return _id(row)
            last = rows[-1].get("id") if rows else None
            if not page.get("has_more") or last == params.get("after"):
                return None
            params["after"] = last

    async def state(self, id: str) -> Json:
        """The provider's description of a batch."""
        return await self._json("GET", f"/batches/{id}")

    async def results(self, batch: Json) -> list[Json]:
        """Download the results of a batch that has ended, without lines that are cut off or unreadable."""
        lines: list[bytes] = []
        for file in filter(None, (batch.get("output_file_id"), batch.get("error_file_id"))):
            # A file may be at another host; httpx does not forward the key there.
            path = f"/files/{file}/content"
            content = await self._send("GET", path, TRANSFER_TIMEOUT_S, follow_redirects=True)
            lines += content.split(b"\n")
        return dict_items([parse(line) for line in lines])

    def answer(self, result: Json) -> bytes:
        """The answer in a result; raises as `Connection.chat` does."""
        response = as_dict(result.get("response"))
        status, body = response.get("status_code"), response.get("body")
        if not isinstance(status, int):  # it expired, for example
            raise AttemptFailed(self.connection.mask(json.dumps(result.get("error"))))
        return self.connection.answer(status, json.dumps(body or {"error": result.get("error")}).encode(), {})

    async def _send(self, method: str, path: str, limit_s: float | None = None, **options: Any) -> bytes:
        connection = self.connection
        response = await connection.send(method, path, limit_s or connection.model.timeout_s, **options)
        if response.is_success:
            return response.content
        status, content = response.status_code, response.content
        text = connection.mask(content.decode("utf-8", "replace"))
        message = f"HTTP {status}: {text[:SHOWN_CHARACTERS]}"
        if status in (404, 410):
            raise Gone(message)
        if QUEUE_FULL in codes(parse(content)):
            raise QueueFull(message)
        error = failure(status, content, response.headers, connection.model, connection.mask)
        raise error or Rejection(message)

    async def _json(self, method: str, path: str, limit_s: float | None = None, **options: Any) -> Json:
        content = await self._send(method, path, limit_s, **options)
        value = parse(content)
        if not isinstance(value, dict):
            message = self.connection.mask(content.decode("utf-8", "replace"))
            raise AttemptFailed(f"no JSON object at {path} but {message[:SHOWN_CHARACTERS]!r}")
        return value


def _id(response: Json) -> str:
    if not isinstance(response.get("id"), str):
        raise AttemptFailed(f"a response without id: {str(response)[:SHOWN_CHARACTERS]}")
    return response["id"]
