"""``rge data paraphrase``: reword the questions of records or of a retrieval set.

A model rewords each question as PinPoint does (arXiv:2603.04598, design 1): six wordings, concise or detailed, as a question or as a
request. Records get them as ``query.paraphrases``, of which training draws one a step. A retrieval set gets a query for each wording, with
the same judgements and a column ``paraphrase``, so that every evaluation of it reports the sensitivity to wording. Each text is asked about
once, without pictures; answers are stored, so the command resumes. The prompt is ours.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.rationales.pairs import Source, replies_of, sources_of, written_row
from rge.calls.caller import Caller, Outcome, check_answered
from rge.calls.model_config import ModelConfig, check_model
from rge.calls.prices import confirm, fill_prices
from rge.calls.request import Request
from rge.calls.store import AnswerStore
from rge.calls.wire.replies import BadValue, Reply, ReplyError, check_complete, tag
from rge.common.errors import UserError
from rge.common.files import held, relative, replacing, replacing_folder, write_json
from rge.common.options import AtLeastOne, parse_options
from rge.common.schema import Record
from rge.data.sources import json_line
from rge.identity.set_fingerprint import set_fingerprint

KINDS = (
    "a short question", "a short request", "a detailed question", "a detailed request", "another short question",
    "another detailed request",
)  # fmt: skip
"""Of the wordings, in their order; PinPoint's six vary in length and register."""
PROMPT = """Task: reword a search

People ask a search engine the same thing in different words. Reword the text below in {count} ways: {kinds}. A request
begins with a verb ("Show me ..."). Use everyday words that are not in the text where you can. Each wording must ask for exactly the same:
keep every name, number, negation and condition, add none, and do not answer. Words like "this" mean a picture that is searched with; keep
referring to it so.
{context}
Answer in exactly this format: {form}

<text>{text}</text>"""
MAX_WORDS_MORE = 40
"""Words that a wording may be longer than the text."""
QUERIES = "queries.parquet"
PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
COLUMN = "paraphrase"
"""Column of a set's queries that says which question a query words."""


@dataclass(frozen=True, kw_only=True)
class ParaphraseOptions:
    """Have a model reword the questions of training records or of a retrieval set."""

    records: Path
    """Training records (JSON lines), a folder of such files, or a retrieval set."""
    out: Path
    """Records with paraphrases, or a retrieval set with a query for each wording; pictures are referenced."""
    model: ModelConfig
    """The writer, with the same settings as a model of ``rge data rmir``."""
    count: AtLeastOne = len(KINDS)
    """Wordings of each question."""
    temperature: float = 0.7
    """Sampling temperature."""
    on_unanswered: Literal["wait", "proceed"] = "wait"
    """What to do if calls are unanswered (outages): wait until the same command has made them again, or proceed without
    them."""
    prices: Path | None = None
    """Price table (YAML) for a writer without prices in its settings; null: rge/calls/prices.yaml."""
    dry_run: bool = False
    """Make no calls; print the number of calls, tokens and the cost."""
    yes: bool = False
    """On a terminal, do not ask for confirmation before the first paid call; the estimate is still printed."""


Question = tuple[str, str]
"""Instruction and text of a query."""


def main(words: Sequence[str]) -> None:
    """Write paraphrases, or estimate their cost (``dry_run=true``)."""
    options = parse_options(ParaphraseOptions, words, "rge data paraphrase")
    options = replace(options, model=fill_prices({"model": options.model}, options.prices)["model"])
    check_model("model", options.model)
    work = _Set(options) if (options.records / QUERIES).is_file() else _Records(options)
    questions = list(dict.fromkeys(work.questions()))
    if options.dry_run or options.model.paid():
        shown = estimate(questions, options)
        if options.dry_run:
            print(shown)
            return
        confirm(shown, yes=options.yes)
    options.model.key()  # if it is missing, said before any work
    with held(work.replies.parent, f"{work.replies.stem}.lock"), closing(AnswerStore(work.replies)) as store:
        found, counts = reword(questions, options, store)
        work.write(found)
        report = {
            "questions": len(questions),
            **counts,
            "models": [asdict(entry) for entry in store.ledger()],
        }
        write_json(
            work.replies.with_name(work.replies.name.replace(".replies.sqlite", ".report.json")), report
        )
    print(json.dumps(report, indent=1))


