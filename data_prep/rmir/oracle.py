"""The demo's oracle: an OpenAI-compatible server that answers from the hand-written relation tables.

It replaces a multimodal model, so that the whole pipeline runs on any machine over real HTTP, with plain calls or batches. It
recognises pictures by their bytes, and makes deliberate errors at configured rates.
"""

import base64
import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_prep.demo.tables import HERE, Concept, Fact, read_tables
from data_prep.rationales.prompts import TASK as EXPLAIN_TASK
from data_prep.rmir import prompts
from data_prep.rmir.config import CATEGORIES
from data_prep.rmir.wording import wording
from rge.calls.local_server import Answer, chat

LIBRARY = HERE / "data" / "train" / "pictures.parquet"
WITHOUT_CAPTION = 7
"""Every seventh picture of the demo library has no caption, since real libraries have gaps too."""


def write_library(path: Path) -> None:
    """List the shipped training pictures with captions from the concept table, as a library for the pipeline."""
    concepts = read_tables().concepts
    table = pq.read_table(LIBRARY, columns=["id", "concept"]).to_pandas()
    table["image"] = f"{LIBRARY}#" + table["id"]
    table["caption"] = [concepts[key].name for key in table["concept"]]
    table.loc[::WITHOUT_CAPTION, "caption"] = ""
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, columns=["id", "image", "caption"], index=False)


