"""The batch modes of OpenAI, Anthropic and Gemini: requests sent up together, answered within a day, at half the price.

Sources: developers.openai.com (Batch API), platform.claude.com (Message Batches), ai.google.dev (Batch API), autumn 2026. What
they share: requests with ids of ours, a state to be asked for, and lines of results in any order, in which some may have failed.
None of them lets a submission be repeated safely ("creation of a batch job is not idempotent"), so each has a way to find out
whether one whose answer was lost was accepted: OpenAI by the file it was made of, Gemini by the display name. Anthropic's
batches carry no name, only those of their requests, which are seen when they have ended.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx

from rge.calls.failures import EndpointDown, Lost
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig
from rge.calls.providers.bodies import ADDRESSES, headers
from rge.calls.providers.transport import encoded, fetch

MOST_CALLS, MOST_BYTES = 50_000, 100_000_000
"""Of one batch: what all three take (OpenAI 50,000 and 200 MB, Anthropic 100,000 and 256 MB, Gemini 2 GB)."""
SEND_S = 900.0
"""For sending a batch up, or its results down: more bytes than a call has."""
CLOCKS_S = 300.0
"""By which a provider's clock may be behind ours."""


@dataclass(frozen=True, slots=True)
class State:
    """How far a batch is.

    Attributes:
        word: the provider's own, such as ``in_progress``.
        ended: nothing more will come.
        queue_full: it was turned away because too much is waiting already.
        reason: why it failed as a whole; None: it did not.
        raw: what the provider said, for `Provider.results`.
    """

    word: str
    ended: bool
    raw: dict[str, Any]
    queue_full: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One result.

    Attributes:
        id: of the call, as it was sent.
        body: the answer, as a call would have brought it; None: there is none.
        status: of HTTP, where the call failed and the provider says one.
        error: the body of that failure, or why there is no answer.
    """

    id: str
    body: bytes | None
    status: int | None = None
    error: bytes = b""


class Provider(ABC):
    """The batches of one endpoint.

    Args:
        model: the endpoint.
        client: connected to it.
        mask: takes keys out of messages.
    """

    def __init__(self, model: ModelConfig, client: httpx.AsyncClient, mask: Mask):
        self.model, self.client, self.mask = model, client, mask

    @abstractmethod
    def line(self, id: str, body: bytes) -> bytes:
        """A call as it stands in what is sent up; `id` of letters, digits and hyphens."""

    @abstractmethod
    async def send_file(self, label: str, lines: Sequence[bytes]) -> str | None:
        """Send requests up, where that is a step of its own; costs nothing. Returns the provider's name of them."""

    @abstractmethod
    async def create(self, label: str, file: str | None, lines: Sequence[bytes]) -> str:
        """Begin the batch, and return the provider's name of it. The one step that must not be done twice."""

    @abstractmethod
    async def find(
        self, label: str, file: str | None, num_calls: int, began: float, known: set[str]
    ) -> list[str]:
        """Batches that may be the one whose creation got no answer.

        Args:
            label: ours.
            file: of `send_file`.
            num_calls: that it has.
            began: not before, in seconds since 1970.
            known: batches that are others.
        """

    @abstractmethod
    async def state(self, id: str) -> State:
        """How far it is."""

    @abstractmethod
    def results(self, id: str, state: State) -> AsyncIterator[Line]:
        """The lines of one that has ended; lines that cannot be read are left out."""

    async def _json(self, method: str, url: str, **how: Any) -> dict[str, Any]:
        response = await fetch(self.client, method, url, self.model, self.mask, **how)
        try:
            found = response.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Lost(
                f"no JSON object at {url}: {self.mask(response.text[:100])!r}",
                billed=True,
                raw=response.content,
            )
        return found

    async def _lines(self, url: str) -> AsyncIterator[dict[str, Any]]:
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

    _DONE = ("completed", "failed", "expired", "cancelled")

    def line(self, id: str, body: bytes) -> bytes:
        """See `Provider.line`."""
        head = f'{{"custom_id": "{id}", "method": "POST", "url": "/v1/chat/completions", "body": '
        return head.encode() + body + b"}"

    async def send_file(self, label: str, lines: Sequence[bytes]) -> str:
        """See `Provider.send_file`."""
        files = {"file": (f"{label}.jsonl", b"\n".join(lines) + b"\n", "application/jsonl")}
        found = await self._json("POST", "/files", files=files, data={"purpose": "batch"}, timeout=SEND_S)
        return _name(found, "id")

    async def create(self, label: str, file: str | None, lines: Sequence[bytes]) -> str:
        """See `Provider.create`."""
        body = {
            "input_file_id": file,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"label": label},
        }
        return _name(await self._json("POST", "/batches", content=encoded(body)), "id")

    async def find(
        self, label: str, file: str | None, num_calls: int, began: float, known: set[str]
    ) -> list[str]:
        """See `Provider.find`."""
        if file is None:
            return []
        params: dict[str, Any] = {"limit": 100}
        while True:
            page = await self._json("GET", "/batches", params=params)
            rows = _rows(page, "data")
            if found := [row["id"] for row in rows if row.get("input_file_id") == file and "id" in row]:
                return found
            if not (page.get("has_more") and rows) or _before(rows[-1].get("created_at"), began):
                return []
            params["after"] = rows[-1].get("id")

    async def state(self, id: str) -> State:
        """See `Provider.state`."""
        raw = await self._json("GET", f"/batches/{id}")
        word = str(raw.get("status"))
        listed = raw.get("errors")
        errors = _rows(listed, "data") if isinstance(listed, dict) else []
        said = "; ".join(str(one.get("message")) for one in errors[:3])
        full = any(one.get("code") == "token_limit_exceeded" for one in errors)
        return State(
            word,
            word in self._DONE,
            raw,
            word == "failed" and full,
            (said or "no reason given") if word == "failed" else None,
        )

    async def results(self, id: str, state: State) -> AsyncIterator[Line]:
        """See `Provider.results`."""
        for file in (state.raw.get("output_file_id"), state.raw.get("error_file_id")):
            if not file:
                continue
            async for found in self._lines(f"/files/{file}/content"):
                response = found.get("response")
                response = response if isinstance(response, dict) else {}
                status, body = response.get("status_code"), response.get("body")
                if status == 200 and isinstance(body, dict):
                    yield Line(str(found.get("custom_id")), encoded(body))
                else:
                    error = body if body else found.get("error")
                    yield Line(str(found.get("custom_id")), None, status, encoded(error))


