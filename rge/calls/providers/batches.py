"""OpenAI's batch API, which compatible servers offer too: answered within a day, at half the price.

Creating a batch is not idempotent, so one whose creation got no answer is looked for in the provider's list by its file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rge.calls.failures import Lost, Rejected
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig
from rge.calls.providers.transport import connected, encoded, exchange, failure
from rge.calls.replies import as_dict, dicts
from rge.calls.store import BatchRow

Json = dict[str, Any]
MOST_CALLS, MOST_BYTES = 50_000, 100_000_000
"""Of one batch; OpenAI takes 50,000 calls and 200 MB."""
SEND_S = 900.0
"""For uploading a batch or downloading its results: more bytes than a call has."""
CLOCKS_S = 300.0
"""By which a provider's clock may be behind ours."""
URL = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class State:
    """How far a batch is."""

    word: str  # the provider's own, such as ``in_progress``
    files: tuple[str, ...]  # of answers and of errors
    queue_full: bool = False  # it was turned away because too much is waiting already
    reason: str | None = None  # why it failed as a whole; None: it did not

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self.reason is not None or self.word == "completed" or self.partial

    @property
    def partial(self) -> bool:
        """It ended early: calls without a result were not made, and are not billed."""
        return self.word in ("expired", "cancelled")


@dataclass(frozen=True, slots=True)
class Line:
    """One result."""

    id: str  # of the call, as it was sent
    body: bytes | None  # the answer, as a call would have brought it; None: there is none
    status: int | None = None  # of HTTP, where the call failed and the provider says one
    error: bytes = b""  # the body of that failure, or why there is no answer


class BatchApi:
    """The batches of one endpoint, as an asynchronous context manager that is connected to it."""

    def __init__(self, model: ModelConfig, mask: Mask):
        self.model, self.mask = model, mask

    async def __aenter__(self) -> "BatchApi":
        # Files may be on another host, to which httpx does not pass the key on.
        self.client = connected(self.model, timeout=self.model.timeout_s, follow_redirects=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def send_file(self, label: str, bodies: Sequence[bytes]) -> str:
        """Upload requests, which costs nothing. Returns the provider's id of the file."""
        lines = b"".join(
            b'{"custom_id": "%s-%d", "method": "POST", "url": "%s", "body": %s}\n'
            % (label.encode(), number, URL.encode(), body)
            for number, body in enumerate(bodies)
        )
        files = {"file": (f"{label}.jsonl", lines, "application/jsonl")}
        return _id(await self._json("POST", "/files", files=files, data={"purpose": "batch"}, timeout=SEND_S))

    async def create(self, label: str, file: str) -> str:
        """Create the batch, and return the provider's id of it. The one step that must not be done twice."""
        how = {"endpoint": URL, "completion_window": "24h", "metadata": {"label": label}}
        return _id(await self._json("POST", "/batches", content=encoded({"input_file_id": file, **how})))

    async def find(self, row: BatchRow) -> str | None:
        """The batch of a file, whose creation got no answer."""
        params: Json = {"limit": 100}
        while row.file is not None:
            page = await self._json("GET", "/batches", params=params)
            rows = dicts(page.get("data"))
            for found in rows:
                if found.get("input_file_id") == row.file and isinstance(found.get("id"), str):
                    return found["id"]
                at = found.get("created_at")  # newest first
                if isinstance(at, (int, float)) and at < row.began - CLOCKS_S:
                    return None
            if not rows or not page.get("has_more"):
                return None
            params["after"] = rows[-1].get("id")
        return None

    async def state(self, id: str) -> State:
        """How far a batch is."""
        raw = await self._json("GET", f"/batches/{id}")
        word = str(raw.get("status"))
        files = tuple(str(raw[name]) for name in ("output_file_id", "error_file_id") if raw.get(name))
        if word != "failed":
            return State(word, files)
        errors = dicts(as_dict(raw.get("errors")).get("data"))
        said = "; ".join(str(one.get("message")) for one in errors[:3]) or "no reason given"
        return State(word, files, any(one.get("code") == "token_limit_exceeded" for one in errors), said)

    async def results(self, state: State) -> list[Line]:
        """The lines of a batch that has ended; what is cut short or cannot be read is left out."""
        found = []
        for file in state.files:
            response = await self._fetch("GET", f"/files/{file}/content", timeout=SEND_S)
            for line in response.content.split(b"\n"):
                try:
                    found.append(_line(as_dict(json.loads(line))))
                except ValueError:
                    continue
        return found

    async def _fetch(self, method: str, url: str, **how: Any) -> httpx.Response:
        """One exchange.

        Raises:
            Lost: no connection, 429, 5xx.
            Rejected: this request as it stands, also by policy.
            StopCalls: no request can succeed.
        """
        response = await exchange(self.client, method, url, self.mask, **how)
        if response.is_success:
            return response
        raw, given = response.content, response.headers
        error = failure(response.status_code, raw, given, self.model, self.mask)
        raise error or Rejected(raw.decode("utf-8", "replace"), certain=True, raw=raw)

    async def _json(self, method: str, url: str, **how: Any) -> Json:
        response = await self._fetch(method, url, **how)
        try:
            found = response.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            said = f"no JSON object at {url}: {self.mask(response.text[:100])!r}"
            raise Lost(said, billed=True, raw=response.content)
        return found


def _line(found: Json) -> Line:
    response, id = as_dict(found.get("response")), str(found.get("custom_id"))
    status, body = response.get("status_code"), response.get("body")
    if status == 200 and isinstance(body, dict):
        return Line(id, encoded(body))
    return Line(id, None, status, encoded(body if body else found.get("error")))


def _id(found: Json) -> str:
    if not isinstance(found.get("id"), str):
        raise Lost(f"an answer without id: {str(found)[:200]}", billed=True)
    return found["id"]
