"""The batch APIs of OpenAI, Anthropic and Gemini: answered within a day, at half the price.

Sources: developers.openai.com (Batch API), platform.claude.com (Message Batches), ai.google.dev (Batch API), autumn 2026. No
creation is idempotent, so one whose answer was lost is looked for in the provider's list: at OpenAI by its file, at Gemini by
its display name, at Anthropic by size and time until its results show the ids of its requests.
"""

# ruff: noqa: D102 - what the methods of a provider do is said by `Provider`
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx

from rge.calls.failures import EndpointDown, Lost
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig
from rge.calls.providers.transport import connected, encoded, fetch
from rge.calls.store import BatchRow

Json = dict[str, Any]
MOST_CALLS, MOST_BYTES = 50_000, 100_000_000
"""Of one batch: what all three take (OpenAI 50,000 and 200 MB, Anthropic 100,000 and 256 MB, Gemini 2 GB)."""
SEND_S = 900.0
"""For sending a batch up, or its results down: more bytes than a call has."""
CLOCKS_S = 300.0
"""By which a provider's clock may be behind ours."""


@dataclass(frozen=True, slots=True)
class State:
    """How far a batch is."""

    word: str  # the provider's own, such as ``in_progress``
    ended: bool  # nothing more will come
    raw: Json  # what the provider said, for `Provider.results`
    queue_full: bool = False  # it was turned away because too much is waiting already
    reason: str | None = None  # why it failed as a whole; None: it did not


@dataclass(frozen=True, slots=True)
class Line:
    """One result."""

    id: str  # of the call, as it was sent
    body: bytes | None  # the answer, as a call would have brought it; None: there is none
    status: int | None = None  # of HTTP, where the call failed and the provider says one
    error: bytes = b""  # the body of that failure, or why there is no answer


