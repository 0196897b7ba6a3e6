"""OpenAI's batch API, also offered by compatible servers: results within a day, at half price.

Creating a batch is not idempotent, so if the response is lost, the batch is searched for in the provider's list by its file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rge.calls.failures import AttemptFailed, Rejection
from rge.calls.providers.errors import failure
from rge.calls.providers.transport import Connection, to_json
from rge.calls.replies import as_dict, dict_items, is_failure
from rge.calls.store import BatchRow

Json = dict[str, Any]
MAX_CALLS, MAX_BYTES = 50_000, 100_000_000
"""Limits of one batch; OpenAI's are 50,000 calls and 200 MB."""
TRANSFER_TIMEOUT_S = 900.0
"""Time-out of an upload or download."""
CLOCK_SKEW_S = 300.0
"""Tolerance for a provider's clock that is behind ours."""
URL = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class State:
    """Status of a batch."""

    status: str  # the provider's own, such as ``in_progress``
    files: tuple[str, ...]  # ids of the files of results and of errors
    queue_full: bool = False  # rejected because the provider's queue is full
    reason: str | None = None  # why the whole batch failed; None: it did not

    @property
    def ended(self) -> bool:
        """Whether the batch has finished, in any way."""
        return self.reason is not None or self.status == "completed" or self.partial

    @property
    def partial(self) -> bool:
        """Whether it ended early: calls without a result were not made and are not billed."""
        return self.status in ("expired", "cancelled")


@dataclass(frozen=True, slots=True)
class Line:
    """One result."""

    id: str  # custom_id of the call
    body: bytes | None  # response body, as of a single call; None: failed
    status: int | None = None  # HTTP status of a failed call, if reported
    error: bytes = b""  # body of the failure


class BatchApi(Connection):
    """The batch API of one endpoint."""

    async def send_file(self, label: str, bodies: Sequence[bytes]) -> str:
        """Upload requests, which is free. Returns the provider's file id."""
        lines = b"".join(
            b'{"custom_id": "%s-%d", "method": "POST", "url": "%s", "body": %s}\n'
            % (label.encode(), number, URL.encode(), body)
            for number, body in enumerate(bodies)
        )
        files = {"file": (f"{label}.jsonl", lines, "application/jsonl")}
        return _id(
            await self._json(
                "POST", "/files", files=files, data={"purpose": "batch"}, timeout=TRANSFER_TIMEOUT_S
            )
        )

    async def create(self, label: str, file: str) -> str:
        """Create a batch and return its id. The only step that must not be repeated."""
        settings = {"endpoint": URL, "completion_window": "24h", "metadata": {"label": label}}
        return _id(await self._json("POST", "/batches", content=to_json({"input_file_id": file, **settings})))

    async def find(self, row: BatchRow) -> str | None:
        """Find the id of a batch by its file, if it was created."""
        params: Json = {"limit": 100}
        while row.file is not None:
            page = await self._json("GET", "/batches", params=params)
            rows = dict_items(page.get("data"))
            for listed in rows:
                if listed.get("input_file_id") == row.file and isinstance(listed.get("id"), str):
                    return listed["id"]
                created_at = listed.get("created_at")  # newest first
                if isinstance(created_at, (int, float)) and created_at < row.began - CLOCK_SKEW_S:
                    return None
            if not rows or not page.get("has_more"):
                return None
            params["after"] = rows[-1].get("id")
        return None

    async def state(self, id: str) -> State:
        """Get the status of a batch."""
        raw = await self._json("GET", f"/batches/{id}")
        status = str(raw.get("status"))
        files = tuple(str(raw[name]) for name in ("output_file_id", "error_file_id") if raw.get(name))
        if status != "failed":
            return State(status, files)
        errors = dict_items(as_dict(raw.get("errors")).get("data"))
        reason = "; ".join(str(error.get("message")) for error in errors[:3]) or "no reason given"
        queue_full = any(error.get("code") == "token_limit_exceeded" for error in errors)
        return State(status, files, queue_full, reason)

    async def results(self, state: State) -> list[Line]:
        """Download the results of an ended batch, skipping unreadable or truncated lines."""
        lines = []
        for file in state.files:
            response = await self._fetch("GET", f"/files/{file}/content", timeout=TRANSFER_TIMEOUT_S)
            for line in response.content.split(b"\n"):
                try:
                    lines.append(_line(as_dict(json.loads(line))))
                except ValueError:
                    continue
        return lines

    async def _fetch(self, method: str, url: str, **options: Any) -> httpx.Response:
        """Send a request; raises `AttemptFailed`, `Rejection` (also by policy) or `StopCalls` unless it succeeds."""
        response = await self.exchange(method, url, **options)
        if response.is_success:
            return response
        raw = response.content
        error = failure(response.status_code, raw, response.headers, self.model, self.mask)
        raise error or Rejection(self.mask(raw.decode("utf-8", "replace")))

    async def _json(self, method: str, url: str, **options: Any) -> Json:
        response = await self._fetch(method, url, **options)
        try:
            value = response.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise AttemptFailed(f"no JSON object at {url}: {self.mask(response.text)[:100]!r}", billed=True)
        return value


def _line(result: Json) -> Line:
    response, id = as_dict(result.get("response")), str(result.get("custom_id"))
    status, body = response.get("status_code"), response.get("body")
    if status == 200 and isinstance(body, dict) and not is_failure(body):
        return Line(id, to_json(body))
    return Line(id, None, status, to_json(body if body else result.get("error")))


def _id(response: Json) -> str:
    if not isinstance(response.get("id"), str):
        raise AttemptFailed(f"a response without id: {str(response)[:200]}", billed=True)
    return response["id"]