def estimate(questions: Iterable[Question], options: ParaphraseOptions) -> str:
    """Estimate calls, tokens and cost from the real prompts, without making a call."""
    model, total = options.model, Counter[str]()
    for question in questions:
        given, answered = model.estimate(request_for(question, options))
        total.update({"calls": 1, "in": given, "out": answered})
    batch = model.mode == "batch"
    least, most = (model.cost(total["in"], answered, batch=batch) for answered in (0, total["out"]))
    return (
        f"{total['calls']:,} calls, {total['in']:,} input tokens, at most {total['out']:,} output tokens: from {least:,.2f} (input "
        f"alone) to at most {most:,.2f}. No calls were made yet."
    )


def request_for(question: Question, options: ParaphraseOptions) -> Request:
    """Ask for a question's wordings."""
    instruction, text = question
    names = [f"wording_{number + 1}" for number in range(options.count)]
    form = "".join(f"<{name}>...</{name}>" for name in names)
    kinds = "; ".join(f"{number + 1}. {KINDS[number % len(KINDS)]}" for number in range(options.count))
    context = f"\nThe search's task, which stays as it is: {instruction}\n" if instruction else ""
    return Request(
        options.model.name,
        (PROMPT.format(count=options.count, kinds=kinds, context=context, form=form, text=text),),
        temperature=options.temperature,
        max_tokens=max(512, options.count * (4 * len(text.split()) + 100)),
        form=form,
        fields=tuple((name, None) for name in names),
    )


def read(reply: Reply, text: str, count: int) -> list[str]:
    """The wordings of an answer that differ from the text and from each other; `ReplyError` if there are none."""
    seen, found = {_plain(text)}, []
    for wording in wordings(reply, count):
        if _plain(wording) not in seen and len(wording.split()) <= len(text.split()) + MAX_WORDS_MORE:
            found.append(wording)
        seen.add(_plain(wording))
    if not found:
        raise BadValue("every wording repeats the text, or is much longer")
    return found


def wordings(reply: Reply, count: int) -> list[str]:
    """All wordings of an answer; `ReplyError` if one is missing."""
    check_complete(reply, "wording_1")
    return [" ".join(tag(reply.text, f"wording_{number + 1}").split()) for number in range(count)]


def _plain(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter.isalnum())


def reword(
    questions: Sequence[Question], options: ParaphraseOptions, store: AnswerStore
) -> tuple[dict[Question, list[str]], Counter[str]]:
    """The wordings of each question that has some, and counts: wordings, and questions without any by reason.

    Raises:
        UserError: calls are unanswered, and `on_unanswered` is ``wait``.
    """
    found: dict[Question, list[str]] = {}
    counts, unanswered = Counter[str](), list[Outcome]()

    def take(position: int, outcome: Outcome) -> None:
        question = questions[position]
        if outcome.unanswered:
            unanswered.append(outcome)
        try:
            found[question] = read(outcome.answer(), question[1], options.count)
        except ReplyError as error:
            counts[f"without wordings: {error.kind}"] += 1
        else:
            counts["wordings"] += len(found[question])
            counts["left out: repeated or too long"] += options.count - len(found[question])

    caller = Caller({options.model.name: options.model}, store, progress=True)
    requests = [request_for(question, options) for question in questions]
    caller.run(requests, take, read=partial(wordings, count=options.count), title="paraphrases")
    check_answered(unanswered, len(questions), wait=options.on_unanswered == "wait")
    if not found:
        raise UserError(
            f"it reworded none of {len(questions)} questions: {dict(counts)}", key=options.model.name
        )
    return found, counts


def records_of(source: Source) -> Iterator[Record]:
    """All records of a file."""
    return map(source.records.__getitem__, range(len(source.records)))