class Provider(ABC):
    """The batches of one endpoint, as an asynchronous context manager that is connected to it."""

    def __init__(self, model: ModelConfig, mask: Mask):
        self.model, self.mask = model, mask

    async def __aenter__(self) -> "Provider":
        # Files may lie elsewhere. Of all keys httpx keeps only OpenAI's from another host.
        follow = self.model.api == "openai"
        self.client = connected(self.model, timeout=self.model.timeout_s, follow_redirects=follow)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    LINE: str
    """A call as it stands in what is sent up; ids are of letters, digits and hyphens."""

    def line(self, id: str, body: bytes) -> bytes:
        """A call of a batch."""
        return self.LINE.replace("ID", id).encode() + body + b"}"

    async def send_file(self, label: str, lines: Sequence[bytes]) -> str | None:
        """Send requests up, where that is a step of its own; costs nothing. Returns the provider's name of them."""
        return None

    @abstractmethod
    async def create(self, label: str, file: str | None, lines: Sequence[bytes]) -> str:
        """Begin the batch, and return the provider's name of it. The one step that must not be done twice."""

    LIST: tuple[str, str]
    """Address of the list of batches, and its parameter that says how many a page has."""

    @abstractmethod
    def is_the_one(self, found: Json, row: BatchRow) -> bool:
        """Whether a batch of the provider's list may be ours, whose creation got no answer."""

    @abstractmethod
    def next_page(self, page: Json, rows: list[Json]) -> Json | None:
        """The parameters of the next page of the list; None at its end."""

    async def find(self, row: BatchRow, known: set[str]) -> str | None:
        """The batch whose creation got no answer, if it is not among those that are known already."""
        url, size = self.LIST
        params: Json = {size: 100}
        while True:
            page = await self._json("GET", url, params=params)
            rows = _rows(page, "operations" if "operations" in page else "data")
            for found in rows:
                if _before(found.get("created_at"), row.began):
                    return None
                name = found.get("id", found.get("name"))
                if isinstance(name, str) and name not in known and self.is_the_one(found, row):
                    return name
            if not rows or (further := self.next_page(page, rows)) is None:
                return None
            params |= further

    @abstractmethod
    async def state(self, id: str) -> State:
        """How far it is."""

    @abstractmethod
    def results(self, id: str, state: State) -> AsyncIterator[Line]:
        """The lines of one that has ended; lines that cannot be read are left out."""

    async def _json(self, method: str, url: str, **how: Any) -> Json:
        response = await fetch(self.client, method, url, self.model, self.mask, **how)
        try:
            found = response.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            said = f"no JSON object at {url}: {self.mask(response.text[:100])!r}"
            raise Lost(said, billed=True, raw=response.content)
        return found

    async def _lines(self, url: str) -> AsyncIterator[Json]:
        """Objects of a JSON-lines file; what is cut short or is none is left out."""
        response = await fetch(self.client, "GET", url, self.model, self.mask, timeout=SEND_S)
        for line in response.content.split(b"\n"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


class OpenAI(Provider):
    """A file of requests, a batch of it, and files of answers and errors."""

    LINE = '{"custom_id": "ID", "method": "POST", "url": "/v1/chat/completions", "body": '
    _DONE = ("completed", "failed", "expired", "cancelled")

    async def send_file(self, label: str, lines: Sequence[bytes]) -> str:
        files = {"file": (f"{label}.jsonl", b"\n".join(lines) + b"\n", "application/jsonl")}
        found = await self._json("POST", "/files", files=files, data={"purpose": "batch"}, timeout=SEND_S)
        return _name(found, "id")

    async def create(self, label: str, file: str | None, lines: Sequence[bytes]) -> str:
        how = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "metadata": {"label": label}}
        content = encoded({"input_file_id": file, **how})
        return _name(await self._json("POST", "/batches", content=content), "id")

    LIST = ("/batches", "limit")

    def is_the_one(self, found: Json, row: BatchRow) -> bool:
        return row.file is not None and found.get("input_file_id") == row.file

    def next_page(self, page: Json, rows: list[Json]) -> Json | None:
        return {"after": rows[-1].get("id")} if page.get("has_more") else None

    async def state(self, id: str) -> State:
        raw = await self._json("GET", f"/batches/{id}")
        word = str(raw.get("status"))
        listed = raw.get("errors")
        errors = _rows(listed, "data") if isinstance(listed, dict) else []
        said = "; ".join(str(one.get("message")) for one in errors[:3]) or "no reason given"
        full = any(one.get("code") == "token_limit_exceeded" for one in errors)
        failed = word == "failed"
        return State(word, word in self._DONE, raw, failed and full, said if failed else None)

    async def results(self, id: str, state: State) -> AsyncIterator[Line]:
        for file in (state.raw.get("output_file_id"), state.raw.get("error_file_id")):
            if not file:
                continue
            async for found in self._lines(f"/files/{file}/content"):
                response = _dict(found.get("response"))
                status, body = response.get("status_code"), response.get("body")
                if status == 200 and isinstance(body, dict):
                    yield Line(str(found.get("custom_id")), encoded(body))
                else:
                    error = body if body else found.get("error")
                    yield Line(str(found.get("custom_id")), None, status, encoded(error))


class Anthropic(Provider):
    """Requests and batch in one step, and one stream of results."""

    LINE = '{"custom_id": "ID", "params": '
    _MAYBE = {"rate_limit_error": 429, "api_error": 500, "overloaded_error": 529}

    async def create(self, label: str, file: str | None, lines: Sequence[bytes]) -> str:
        body = b'{"requests": [' + b",".join(lines) + b"]}"
        return _name(await self._json("POST", "/v1/messages/batches", content=body, timeout=SEND_S), "id")

    LIST = ("/v1/messages/batches", "limit")

    def is_the_one(self, found: Json, row: BatchRow) -> bool:
        return sum(_dict(found.get("request_counts")).values()) == len(row.calls)

    def next_page(self, page: Json, rows: list[Json]) -> Json | None:
        return {"after_id": rows[-1].get("id")} if page.get("has_more") else None

    async def state(self, id: str) -> State:
        raw = await self._json("GET", f"/v1/messages/batches/{id}")
        word = str(raw.get("processing_status"))
        return State(word, word == "ended", raw)

    async def results(self, id: str, state: State) -> AsyncIterator[Line]:
        # Not at the address that it names: a key is sent to the configured endpoint only.
        async for found in self._lines(f"/v1/messages/batches/{id}/results"):
            result = _dict(found.get("result"))
            name, kind = str(found.get("custom_id")), result.get("type")
            if kind == "succeeded" and isinstance(result.get("message"), dict):
                yield Line(name, encoded(result["message"]))
            elif kind == "errored":
                error = result.get("error")
                said = _dict(_dict(error).get("error")).get("type")
                yield Line(name, None, self._MAYBE.get(str(said), 400), encoded(error))
            else:
                yield Line(name, None, None, encoded(kind))


