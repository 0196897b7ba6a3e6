"""Label a set's queries by a vision-language model, so that every evaluation reports figures by label.

    rge eval label set=DIR kinds=essentiality,image_type,quality model.name=NAME model.base_url=ADDRESS

The labels are those of MM-BRIGHT (sections 3.3 to 3.5, Figures 12, 13 and 16); the wording is ours. They become columns of
``queries.parquet`` that `eval.sets.retrieval_set` reports by. The set's content stays the same, so rankings of it stay valid:
`rge eval score` adds the slices to a finished one.

==============  ============================================================================================================
essentiality    of the pictures for understanding the query: essential, helpful or redundant
image_type      of the pictures, each by itself; ``several`` types where they differ
quality         readability, clarity, evidence_usefulness, evidence_sufficiency: 1 to 5 each, from the query, its right documents and
                its reference answer
==============  ============================================================================================================
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from eval.benchmarks.suite import is_suite, load_suite
from eval.sets.contents import CandidatesOf
from eval.sets.retrieval_set import RetrievalSet, load_set, reference_answers
from rge.calls.caller import Caller
from rge.calls.grouping import Outcome
from rge.calls.model_config import ModelConfig
from rge.calls.request import Part, Picture, Request
from rge.calls.store import AnswerStore
from rge.calls.wire.replies import Refused, Reply, ReplyError, Truncated, parse_choice
from rge.common.errors import UserError
from rge.common.files import read_json, write_bytes, write_json
from rge.common.options import AtLeastOne
from rge.common.registry import PluginOptions
from rge.common.schema import Item
from rge.judging.scorer import need_answers
from rge.vectors.contents import picture_digests

NO_PICTURE, SEVERAL, UNLABELLED = "no picture", "several", "unlabelled"
Words = dict[str, tuple[str, ...]]
"""Tags of an answer, which are columns, and their allowed words."""
LIKERT = ("1", "2", "3", "4", "5")
KINDS: dict[str, Words] = {
    "essentiality": {"essentiality": ("essential", "helpful", "redundant")},
    "image_type": {
        "image_type": (
            "diagram", "screenshot", "chart", "photo", "mathematical", "scientific_figure", "mixed", "other",
        )
    },
    "quality": dict.fromkeys(("readability", "clarity", "evidence_usefulness", "evidence_sufficiency"), LIKERT),
}  # fmt: skip
ASKED = {
    "essentiality": (
        "How much do the pictures matter for understanding this query? essential: they show what the text does not say, and without "
        "them the query is incomplete or ambiguous. helpful: they add context, but the text can be understood without them. redundant: "
        "they repeat the text, or say nothing about the need."
    ),
    "image_type": (
        "What kind of picture is this, by its dominant content? diagram: a technical drawing, flowchart or architecture. screenshot: a "
        "program's window, a terminal, an error or a web page. chart: a plot of data, or a table. photo: a photograph of things, "
        "people or places. mathematical: formulas or proofs. scientific_figure: microscopy, medical imaging, spectra, molecules. mixed: "
        "several of these to the same degree. other: art, logos, illustrations, plain text."
    ),
    "quality": (
        "Rate from 1 (poor) to 5 (excellent). readability: is the query well written? clarity: is the need specific and "
        "unambiguous? evidence_usefulness: do the documents help to reason towards an answer? evidence_sufficiency: do they hold "
        "enough to answer the query?"
    ),
}
MAX_TOKENS = 512


@dataclass
class LabelOptions(PluginOptions):
    """Label a set's queries by a model: how much pictures matter, their type, and the quality of query and evidence."""

    set: Path
    """Retrieval set, or a suite; the labels become columns of its queries."""
    model: ModelConfig
    """The model: ``model.name=``, ``model.base_url=`` ... see docs/data_prep.md."""
    kinds: tuple[Literal["essentiality", "image_type", "quality"], ...] = (
        "essentiality",
        "image_type",
        "quality",
    )
    """Which labels, see `eval.judging.label`."""
    cache: Path | None = None
    """File of all answers; null: ``labels.sqlite`` in the set."""
    document_chars: AtLeastOne = 8000
    """Longer texts of documents are cut there (quality)."""
    overwrite: bool = False
    """Replace labels by another model."""


def label(options: LabelOptions) -> dict[str, Counter[str]]:
    """Ask for all labels, add them to the set, print how many queries have each, and return these numbers by column.

    Raises:
        UserError: calls are unanswered (all others are stored), or the set has such columns of another origin.
    """
    store = AnswerStore(options.cache or options.set / "labels.sqlite")
    caller = Caller({"labels": options.model}, store, progress=True)
    paths = [options.set]
    if is_suite(options.set):
        paths = [options.set / name for name in load_suite(options.set).members]
    totals: dict[str, Counter[str]] = {}
    for path in paths:
        wanted = load_set(path)
        columns = [column for kind in options.kinds for column in KINDS[kind]]
        _check(options, wanted, columns)
        found: dict[str, list[str]] = {}
        for kind in options.kinds:
            found |= (
                _image_types(options, wanted, caller)
                if kind == "image_type"
                else _labels(options, wanted, caller, kind)
            )
        _write(options, wanted, found)
        for column, values in found.items():
            totals.setdefault(column, Counter()).update(values)
    store.close()
    for column, numbers in totals.items():
        shown = ", ".join(f"{value} {number}" for value, number in sorted(numbers.items()))
        rated = {int(value): number for value, number in numbers.items() if value in LIKERT}
        mean = sum(value * number for value, number in rated.items()) / max(sum(rated.values()), 1)
        print(f"{column}: {shown}" + (f"; mean {mean:.2f}" if rated else ""), flush=True)
    return totals