class _Records:
    """Files of training records."""

    def __init__(self, options: ParaphraseOptions):
        self.sources, self.replies = sources_of(options), replies_of(options)

    def questions(self) -> Iterable[Question]:
        """Of all records with a text."""
        for source in self.sources:
            for record in records_of(source):
                if text := (record.query.words or "").strip():
                    yield record.instruction or "", text

    def write(self, found: Mapping[Question, list[str]]) -> None:
        """Write the records; those that had paraphrases keep them."""
        for source in self.sources:
            with replacing(source.out) as out, out.open("w", encoding="utf-8") as lines:
                for record in records_of(source):
                    text = (record.query.words or "").strip()
                    more = found.get((record.instruction or "", text), ())
                    paraphrases = list(dict.fromkeys((*record.query.paraphrases, *more)))
                    query = record.query.model_copy(update={"paraphrases": paraphrases})
                    lines.write(
                        json_line(written_row(record.model_copy(update={"query": query}), source.out))
                    )


class _Set:
    """A retrieval set, as tables: pictures are neither read nor copied twice."""

    def __init__(self, options: ParaphraseOptions):
        self.src, self.out = options.records, options.out
        self.replies = self.out.with_name(f"{self.out.name}.replies.sqlite")
        self.replies.parent.mkdir(parents=True, exist_ok=True)
        self.queries = pq.read_table(self.src / QUERIES)
        if self.out.resolve() == self.src.resolve():
            raise UserError("it would overwrite the set", self.out, key="out")
        if self.out.exists():  # said before any call
            raise UserError("it exists: delete it, or give another folder", self.out, key="out")
        if COLUMN in self.queries.column_names:
            raise UserError("the column is there: its questions are reworded already", self.src, key=COLUMN)
        if not any(self._texts()):
            raise UserError("its queries have no text that could be reworded", self.src)

    def _texts(self) -> list[str]:
        return [(text or "").strip() for text in self._column("text")]

    def _column(self, name: str) -> list[Any]:
        known = name in self.queries.column_names
        return self.queries[name].to_pylist() if known else [None] * len(self.queries)

    def _asked(self) -> list[Question]:
        return [
            (one or "", text) for one, text in zip(self._column("instruction"), self._texts(), strict=True)
        ]

    def questions(self) -> Iterable[Question]:
        """Of all queries with a text."""
        return (question for question in self._asked() if question[1])

    def write(self, found: Mapping[Question, list[str]]) -> None:
        """Write the set: query q becomes q, q~1, q~2, ..., each with q's judgements."""
        rows, texts, names, names_of = [], [], [], {}
        for row, (name, question) in enumerate(zip(self._column("id"), self._asked(), strict=True)):
            more = found.get(question, [])
            names_of[name] = [name, *(f"{name}~{number + 1}" for number in range(len(more)))]
            rows += [row] * len(names_of[name])
            names += names_of[name]
            texts += [self._column_text(row), *more]
        if len(set(names)) < len(names):
            raise UserError("some ids end in ~1, ~2, ..., as those of wordings would", self.src, key="id")
        with replacing_folder(self.out, overwrite=False) as out:
            shown = self.queries if "image" not in self.queries.column_names else self._by_reference(out)
            queries = shown.take(pa.array(rows, pa.int64()))
            origin = queries["id"]
            for column, values in (("id", names), ("text", texts)):
                place = queries.column_names.index(column)
                queries = queries.set_column(place, column, pa.array(values, pa.string()))
            pq.write_table(queries.append_column(COLUMN, origin.cast(pa.string())), out / QUERIES)
            tables = {}
            for path in sorted(self.src.iterdir()):
                if path.name in (QUERIES, "meta.json") or path.name.startswith("."):
                    continue
                if path.suffix == ".parquet" and "query-id" in pq.read_schema(path).names:
                    tables[path.stem] = _repeated(pq.read_table(path), names_of)
                    pq.write_table(tables[path.stem], out / path.name)
                elif path.is_dir():
                    shutil.copytree(path, out / path.name)
                elif path.suffix == ".parquet" and "image" in pq.read_schema(path).names:
                    _copy_with_pictures(path, out / path.name, self.src, self.out)
                else:
                    shutil.copyfile(path, out / path.name)
            self._write_meta(out, names, tables)

    def _column_text(self, row: int) -> str | None:
        text: str | None = self.queries["text"][row].as_py() if "text" in self.queries.column_names else None
        return text

    def _by_reference(self, out: Path) -> pa.Table:
        """The queries with each encoded picture in a file of its own, so that wordings share it."""

        def cell(picture: Any) -> dict[str, Any]:
            data, name = _parts(picture)
            if data is None:
                return {"bytes": None, "path": _moved(name, self.src, self.out)}
            name = f"query_pictures/{hashlib.sha256(data).hexdigest()[:20]}{Path(name or '').suffix}"
            path = out / name
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                path.write_bytes(data)
            return {"bytes": None, "path": name}

        place, column = self.queries.column_names.index("image"), self.queries["image"].to_pylist()
        values = pa.array([cells and [*map(cell, cells)] for cells in column], pa.list_(PICTURE))
        return self.queries.set_column(place, "image", values)

    def _write_meta(self, out: Path, names: Sequence[str], tables: Mapping[str, pa.Table]) -> None:
        meta = json.loads((self.src / "meta.json").read_text(encoding="utf-8"))

        def pairs(name: str, *more: str) -> list[tuple[Any, ...]]:
            columns = ("query-id", "corpus-id", *more)
            return (
                list(zip(*(tables[name][one].to_pylist() for one in columns), strict=True))
                if name in tables
                else []
            )

        corpus = pq.read_table(out / "corpus.parquet", columns=["id"])["id"].to_pylist()
        optional = {name: pairs(name) for name in ("negatives", "excluded", "candidates")}
        fingerprint = set_fingerprint(names, corpus, pairs("qrels", "score"), **optional)
        meta |= {"name": f"{meta['name']}-paraphrased", "fingerprint": fingerprint}
        meta["notes"] = [
            *meta.get("notes", []),
            "each question is asked in several wordings, see the column paraphrase",
        ]
        if isinstance(meta.get("counts"), dict):
            meta["counts"] |= {"queries": len(names), "qrels": len(pairs("qrels"))}
        write_json(out / "meta.json", meta)