class Anthropic(Provider):
    """Requests and batch in one step, and one stream of results."""

    _MAYBE = {"rate_limit_error": 429, "api_error": 500, "overloaded_error": 529}

    def line(self, id: str, body: bytes) -> bytes:
        """See `Provider.line`."""
        return f'{{"custom_id": "{id}", "params": '.encode() + body + b"}"

    async def send_file(self, label: str, lines: Sequence[bytes]) -> None:
        """There is none."""
        return

    async def create(self, label: str, file: str | None, lines: Sequence[bytes]) -> str:
        """See `Provider.create`."""
        body = b'{"requests": [' + b",".join(lines) + b"]}"
        return _name(await self._json("POST", "/v1/messages/batches", content=body, timeout=SEND_S), "id")

    async def find(
        self, label: str, file: str | None, num_calls: int, began: float, known: set[str]
    ) -> list[str]:
        """See `Provider.find`."""
        params: dict[str, Any] = {"limit": 100}
        found: list[str] = []
        while True:
            page = await self._json("GET", "/v1/messages/batches", params=params)
            rows = _rows(page, "data")
            for row in rows:
                counts = row.get("request_counts")
                total = sum(counts.values()) if isinstance(counts, dict) else 0
                if (
                    total == num_calls
                    and row.get("id") not in known
                    and not _before(row.get("created_at"), began)
                ):
                    found.append(str(row.get("id")))
            if not (page.get("has_more") and rows) or _before(rows[-1].get("created_at"), began):
                break
            params["after_id"] = rows[-1].get("id")
        return found

    async def state(self, id: str) -> State:
        """See `Provider.state`."""
        raw = await self._json("GET", f"/v1/messages/batches/{id}")
        word = str(raw.get("processing_status"))
        return State(word, word == "ended", raw)

    async def results(self, id: str, state: State) -> AsyncIterator[Line]:
        """See `Provider.results`."""
        # Not at the address that it names: a key goes to nobody but the endpoint that was configured.
        async for found in self._lines(f"/v1/messages/batches/{id}/results"):
            result = found.get("result")
            result = result if isinstance(result, dict) else {}
            name, kind = str(found.get("custom_id")), result.get("type")
            if kind == "succeeded" and isinstance(result.get("message"), dict):
                yield Line(name, encoded(result["message"]))
            elif kind == "errored":
                error = result.get("error")
                inner = error.get("error") if isinstance(error, dict) else None
                said = inner.get("type") if isinstance(inner, dict) else None
                yield Line(name, None, self._MAYBE.get(str(said), 400), encoded(error))
            else:
                yield Line(name, None, None, encoded(kind))