def _check(options: LabelOptions, wanted: RetrievalSet, columns: Sequence[str]) -> None:
    names = pq.read_schema(wanted.path / "queries.parquet").names
    made: dict[str, str] = wanted.meta.get("labels", {})
    for column in columns:
        if column in names and column not in made:
            raise UserError(
                "the set already has a column of this name: rename it",
                wanted.path / "queries.parquet",
                key=column,
            )
        if made.get(column, options.model.name) != options.model.name and not options.overwrite:
            raise UserError(
                f"it is there already, by {made[column]}: pass overwrite=true to replace it",
                wanted.path,
                key=column,
            )


def _labels(options: LabelOptions, wanted: RetrievalSet, caller: Caller, kind: str) -> dict[str, list[str]]:
    """A label per query for every column of a kind."""
    need_pictures, words = kind == "essentiality", KINDS[kind]
    asked = [place for place, query in enumerate(wanted.queries) if query.pictures or not need_pictures]
    found = {column: [NO_PICTURE] * len(wanted.queries) for column in words}
    right = [rows.tolist() for rows, _ in wanted.positives]
    references = reference_answers(wanted)
    with CandidatesOf(wanted, {row for rows in right for row in rows} if kind == "quality" else ()) as pool:

        def request(place: int) -> Request:
            query = wanted.queries[place]
            parts: list[Part] = [f"Query:\n{query.text or '(pictures only)'}", *_shown(options, query)]
            for number, row in enumerate(right[place] if kind == "quality" else (), 1):
                text = (pool[row].text or "")[: options.document_chars]
                parts += [f"Document {number}:\n{text}".rstrip(), *_shown(options, pool[row])]
            if kind == "quality" and references[place]:
                parts.append(f"Answer:\n{references[place]}")
            return _request(kind, parts)

        outcomes = caller.run(map(request, asked), read=_reader(kind), title=kind, total=len(asked))
    need_answers(outcomes, options.model.endpoint)
    for place, values in zip(asked, _read(outcomes, kind), strict=True):
        for column in words:
            found[column][place] = values[column]
    return found


def _image_types(options: LabelOptions, wanted: RetrievalSet, caller: Caller) -> dict[str, list[str]]:
    """The type of each query's pictures, each asked about by itself."""
    shown = [_shown(options, query) for query in wanted.queries]
    requests = [_request("image_type", [one]) for pictures in shown for one in pictures]
    outcomes = caller.run(requests, read=_reader("image_type"), title="image_type")
    need_answers(outcomes, options.model.endpoint)
    types = (values["image_type"] for values in _read(outcomes, "image_type"))
    of_query = [list(dict.fromkeys(next(types) for _ in pictures)) for pictures in shown]
    return {"image_type": [SEVERAL if len(own) > 1 else next(iter(own), NO_PICTURE) for own in of_query]}


def _shown(options: LabelOptions, item: Item) -> list[Part]:
    side = options.model.max_side_px
    return [Picture(ref, sha, side) for ref, sha in zip(item.pictures, picture_digests(item), strict=True)]


def _request(kind: str, parts: Sequence[Part]) -> Request:
    words = KINDS[kind]
    form = "\n".join(
        f"<{column}>one of: {', '.join(allowed)}</{column}>" for column, allowed in words.items()
    )
    asked = f"{ASKED[kind]} First give your reason in one sentence, then answer in this form:\n{form}"
    return Request(
        "labels", (*parts, asked), max_tokens=MAX_TOKENS, form=form, fields=(("reason", None), *words.items())
    )


def _reader(kind: str) -> Any:
    def read(reply: Reply) -> dict[str, str]:
        if reply.stop == "refusal":
            raise Refused(reply.text[:100] or "declined without a reason")
        try:
            return {
                column: parse_choice(reply.text, column, {word: word for word in allowed})
                for column, allowed in KINDS[kind].items()
            }
        except ReplyError as error:
            if reply.stop == "length":
                raise Truncated(str(error)) from None
            raise

    return read


def _read(outcomes: Sequence[Outcome], kind: str) -> list[dict[str, str]]:
    """The labels of each answer; `UNLABELLED` for refused and unreadable ones."""
    found, read = [], _reader(kind)
    for outcome in outcomes:
        try:
            found.append(read(outcome.answer()))
        except ReplyError:
            found.append(dict.fromkeys(KINDS[kind], UNLABELLED))
    return found


def _write(options: LabelOptions, wanted: RetrievalSet, columns: dict[str, list[str]]) -> None:
    path = wanted.path / "queries.parquet"
    table = pq.read_table(path)
    for name, values in columns.items():
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, pa.array(values, pa.string()))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_bytes(path, sink.getvalue().to_pybytes())
    meta = read_json(wanted.path / "meta.json") or {}
    labels = {**meta.get("labels", {}), **dict.fromkeys(columns, options.model.name)}
    write_json(wanted.path / "meta.json", meta | {"labels": labels})
