"""Query rewriting by a vision-language model, before retrieval.

Two baselines are MM-BRIGHT's (section 5): a **caption** of the query's pictures is appended to the query's text, and a
**reformulation** that makes the query explicit replaces that text, since the paper compares original against reformulated queries.
Both serve any embedder or BM25; with ``query_modality=text`` they let a text model use pictures. The paper has a template for
reformulations (Figure 14). And PinPoint's proxy generation (arXiv:2603.04598), its strongest method without reranking: the model
**describes** what the target shows, and that text alone is searched. The prompts here are ours, and are recorded in results.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.scoring.results import Rewritten
from eval.sets.retrieval_set import RetrievalSet
from rge.calls.caller import Caller, Outcome
from rge.calls.failures import Rejection
from rge.calls.model_config import ModelConfig, check_model
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore, value_key
from rge.calls.wire.bodies import served_model
from rge.calls.wire.replies import Refused, Reply, ReplyError, Truncated
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.options import one_of
from rge.common.parts import Content, TextPart, content_of, with_text
from rge.common.schema import Item
from rge.vectors.contents import content_digest, picture_digests

PROMPTS = {
    "caption": (
        "You describe pictures for people who cannot see them.",
        "Describe what can be seen, with every label, number and relation that a search for an answer might need. "
        "Give the description only.",
    ),
    "reformulate": (
        "You turn questions with pictures into search queries.",
        "Rewrite the question above so that a search finds the documents that answer it. Name the need behind it, what "
        "the pictures show and how that bears on it, the full forms of abbreviations and the technical terms, and what "
        "kind of document would help. Give the rewritten query only.",
    ),
    "describe": (
        "You imagine what a search should find.",
        "The text above says what is wanted with regard to the pictures. Describe what the target, the thing to be found, "
        "shows or says: what stays as in the pictures, with what the text changes or adds. Do not mention the pictures, or "
        "what must be absent. Write one sentence in the form of a caption, and give it only.",
    ),
}
"""Kind -> (system prompt, request after question and pictures)."""
REPLACING = ("reformulate", "describe")
"""Kinds whose answer replaces the query's text; other answers are appended."""
ALONE = "describe"
"""The kind whose answer replaces the pictures too."""
MAX_TOKENS = 512
FORMAT = 2
"""Version of the stored texts; the first held answers that were cut off."""
CONCURRENCY = 8


def known_and_open(
    answers: AnswerStore, keys: Sequence[str | None], items: Sequence[Item]
) -> tuple[dict[str, Any], dict[str, Item]]:
    """Stored answers by key, and the items of keys without one; keys of None are skipped."""
    item_of = {key: item for key, item in zip(keys, items, strict=True) if key is not None}
    known = answers.get_values(list(item_of))
    return known, {key: item for key, item in item_of.items() if key not in known}