@dataclass
class Oracle:
    """Answers requests; a pure function of the request except for transient errors on first attempts."""

    bad_queries: float = 0.4  # share of queries that break a constraint; the filter should find them
    malformed: float = 0.005  # share of unreadable answers
    transient: float = 0.02  # share of first attempts that get 429, 503, a web page or no content
    filter_errors: float = 0.05  # share of wrong verdicts by the filter
    judge_errors: float = 0.005  # share of wrong verdicts by a judge

    def __post_init__(self) -> None:
        self.tables = read_tables()
        table = pq.read_table(LIBRARY, columns=["image", "concept"])
        self.shown = {
            hashlib.sha256(image["bytes"]).hexdigest(): concept
            for image, concept in zip(table["image"].to_pylist(), table["concept"].to_pylist(), strict=True)
        }
        self.facts: dict[str, list[Fact]] = {}
        for fact in self.tables.facts:
            self.facts.setdefault(fact.source, []).append(fact)
        # All phrasings (at most nine per question), to map a query text back to its question.
        self.phrasings: dict[str, set[str]] = {}
        for name, question in self.tables.questions.items():
            for number in range(9):
                self.phrasings.setdefault(question.shown(number), set()).add(name)
        self._seen: set[str] = set()
        self._tasks = {
            prompts.CAPTION_TASK: self._caption,
            prompts.GENERATE_TASK: self._generate,
            prompts.FILTER_TASK: self._filter,
            prompts.JUDGE_TASK: self._judge,
            EXPLAIN_TASK: self._explain,
        }

    async def __call__(self, path: str, body: dict[str, Any]) -> Answer:
        """Answer a chat request; ``n`` samples are drawn with consecutive seeds."""
        num = body.get("n", 1)
        if num == 1:
            return self._answer(body)
        one = {key: value for key, value in body.items() if key != "n"}
        draws = [self._answer({**one, "seed": body.get("seed", 0) + number}) for number in range(num)]
        for answer in draws:
            if answer.status != 200 or not isinstance(answer.body, dict):
                return answer
        choices = [choice for one in draws for choice in one.body["choices"][:1] or [{"message": {}}]]
        written = sum(answer.body["usage"]["completion_tokens"] for answer in draws)
        usage = {**draws[0].body["usage"], "completion_tokens": written}
        return Answer({**draws[0].body, "choices": choices, "usage": usage})

    def _answer(self, body: dict[str, Any]) -> Answer:
        digest = hashlib.sha256(json.dumps([0, body], sort_keys=True).encode()).hexdigest()
        rng = random.Random(digest)
        if rng.random() < self.transient and digest not in self._seen:
            self._seen.add(digest)
            return rng.choice(
                [
                    Answer({"error": {"message": "too many requests"}}, 429, headers={"retry-after": "0.05"}),
                    Answer({"error": {"message": "overloaded"}}, 503),
                    Answer("<html><body>502 Bad Gateway</body></html>", content_type="text/html"),
                    chat(""),
                ]
            )
        texts, concepts = self._read(body)
        answer = next((work for task, work in self._tasks.items() if texts.startswith(task)), None)
        known = [concept for concept in concepts if concept is not None]
        if answer is None or len(known) < len(concepts):
            return Answer({"error": {"message": "the oracle does not know this task or this picture"}}, 400)
        text = answer(rng, texts, known)
        tokens = len(texts) // 4 + 80 * len(concepts)
        reply = partial(chat, input_tokens=tokens, output_tokens=len(text) // 4)
        return _malformed(rng, text, reply) if rng.random() < self.malformed else reply(text)

    def _read(self, body: dict[str, Any]) -> tuple[str, list[str | None]]:
        texts, concepts = [], []
        for part in body["messages"][-1]["content"]:
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                data = base64.b64decode(part["image_url"]["url"].partition("base64,")[2])
                concepts.append(self.shown.get(hashlib.sha256(data).hexdigest()))
        return "\n".join(texts), concepts

    def _caption(self, rng: random.Random, texts: str, concepts: list[str]) -> str:
        return f"<caption>{self.tables.concepts[concepts[0]].sentence}.</caption>"

    def _generate(self, rng: random.Random, texts: str, concepts: list[str]) -> str:
        concept = self.tables.concepts[concepts[0]]
        blocks = [f"<input_desc>{concept.sentence}.</input_desc>"]
        wanted = texts.rpartition("one block for each of")[2].partition("\n")[0]
        codes = {category: wording().codes[category] for category in CATEGORIES}
        for category, code in codes.items():
            if code in wanted:
                query, target, reasoning = self._question(rng, concept, category)
                blocks.append(
                    f"<Example_{code}_1>\n<query>{query}</query>\n<target_desc>{target}</target_desc>\n"
                    f"<reasoning>{reasoning}</reasoning>\n</Example_{code}_1>"
                )
        return "\n".join(blocks)

    def _question(self, rng: random.Random, concept: Concept, category: str) -> tuple[str, str, str]:
        """Query, target description and reasoning."""
        questions, known = self.tables.questions, self.facts.get(concept.key, ())
        facts = [fact for fact in known if questions[fact.question].category == category]
        if not facts:
            return "ABSTAIN", "ABSTAIN", "ABSTAIN"
        fact = rng.choice(facts)
        question = questions[fact.question]
        answer = rng.choice(list(fact.answers))
        query, reasoning = question.shown(rng.randrange(9)), fact.answers[answer]
        if rng.random() < self.bad_queries:
            # One that needs no picture, or one whose target does not answer it.
            if rng.random() < 0.5:
                query = question.named(rng.randrange(9), concept)
            else:
                answer = rng.choice([key for key in self.tables.concepts if key not in fact.answers])
        return query, f"{self.tables.concepts[answer].name.capitalize()}.", reasoning

    def _filter(self, rng: random.Random, texts: str, concepts: list[str]) -> str:
        target = _last(texts, "target_desc").rstrip(".").lower()
        valid = any(
            target == self.tables.concepts[answer].name.lower()
            for fact in self._asked(_last(texts, "query"), concepts[0])
            for answer in fact.answers
        )
        if rng.random() < self.filter_errors:
            valid = not valid
        concept = self.tables.concepts[concepts[0]]
        return (
            f"<input_desc>{concept.sentence}.</input_desc>\n<reasoning>By the tables.</reasoning>\n"
            f"<is_valid>{'yes' if valid else 'no'}</is_valid>"
        )

    def _judge(self, rng: random.Random, texts: str, concepts: list[str]) -> str:
        given, target = concepts
        facts = self._asked(_last(texts, "query"), given)
        verdict = str(any(target in fact.answers for fact in facts)) if facts else "ABSTAIN"
        if verdict != "ABSTAIN" and rng.random() < self.judge_errors:
            verdict = "False" if verdict == "True" else "True"
        shown = [self.tables.concepts[key].sentence for key in (target, given)]
        return (
            f"<target_desc>{shown[0]}.</target_desc>\n<input_desc>{shown[1]}.</input_desc>\n"
            f"<reasoning>By the tables.</reasoning>\n<consistent>{verdict}</consistent>"
        )

    def _explain(self, rng: random.Random, texts: str, concepts: list[str]) -> str:
        given, target = concepts[0], concepts[-1]
        for fact in self._asked(_last(texts, "query"), given):
            if target in fact.answers:
                return f"<rationale>{fact.answers[target]}</rationale>"
        return f"<rationale>{self.tables.concepts[given].sentence}.</rationale>"

    def _asked(self, query: str, concept: str) -> list[Fact]:
        meant = self.phrasings.get(query, set())
        return [fact for fact in self.facts.get(concept, ()) if fact.question in meant]


def _malformed(rng: random.Random, text: str, reply: Callable[..., Answer]) -> Answer:
    empty_tag = reply("<consistent></consistent>")
    truncated = reply(text[: len(text) // 2], stop="length")
    no_tag = reply("Yes, I think that is fine.")
    refusal = reply("I'm sorry, I can't help with this picture.")
    sensitive = reply("ABSTAIN DUE TO SENSITIVE IMAGE")
    return rng.choice([truncated, no_tag, refusal, empty_tag, sensitive])


def _last(text: str, name: str) -> str:
    found = re.findall(rf"<{name}>(.*?)</{name}>", text, flags=re.DOTALL)
    return found[-1] if found else ""