class Gemini(Provider):
    """A file of requests by the Files API, a long-running operation, and a file of answers."""

    LINE = '{"key": "ID", "request": '
    _DONE = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")
    _STATUS = {3: 400, 8: 429, 13: 500, 14: 503}
    """Of codes of google.rpc: a request that cannot be taken, quota, faults of theirs."""

    async def send_file(self, label: str, lines: Sequence[bytes]) -> str:
        data = b"\n".join(lines) + b"\n"
        about = {
            "x-goog-upload-protocol": "resumable",
            "x-goog-upload-command": "start",
            "x-goog-upload-header-content-length": str(len(data)),
            "x-goog-upload-header-content-type": "application/jsonl",
        }
        content = encoded({"file": {"display_name": label}})
        url = "/upload/v1beta/files"
        begun = await fetch(self.client, "POST", url, self.model, self.mask, content=content, headers=about)
        url = begun.headers.get("x-goog-upload-url", "")
        if not url or httpx.URL(url).host != self.client.base_url.host:
            raise EndpointDown(
                f"{self.model.name}: requests are to be sent to another host, {self.mask(url)}"
            )
        about = {
            "content-type": "application/jsonl",
            "x-goog-upload-offset": "0",
            "x-goog-upload-command": "upload, finalize",
        }
        found = await self._json("POST", url, content=data, headers=about, timeout=SEND_S)
        return _name(_dict(found.get("file")), "name")

    async def create(self, label: str, file: str | None, lines: Sequence[bytes]) -> str:
        body = {"batch": {"display_name": label, "input_config": {"file_name": file}}}
        url = f"/v1beta/models/{quote(self.model.name, safe='')}:batchGenerateContent"
        return _name(await self._json("POST", url, content=encoded(body)), "name")

    LIST = ("/v1beta/batches", "pageSize")

    def is_the_one(self, found: Json, row: BatchRow) -> bool:
        return _dict(found.get("metadata")).get("displayName") == row.label

    def next_page(self, page: Json, rows: list[Json]) -> Json | None:
        return {"pageToken": page["nextPageToken"]} if page.get("nextPageToken") else None

    async def state(self, id: str) -> State:
        raw = await self._json("GET", f"/v1beta/{id}")
        # JOB_STATE_ in the guide, BATCH_STATE_ in the reference.
        word = str(_dict(raw.get("metadata")).get("state")).rpartition("STATE_")[2]
        reason = None
        if word == "FAILED":
            reason = str(_dict(raw.get("error")).get("message") or "no reason given")
        return State(word, word in self._DONE or raw.get("done") is True, raw, reason=reason)

    async def results(self, id: str, state: State) -> AsyncIterator[Line]:
        file = _dict(state.raw.get("response")).get("responsesFile")
        if not file:
            return
        async for found in self._lines(f"/download/v1beta/{file}:download?alt=media"):
            name, body, error = str(found.get("key")), found.get("response"), found.get("error")
            if isinstance(body, dict):
                yield Line(name, encoded(body))
            else:
                code = _dict(error).get("code")
                status = self._STATUS.get(code, code) if isinstance(code, int) else None
                yield Line(name, None, status, encoded({"error": error}))


PROVIDERS: dict[str, type[Provider]] = {"openai": OpenAI, "anthropic": Anthropic, "gemini": Gemini}


def _name(found: Json, field: str) -> str:
    if not isinstance(found.get(field), str):
        raise Lost(f"an answer without {field}: {str(found)[:200]}", billed=True)
    return found[field]


def _dict(found: Any) -> Json:
    return found if isinstance(found, dict) else {}


def _rows(found: Json, field: str) -> list[Json]:
    rows = found.get(field)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _before(at: Any, began: float) -> bool:
    """Whether a time, in seconds or as ISO 8601, is clearly before another; False where it cannot be read."""
    if isinstance(at, str):
        try:
            at = datetime.fromisoformat(at).timestamp()
        except ValueError:
            return False
    return isinstance(at, (int, float)) and at < began - CLOCKS_S