class Rewriter:
    """A vision-language model behind an OpenAI-compatible endpoint that rewrites queries.

    ``kind``: key of `PROMPTS`. ``key_env``: environment variable with the API key; None: no key. ``answers``: stores the texts.

    Attributes:
        served: see `rge.calls.wire.bodies.served_model`; part of the cache keys.

    Raises:
        UserError: the address is none, the variable is not set, or the endpoint cannot be reached.
    """

    def __init__(self, kind: str, url: str, model: str, key_env: str | None, answers: AnswerStore):
        self.kind, self.model, self.answers = kind, model, answers
        config = ModelConfig(
            name=model, base_url=url, key_env=key_env, concurrency=CONCURRENCY, send_seed=False
        )
        check_model("rewriter", config)
        self.served = served_model(config)
        self._shown = f"{model} at {url}"
        self._caller = Caller({model: config}, AnswerStore(None))  # only texts are stored, in `answers`

    def about(self) -> Rewritten:
        """Description for results.json."""
        return Rewritten(**self._asked(), replaces=self.kind in REPLACING)

    def _asked(self) -> dict[str, Any]:
        """What the answers depend on."""
        system, request = PROMPTS[self.kind]
        return {"kind": self.kind, "model": self.model, "system": system, "request": request} | self.served

    def texts(self, queries: Sequence[Item]) -> list[str | None]:
        """The model's text for each query; None if not requested, "" if the model refused or never came to an end.

        Texts and refusals are cached.

        Raises:
            UserError: calls are unanswered (reported after all others were made), or no query got a text.
        """
        keys = [
            value_key("rewrite", FORMAT, MAX_TOKENS, self._asked(), content_digest(query))
            if query.pictures or self.kind != "caption"
            else None
            for query in queries
        ]
        known, todo = known_and_open(self.answers, keys, queries)
        open_keys, refused, unanswered = list(todo), list[str](), list[Outcome]()
        with progress_bar(total=len(todo), desc=self.kind, disable=not todo) as bar:

            def take(place: int, outcome: Outcome) -> None:
                bar.update()
                if outcome.unanswered:
                    unanswered.append(outcome)
                    return
                key = open_keys[place]
                try:
                    known[key] = _whole(outcome.answer())
                except ReplyError as error:
                    known[key] = ""
                    if isinstance(error, Refused | Rejection):
                        refused.append(key)
                else:
                    self.answers.put_values({key: known[key]})

            self._caller.run(list(map(self._request, todo.values())), take, read=_whole)
        if unanswered:
            raise UserError(
                f"{len(unanswered)} of {len(todo)} calls are unanswered, such as: {unanswered[0].error}; the other answers are "
                "stored, run the same command again to continue",
                key=self._shown,
                kind="unanswered",
            )
        if todo and not any(known.values()):
            raise UserError(
                f"it wrote nothing for any of {sum(key is not None for key in keys)} queries",
                key=self._shown,
                kind="empty",
            )
        self.answers.put_values(dict.fromkeys(refused, ""))
        return [None if key is None else known[key] for key in keys]

    def _request(self, query: Item) -> Request:
        system, request = PROMPTS[self.kind]
        # A caption must not repeat or answer the question, so the model sees only the pictures.
        text = [query.text] if query.text and self.kind != "caption" else []
        if query.instruction and self.kind == ALONE:  # it may say what to find
            text.insert(0, query.instruction)
        pictures = map(Picture, query.pictures, picture_digests(query))
        return Request(self.model, (*text, *pictures, request), system, max_tokens=MAX_TOKENS)


def _whole(reply: Reply) -> str:
    """The text of an answer. Raises `ReplyError`: it declines or is cut off, and no tag would tell."""
    if reply.stop == "refusal":
        raise Refused(reply.text[:100] or "declined without a reason")
    if reply.stop == "length":
        raise Truncated(f"the answer is cut off after {reply.text[-80:]!r}")
    return reply.text.strip()


@dataclass(kw_only=True)
class RewriteOptions:
    """Options of commands that rewrite queries."""

    rewrite: str | None = None
    """A vision-language model first appends a caption to each query (caption), replaces its text (reformulate), or replaces
    text and pictures by a description of the target (describe), see docs/evaluation.md."""
    rewriter: str | None = None
    """Address of that model's OpenAI-compatible endpoint."""
    rewriter_model: str | None = None
    """Name of the model at that address."""
    rewriter_key_env: str | None = None
    """Environment variable with the key; null: no key."""

    def load_rewriter(self, cache: Path) -> Rewriter | None:
        """Load the rewriter; None if ``rewrite`` is not set."""
        kind, url, model = self.rewrite, self.rewriter, self.rewriter_model
        if kind is url is model is None:
            return None
        if kind is None or url is None or model is None:
            raise UserError(
                f"rewrite={' or '.join(PROMPTS)} needs rewriter=ADDRESS of an OpenAI-compatible endpoint and "
                "rewriter_model=NAME, and these need rewrite="
            ).about("rewrite", "rewriter", "rewriter_model")
        one_of("rewrite", [kind], tuple(PROMPTS))
        return Rewriter(kind, url, model, self.rewriter_key_env, AnswerStore(cache / "rewrites.sqlite"))


def rewritten(wanted: RetrievalSet, rewriter: Rewriter) -> RetrievalSet:
    """The set with rewritten queries; queries without pictures get no caption.

    Queries without a whole text are unchanged; a note of the set counts them.
    """
    written = rewriter.texts(wanted.queries)
    replaces = rewriter.kind in REPLACING

    def shown(query: Item, text: str) -> Content:
        if rewriter.kind == ALONE:
            return content_of(text if replaces else "\n".join(filter(None, (query.text, text))))
        return with_text(query.content, text) if replaces else (*query.content, TextPart(text))

    queries = [
        replace(query, content=shown(query, text)) if text else query
        for query, text in zip(wanted.queries, written, strict=True)
    ]
    meta = wanted.meta
    if empty := sum(text == "" for text in written):
        note = f"rewrite={rewriter.kind} left {empty} of {len(queries)} queries as they were (refused, rejected or cut off)"
        meta = {**meta, "notes": [*meta.get("notes", []), note]}
    return replace(wanted, queries=queries, meta=meta)
