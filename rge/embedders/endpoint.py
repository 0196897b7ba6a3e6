"""An embeddings endpoint as an embedder: OpenAI's form for texts, vLLM's messages for items with pictures.

Texts go in lists, an item with pictures alone, several at a time. The set's instruction is not sent; `Prompted` words queries
for models that need it. What is recorded is what the server says of its model, since its weights cannot be hashed.
"""

import hashlib
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from torch import Tensor

from rge.calls.failures import AttemptFailed, failure
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig, check_model
from rge.calls.pace import backoff
from rge.calls.request import Picture
from rge.calls.wire.bodies import headers, served_model
from rge.calls.wire.pictures import data_url
from rge.calls.wire.replies import as_dict, dict_items, parse, valid_unicode
from rge.common.errors import UserError
from rge.common.parts import TextPart, content_of, is_short, parts_to_messages, with_pictures
from rge.common.schema import Item, check_finite
from rge.embedders.common import BARE, DirectEncoder, neither
from rge.embedders.registry import Facts
from rge.model.prompts import user_text
from rge.vectors.contents import picture_digests
from rge.web.client import make_client

CONCURRENCY = 8
"""Items with pictures that are sent at once."""
Content = tuple[str, list[dict[str, Any]]]
"""The words, and a chat with pictures as ``data:`` URLs in their order; empty for a text alone."""


class Endpoint(DirectEncoder[Content]):
    """A model behind ``/embeddings``."""

    def __init__(self, config: ModelConfig):
        served = served_model(config)
        told = json.dumps([config.name, served["at"], served["served"]], sort_keys=True)
        facts = Facts(Path(config.name), config.name, None, "", frozenset(), frozenset())
        settings = {"pooling": "the endpoint's", "max_side_px": config.max_side_px, "device": config.address}
        digest = hashlib.sha256(told.encode()).hexdigest()
        super().__init__(facts, "endpoint", BARE, "unknown", settings | served, checkpoint_hash=digest)
        self.config, self.mask = config, Mask([config.key()])
        self.client = make_client(httpx.Client, headers=headers(config), timeout=config.timeout_s)

    def prepare(self, item: Item, side: str) -> tuple[int, Content]:
        """Text and encoded pictures; sorted by the text's length in characters."""
        text = user_text(item, side, self.wording)
        if not text and not item.pictures:
            raise neither(item)
        pictures = zip(item.pictures, picture_digests(item), strict=True)
        urls = [data_url(Picture(ref, digest, self.config.max_side_px)) for ref, digest in pictures]
        if not urls:
            return len(text), (valid_unicode(text), [])
        content = (
            content_of(text or None, urls) if is_short(item.content) else with_pictures(item.content, urls)
        )
        worded = (TextPart(valid_unicode(p.text)) if isinstance(p, TextPart) else p for p in content)
        return len(text), (text, parts_to_messages(tuple(worded), urls=True))

    def embed(self, batch: Sequence[Content]) -> Tensor:
        """Embeddings (B, D); a `UserError` if the endpoint returns something else."""
        texts = [row for row, (_, chat) in enumerate(batch) if not chat]
        bodies: list[tuple[list[int], dict[str, Any]]] = []
        if texts:
            bodies.append((texts, {"input": [batch[row][0] for row in texts], "encoding_format": "float"}))
        bodies += [([row], {"messages": chat}) for row, (_, chat) in enumerate(batch) if chat]
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            answers = list(pool.map(lambda one: self._vectors(one[1], len(one[0])), bodies))
        if len(sizes := {len(vector) for vectors in answers for vector in vectors}) != 1:
            raise UserError(
                f"{self.config.endpoint} returns embeddings of different sizes: {sorted(sizes)} components"
            )
        vector_ND = np.empty((len(batch), sizes.pop()), np.float32)
        for (rows, _), vectors in zip(bodies, answers, strict=True):
            vector_ND[rows] = vectors
        check_finite(vector_ND, self.config.endpoint)
        return torch.from_numpy(vector_ND)

    def _vectors(self, body: dict[str, Any], num: int) -> list[list[float]]:
        """The vectors of one request, in its order."""
        content = self._answer({"model": self.config.name, **body})
        entries = sorted(dict_items(as_dict(content).get("data")), key=lambda entry: entry.get("index", 0))
        vectors = [entry.get("embedding") for entry in entries]
        if len(vectors) != num or (num > 1 and [entry.get("index") for entry in entries] != list(range(num))):
            raise UserError(f"{self.config.endpoint} returns {len(vectors)} embeddings for {num} items")
        numbers = [
            vector
            for vector in vectors
            if isinstance(vector, list) and vector and all(isinstance(one, int | float) for one in vector)
        ]
        if len(numbers) < num:
            raise UserError(
                f"{self.config.endpoint}: {num - len(numbers)} of {num} embeddings are not lists of numbers"
            )
        return numbers

    def _answer(self, body: dict[str, Any]) -> Any:
        """The JSON of an answer, after as many attempts as it takes; a `UserError` for an error that stays."""
        config = self.config
        for number in range(config.max_retries + 1):
            wait_s = None
            try:
                response = self.client.post(f"{config.address}/embeddings", json=body)
            except httpx.HTTPError as error:
                why = self.mask(str(error) or type(error).__name__)
            else:
                content = parse(response.content)
                if response.is_success and as_dict(content).get("data") is not None:
                    return content
                problem = failure(response.status_code, response.content, response.headers, config, self.mask)
                if not isinstance(problem, AttemptFailed):
                    why = "the provider's policy declines the item" if problem is None else str(problem)
                    raise UserError(f"it cannot be used: {why}", config.endpoint, response.status_code)
                why, wait_s = problem.reason, problem.wait_s
            if number < config.max_retries:
                slack_s = random.uniform(0, backoff(number, config.backoff_s, config.max_backoff_s))
                time.sleep(min(max(wait_s or 0, slack_s), config.max_backoff_s))
        raise UserError(
            f"{config.endpoint} gives no embeddings after {config.max_retries + 1} attempts: {why}"
        )


def load_endpoint(model: str, endpoint: str, key_env: str | None) -> Endpoint:
    """The model of that name at an address; a `UserError` if it cannot be reached."""
    config = ModelConfig(name=model, base_url=endpoint, key_env=key_env)
    check_model("endpoint", config)
    return Endpoint(config)