class Gemini(Provider):
    """A file of requests by the Files API, a long-running operation, and a file of answers."""

    _DONE = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")

    def line(self, id: str, body: bytes) -> bytes:
        """See `Provider.line`."""
        return f'{{"key": "{id}", "request": '.encode() + body + b"}"

    async def send_file(self, label: str, lines: Sequence[bytes]) -> str:
        """See `Provider.send_file`."""
        data = b"\n".join(lines) + b"\n"
        begun = await fetch(
            self.client,
            "POST",
            "/upload/v1beta/files",
            self.model,
            self.mask,
            content=encoded({"file": {"display_name": label}}),
            headers={
                "x-goog-upload-protocol": "resumable",
                "x-goog-upload-command": "start",
                "x-goog-upload-header-content-length": str(len(data)),
                "x-goog-upload-header-content-type": "application/jsonl",
            },
        )
        url = begun.headers.get("x-goog-upload-url")
        if not url or httpx.URL(url).host != self.client.base_url.host:
            raise EndpointDown(
                f"{self.model.name}: requests are to be sent to another host, {self.mask(str(url))}"
            )
        found = await self._json(
            "POST",
            url,
            content=data,
            headers={
                "content-type": "application/jsonl",
                "x-goog-upload-offset": "0",
                "x-goog-upload-command": "upload, finalize",
            },
            timeout=SEND_S,
        )
        file = found.get("file")
        return _name(file if isinstance(file, dict) else {}, "name")

    async def create(self, label: str, file: str | None, lines: Sequence[bytes]) -> str:
        """See `Provider.create`."""
        body = {"batch": {"display_name": label, "input_config": {"file_name": file}}}
        url = f"/v1beta/models/{quote(self.model.name, safe='')}:batchGenerateContent"
        return _name(await self._json("POST", url, content=encoded(body)), "name")

    async def find(
        self, label: str, file: str | None, num_calls: int, began: float, known: set[str]
    ) -> list[str]:
        """See `Provider.find`."""
        params: dict[str, Any] = {"pageSize": 100}
        while True:
            page = await self._json("GET", "/v1beta/batches", params=params)
            for row in _rows(page, "operations"):
                about = row.get("metadata")
                if isinstance(about, dict) and about.get("displayName") == label and "name" in row:
                    return [row["name"]]
            if not page.get("nextPageToken"):
                return []
            params["pageToken"] = page["nextPageToken"]

    async def state(self, id: str) -> State:
        """See `Provider.state`."""
        raw = await self._json("GET", f"/v1beta/{id}")
        about = raw.get("metadata")
        # JOB_STATE_ in the guide, BATCH_STATE_ in the reference.
        word = str(about.get("state") if isinstance(about, dict) else None).rpartition("STATE_")[2]
        error = raw.get("error")
        reason = None
        if word == "FAILED":
            reason = str(error.get("message")) if isinstance(error, dict) else "no reason given"
        return State(word, word in self._DONE or raw.get("done") is True, raw, reason=reason)

    async def results(self, id: str, state: State) -> AsyncIterator[Line]:
        """See `Provider.results`."""
        response = state.raw.get("response")
        response = response if isinstance(response, dict) else {}
        file = response.get("responsesFile")
        if not file:
            return
        async for found in self._lines(f"/download/v1beta/{file}:download?alt=media"):
            name, body, error = str(found.get("key")), found.get("response"), found.get("error")
            if isinstance(body, dict):
                yield Line(name, encoded(body))
            else:
                code = error.get("code") if isinstance(error, dict) else None
                # Codes of google.rpc: 8 quota, 13 and 14 faults of theirs, 3 a request that cannot be taken.
                status = {3: 400, 8: 429, 13: 500, 14: 503}.get(code, code) if isinstance(code, int) else None
                yield Line(name, None, status, encoded({"error": error}))


PROVIDERS: dict[str, type[Provider]] = {"openai": OpenAI, "anthropic": Anthropic, "gemini": Gemini}


class Connected:
    """The batches of an endpoint, as an asynchronous context manager.

    Args:
        model: the endpoint.
        mask: takes keys out of messages.
    """

    def __init__(self, model: ModelConfig, mask: Mask):
        self.model, self.mask = model, mask

    async def __aenter__(self) -> Provider:
        model = self.model
        key = read_key(model.name, model.key_env) if model.key_env else None
        self._client = httpx.AsyncClient(
            base_url=model.base_url or ADDRESSES[model.api],
            headers=headers(model.api, key),
            timeout=model.timeout_s,
            # Files may lie elsewhere. Of all keys httpx keeps only OpenAI's from another host.
            follow_redirects=model.api == "openai",
        )
        return PROVIDERS[model.api](model, self._client, self.mask)

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()


def _name(found: dict[str, Any], field: str) -> str:
    if not isinstance(found.get(field), str):
        raise Lost(f"an answer without {field}: {str(found)[:200]}", billed=True)
    return found[field]


def _rows(found: dict[str, Any], field: str) -> list[dict[str, Any]]:
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