def _repeated(table: pa.Table, names_of: Mapping[str, Sequence[str]]) -> pa.Table:
    """Each row once for every wording of its query."""
    owners = table["query-id"].to_pylist()
    rows = [row for row, owner in enumerate(owners) for _ in names_of[owner]]
    names = [name for owner in owners for name in names_of[owner]]
    place = table.column_names.index("query-id")
    return table.take(pa.array(rows, pa.int64())).set_column(place, "query-id", pa.array(names, pa.string()))


def _copy_with_pictures(src: Path, out: Path, old: Path, new: Path) -> None:
    """Copy a table of candidates; paths of pictures stay valid in the new folder."""
    file = pq.ParquetFile(src)
    place = file.schema_arrow.get_field_index("image")
    schema = file.schema_arrow.set(place, pa.field("image", PICTURE))
    with pq.ParquetWriter(out, schema) as writer:
        for batch in file.iter_batches(batch_size=1024):
            cells = []
            for data, path in map(_parts, batch.column(place).to_pylist()):
                path = path if data is not None else _moved(path, old, new)
                cells.append(None if data is path is None else {"bytes": data, "path": path})
            table = pa.Table.from_batches([batch])
            writer.write_table(table.set_column(place, schema.field(place), pa.array(cells, PICTURE)))


def _parts(picture: Any) -> tuple[bytes | None, str | None]:
    """Encoded bytes and path of a cell, which has either or both."""
    if isinstance(picture, dict):
        return picture["bytes"], picture["path"]
    return (picture, None) if isinstance(picture, bytes) else (None, picture)


def _moved(path: str | None, old: Path, new: Path) -> str | None:
    """A path relative to one folder, relative to another; files below the first are copied along."""
    if path is None or Path(path).is_absolute() or (old / path).resolve().is_relative_to(old.resolve()):
        return path
    return relative(str(old / path), new)
