"""Answers with retrieved documents, marked by judges: MM-BRIGHT's end-to-end setting, for any set with reference answers.

    python -m eval rag set=DIR out=DIR of=DIR,... answerer=NAME judges=NAME,... models.NAME.base_url=ADDRESS ...

``closed_book``   nothing but the question
``oracle``        every right document
one a run         the first ``top_n`` documents of a finished evaluation's ranking

Each row is an evaluation directory with one number a query, ``answer_score`` (0 to 1), so that `compare` and `report` take it.
``rag.json`` has what needs several rows: paired differences, the judges' agreement, and what was paid. Whoever answers and the
judges are models behind endpoints, or vision-language models in this process. All that they wrote is in one file, and a run
that was killed asks for the rest.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from eval.benchmarks.registry import protocol_for
from eval.benchmarks.suite import aggregate, each_member, is_suite, load_suite, member_dirs
from eval.commands.compare import paired_tests
from eval.embedding.identity import set_mismatch, versions, with_key
from eval.embedding.processes import join
from eval.judging.answers import (
    FORM,
    JUDGE,
    JUDGE_SYSTEM,
    REQUEST,
    VERSION,
    answer_parts,
    judge_parts,
    mark_of,
)
from eval.judging.writers import Asked, Writer, Written, load_writers
from eval.pages.boards.answers import RAG, known_as
from eval.scoring.agreement import agreement
from eval.scoring.metrics import ANSWER_SCORE
from eval.scoring.output_files import (
    FORMAT,
    PER_QUERY,
    RUN,
    Scored,
    check_out,
    figures,
    invalidate,
    rationale_figures,
    read_results,
    set_figures,
    statistics_settings,
    write_tables,
)
from eval.scoring.stats import NUM_RESAMPLES, in_words
from eval.scoring.trec import read_run
from eval.sets.retrieval_set import RetrievalSet, load_set, reference_answers, with_readable_content
from rge.calls.model_config import ModelConfig
from rge.calls.replies import ReplyError
from rge.calls.store import AnswerStore
from rge.common.errors import UserError
from rge.common.files import write_bytes
from rge.common.options import one_of
from rge.common.registry import PluginOptions
from rge.common.schema import Item

PAGE = "report.html"
CLOSED_BOOK, ORACLE = "closed_book", "oracle"
MAX_UNMARKED = 0.01
"""Share of a row's answers that a judge may leave without a readable mark before its marks are held to be worthless."""


@dataclass
class RagOptions(PluginOptions):
    """Answer a set's questions with documents, and have judges mark the answers against the reference."""

    set: Path
    """Retrieval set with reference answers (``answers.parquet``), or a suite of them."""
    out: Path
    """Output directory: an evaluation a row, rag.json and the page."""
    answerer: str
    """Who answers: a name under models, or a vision-language model that runs here (directory or id on the hub)."""
    judges: tuple[str, ...]
    """Who marks, likewise; the first one's marks are the figure, of two or more the agreement is reported."""
    of: tuple[str, ...] = ()
    """``[LABEL:]DIR``: finished evaluations of the set, each a row with the first documents of its ranking."""
    rows: tuple[str, ...] = (CLOSED_BOOK, ORACLE)
    """Rows beside those: closed_book, oracle."""
    top_n: int = 5
    """Documents of a ranking that are shown; the paper has 5. oracle shows every right one."""
    document_chars: int | None = None
    """Longer documents are cut there; null: none is."""
    models: dict[str, ModelConfig] = field(default_factory=dict)
    """Models behind endpoints, by the names that answerer and judges use."""
    answer_tokens: int = 4096
    """Cap on an answer."""
    judge_tokens: int = 1024
    """Cap on a judge's reason and mark."""
    limit: int | None = None
    """Only the first so many queries of the set, of each member of a suite."""
    cache: Path | None = None
    """File of everything written and paid; null: ``out/written.sqlite``. May be shared."""
    device: str | None = None
    """Of models that run here, such as cuda:0; null: a GPU if there is one."""
    dtype: str | None = None
    """Dtype of their weights; null: float32 on CPU, bfloat16 on a GPU."""
    seed: int = 0
    """Seed of the resampling."""
    overwrite: bool = False
    """Replace the output of other rows."""


@dataclass(frozen=True)
class _Row:
    """A way of choosing documents. ``of`` is the evaluation that they come from; ``documents`` rows of each query's."""

    name: str
    documents: list[list[int]]
    of: Path | None = None
    retrieved: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def rag(options: RagOptions) -> Path:
    """Answer, mark and write; prints the table and returns ``out``.

    Raises:
        UserError: no reference answers, a ranking of another set, an endpoint that cannot be asked (what it answered is kept),
            or a judge whose answers hold no marks.
    """
    if join().size > 1:
        raise UserError(
            "rag runs in one process; large models stand behind an endpoint, which answers many calls at once"
        )
    runs = _checked(options)
    store = AnswerStore(options.cache or options.out / "written.sqlite")
    try:
        names = [options.answerer, *options.judges]
        writers = load_writers(names, options.models, store, device=options.device, dtype=options.dtype)
        if is_suite(options.set):
            dirs = _suite(options, runs, writers)
        else:
            dirs = _one(options, options.set, options.out, runs, writers)
        spent = [asdict(one) for one in store.ledger()]
    finally:
        store.close()
    content = _together(options, dirs) | {"spent": spent}
    write_bytes(options.out / RAG, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")
    print(f"\n{table(content)}")
    from eval.pages.boards.leaderboard import write_leaderboard

    print(f"\n{write_leaderboard([str(options.out)], options.out / PAGE)}")
    return options.out


def _checked(options: RagOptions) -> dict[str, Path]:
    """Label -> directory of the rankings."""
    one_of("judges", options.judges, options.judges)
    if options.rows:
        one_of("rows", options.rows, (CLOSED_BOOK, ORACLE))
    for name in ("top_n", "answer_tokens", "judge_tokens", "document_chars", "limit"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    runs: dict[str, Path] = {}
    for word in options.of:
        label, colon, directory = word.partition(":")
        if not colon or Path(word).exists():
            label, directory = Path(word).name, word
        label = re.sub(r"[^\w.-]+", "_", label)
        if label in runs or label in (CLOSED_BOOK, ORACLE, "members", ""):
            raise UserError(f"of={word}: {label!r} names another row; say of=LABEL:DIR")
        runs[label] = Path(directory)
    if not (runs or options.rows):
        raise UserError("there is no row: give of=DIR, or rows=closed_book,oracle")
    return runs


def _suite(options: RagOptions, runs: Mapping[str, Path], writers: Mapping[str, Writer]) -> dict[str, Path]:
    """Every member by itself, then each row over all members."""
    suite = load_suite(options.set)
    inner = {}
    for label, path in runs.items():
        old = read_results(path)
        if not old.get("suite"):
            raise UserError(f"{path} is no evaluation of a suite, and {options.set} is one")
        inner[label] = member_dirs(path, old)
        if lacking := sorted(set(suite.members) ^ set(inner[label])):
            raise UserError(
                f"{options.set} and {path} do not have the same members: {lacking[0]!r} is in one only"
            )
    of_member: dict[str, dict[str, Path]] = {}

    def one(name: str, path: Path, out: Path) -> None:
        own = {label: members[name] for label, members in inner.items()}
        of_member[name] = _one(options, path, out, own, writers)

    each_member(suite, options.out, one)
    dirs = {}
    for row in next(iter(of_member.values())):
        members = {name: found[row] for name, found in of_member.items()}
        abouts = [read_results(path)["rag"] for path in members.values()]
        about = abouts[0] | {key: sum(one[key] for one in abouts) for key in _COUNTS}
        told = json.dumps(
            {name: one["references"] for name, one in zip(members, abouts, strict=True)}, sort_keys=True
        )
        about["references"] = hashlib.sha256(told.encode()).hexdigest()[:12]
        about["of"] = str(runs[row]) if row in runs else None
        dirs[row] = options.out / row
        aggregate(
            suite,
            members,
            dirs[row],
            seed=options.seed,
            overwrite=options.overwrite,
            more={"rag": about},
            headline=[ANSWER_SCORE],
        )
    return dirs


_COUNTS = ("num_unanswered", "num_cut", "num_unmarked", "num_without_reference", "num_documents")


def _one(
    options: RagOptions, path: Path, out: Path, runs: Mapping[str, Path], writers: Mapping[str, Writer]
) -> dict[str, Path]:
    """All rows of one set; row -> its directory."""
    loaded = load_set(path)
    benchmark = loaded.meta.get("benchmark") or "generic"
    wanted, unread = with_readable_content(protocol_for(benchmark, "clean", loaded).prepare(loaded))
    if options.limit is not None:
        wanted = wanted.first(options.limit)
    references = reference_answers(wanted)
    if not references:
        raise UserError(
            f"{path} has no reference answers (answers.parquet: query-id, answer), so nothing can be marked; sets of MM-BRIGHT "
            "that were imported before they were kept are imported again"
        )
    rows = _rows(options, wanted, runs)
    about = _about(options, writers, references)
    for row in rows:
        identity = {
            "set.fingerprint": wanted.fingerprint,
            "set.content": wanted.content,
            "set.limit": options.limit,
        }
        identity |= {f"rag.{key}": about[key] for key in about if key != "prompts"} | {"seed": options.seed}
        check_out(
            out / row.name,
            identity | {"rag.of": str(row.of) if row.of else None},
            overwrite=options.overwrite,
        )
    needed = {one for row in rows for documents in row.documents for one in documents}
    document = _documents(wanted, needed)
    asked = [place for place, query in enumerate(wanted.queries) if query.id in references]
    prompts = [
        Asked(
            tuple(
                answer_parts(
                    wanted.queries[place], [document[d] for d in row.documents[place]], options.document_chars
                )
            )
        )
        for row in rows
        for place in asked
    ]
    title = f"{wanted.name}: answers"
    answers = writers[options.answerer].write(prompts, max_tokens=options.answer_tokens, title=title)
    marks = {
        name: _marks(options, wanted, asked, answers, references, name, writers[name])
        for name in options.judges
    }
    dirs = {}
    for number, row in enumerate(rows):
        part = slice(number * len(asked), (number + 1) * len(asked))
        own = {name: found[part] for name, found in marks.items()}
        dirs[row.name] = out / row.name
        _write(options, wanted, row, asked, answers[part], own, about, unread, dirs[row.name])
    return dirs


def _rows(options: RagOptions, wanted: RetrievalSet, runs: Mapping[str, Path]) -> list[_Row]:
    """Rows and their documents, the best first."""
    found = []
    if CLOSED_BOOK in options.rows:
        found.append(_Row(CLOSED_BOOK, [[] for _ in wanted.queries]))
    if ORACLE in options.rows:
        # the highest gain first; equal ones by id, as everywhere
        right = [rows[np.argsort(-gains, kind="stable")].tolist() for rows, gains in wanted.positives]
        found.append(_Row(ORACLE, right))
    for label, path in runs.items():
        old = read_results(path)
        if why := set_mismatch({"set": set_figures(wanted)}, old):
            raise UserError(f"{path} is an evaluation of another set than {wanted.path} ({why})")
        seen = old["set"].get("limit")
        if seen is not None and (options.limit is None or options.limit > seen):
            raise UserError(
                f"{path} has the first {seen} queries only: limit={seen}, or evaluate it without limit"
            )
        known = load_set(wanted.path)
        read = read_run(path / RUN, known if seen is None else known.first(seen))
        top = read.ranking.rows_QW[: len(wanted.queries), : min(options.top_n, read.ranking.depth)]
        missing = set(read.missing) & set(wanted.query_ids)
        warnings = [f"{len(missing)} queries have no documents: the ranking lacks them"] if missing else []
        documents = [[row for row in rows if row >= 0] for rows in top.tolist()]
        found.append(_Row(label, documents, path, old, [*old.get("warnings", []), *warnings]))
    return found


def _documents(wanted: RetrievalSet, needed: set[int]) -> dict[int, Item]:
    row_of = {int(file_row): row for row, file_row in enumerate(wanted.file_rows_C.tolist())}
    left, found = set(needed), {}
    for file_row, item in enumerate(wanted.corpus_items() if needed else ()):
        if (row := row_of[file_row]) in left:
            found[row] = item
            left.discard(row)
            if not left:
                break
    return found


def _marks(
    options: RagOptions,
    wanted: RetrievalSet,
    asked: Sequence[int],
    answers: Sequence[Written],
    references: Mapping[str, str],
    name: str,
    judge: Writer,
) -> list[tuple[float, str]]:
    """(mark, the judge's words) of every answer; a blank one has 0 by the scale's own words, and is not asked about."""
    places = [number for number, answer in enumerate(answers) if answer.text]
    prompts = []
    for number in places:
        query = wanted.queries[asked[number % len(asked)]]
        parts = judge_parts(query, answers[number].text, references[query.id])
        prompts.append(Asked(tuple(parts), JUDGE_SYSTEM))
    title = f"{wanted.name}: marks of {name}"
    said = judge.write(prompts, max_tokens=options.judge_tokens, title=title, read=mark_of, form=FORM)
    found = [(0.0, "")] * len(answers)
    unread = 0
    for number, one in zip(places, said, strict=True):
        try:
            found[number] = (mark_of(one.reply()), one.text)
        except ReplyError:
            found[number] = (np.nan, one.text)
            unread += 1
    if unread > MAX_UNMARKED * max(len(places), 1):
        example = next(text for mark, text in found if mark != mark)
        raise UserError(
            f"judge {name} gave no readable mark for {unread} of {len(places)} answers, such as {example[-120:]!r}: take "
            "another judge, or raise judge_tokens; what was written is kept"
        )
    return found


def _about(
    options: RagOptions, writers: Mapping[str, Writer], references: Mapping[str, str]
) -> dict[str, Any]:
    """What results.json says of how a row was made."""
    words = json.dumps([REQUEST, JUDGE_SYSTEM, JUDGE, VERSION])
    told = json.dumps(sorted(references.items()), ensure_ascii=False)
    return {
        "answerer": writers[options.answerer].name,
        "judges": {name: writers[name].name for name in options.judges},
        "top_n": options.top_n,
        "document_chars": options.document_chars,
        "answer_tokens": options.answer_tokens,
        "judge_tokens": options.judge_tokens,
        "prompts": {"request": list(REQUEST), "judge_system": JUDGE_SYSTEM, "judge": list(JUDGE)},
        "wording": hashlib.sha256(words.encode()).hexdigest()[:12],
        "references": hashlib.sha256(told.encode()).hexdigest()[:12],
    }


def _write(
    options: RagOptions,
    wanted: RetrievalSet,
    row: _Row,
    asked: Sequence[int],
    answers: Sequence[Written],
    marks: Mapping[str, Sequence[tuple[float, str]]],
    about: Mapping[str, Any],
    unread: Sequence[str],
    out: Path,
) -> None:
    """One row as an evaluation directory."""
    num = len(wanted.queries)
    values = {name: np.full(num, np.nan) for name in marks}
    said: dict[str, list[str | None]] = {name: [None] * num for name in marks}
    texts: list[str | None] = [None] * num
    stops: list[str | None] = [None] * num
    tokens: list[int | None] = [None] * num
    for number, place in enumerate(asked):
        texts[place], stops[place], tokens[place] = (
            answers[number].text,
            answers[number].stop,
            answers[number].tokens,
        )
        for name, own in marks.items():
            values[name][place] = own[number][0]
            said[name][place] = own[number][1]
    first = next(iter(values.values()))
    columns = {ANSWER_SCORE: first} | {
        f"{ANSWER_SCORE}.{name}": value for name, value in values.items() if len(values) > 1
    }
    value_QM = np.stack(list(columns.values()), axis=1)
    nothing = np.zeros(num, np.int64)
    scored = Scored(tuple(columns), value_QM, value_QM, value_QM, np.full_like(value_QM, np.nan), nothing)
    counts = {
        "num_unanswered": sum(not answer.text for answer in answers),
        "num_cut": sum(answer.stop == "length" for answer in answers),
        "num_unmarked": int(np.isnan(value_QM[list(asked)]).any(axis=1).sum()),
        "num_without_reference": num - len(asked),
        "num_documents": sum(len(row.documents[place]) for place in asked),
    }
    benchmark = wanted.meta.get("benchmark") or "generic"
    answerer = str(about["answerer"]["model"])
    judges = [str(one["model"]) for one in about["judges"].values()]
    made_with = {"answerer": known_as(answerer), "judge": known_as(judges[0])}
    inherited = (
        "query_mode",
        "query_modality",
        "candidate_mode",
        "checkpoint",
        "checkpoint_hash",
        "model",
        "run_hash",
        "plugins",
    )
    results: dict[str, Any] = {
        "format": FORMAT,
        "set": set_figures(wanted) | {"limit": options.limit},
        "benchmark": benchmark,
        "profile": "clean",
        "setting": "rag",
        "protocol": [
            "answers are marked from 0 to 100 for the share of the reference answer that they cover, by the prompt of MM-BRIGHT's "
            "Figure 17; the judge sees no picture",
            "a blank or refused answer has 0",
        ],
        "query_mode": None,
        "query_modality": None,
        "tag": row.name,
        **{key: row.retrieved[key] for key in inherited if key in row.retrieved},
        **figures(wanted, scored, seed=options.seed),
        "rag": dict(about) | {"row": row.name, "of": str(row.of) if row.of else None} | counts,
        "warnings": [*wanted.meta.get("notes", []), *unread, *row.warnings, *_mind(counts, len(asked))],
        "rationale": rationale_figures(None),
        "seed": options.seed,
        "statistics": statistics_settings(options.seed, NUM_RESAMPLES),
        "versions": versions(),
    }
    results["set"]["made_with"] |= made_with
    results["headline"] = [{"metric": ANSWER_SCORE, "average": "micro", **results["micro"][ANSWER_SCORE]}]
    results["warnings"] = list(dict.fromkeys(results["warnings"]))
    results["identity"] = with_key(results)
    shown = [[wanted.corpus_ids[one] for one in documents] for documents in row.documents]
    right = [set(rows.tolist()) for rows, _ in wanted.positives]
    first_hits = [
        next((rank for rank, one in enumerate(documents, 1) if one in right[query]), None)
        for query, documents in enumerate(row.documents)
    ]
    frame: dict[str, Any] = {"query_id": wanted.query_ids} | wanted.columns
    frame["num_positives"] = [len(one) for one in right]
    frame["first_hit_rank"] = pa.array(first_hits, pa.int64())
    frame |= {name: pa.array(value, pa.float64(), from_pandas=True) for name, value in columns.items()}
    frame["top10"] = pa.array(shown, pa.list_(pa.string()))
    frame["rationale"] = pa.array(texts, pa.string())
    frame["stop_reason"] = pa.array(stops, pa.string())
    frame["rationale_tokens"] = pa.array(tokens, pa.int64())
    frame |= {f"said.{name}": pa.array(words, pa.string()) for name, words in said.items()}
    invalidate(out)
    write_tables(out, pa.table(frame), results)


def _mind(counts: Mapping[str, int], num: int) -> list[str]:
    words = {
        "num_unanswered": "of {} questions got no answer (refused, empty, or rejected by the endpoint) and have 0",
        "num_cut": "of {} answers were cut at answer_tokens",
        "num_unmarked": "of {} answers lack a readable mark and are left out",
        "num_without_reference": "further questions have no reference answer and are left out",
    }
    return [f"{counts[key]} {text.format(num)}" for key, text in words.items() if counts[key]]


def _together(options: RagOptions, dirs: Mapping[str, Path]) -> dict[str, Any]:
    """Content of rag.json: rows, their paired differences, agreement of the judges."""
    results = {name: read_results(path) for name, path in dirs.items()}
    frames = {name: pd.read_parquet(path / PER_QUERY).set_index("query_id") for name, path in dirs.items()}
    first = next(iter(results.values()))
    names = list(first["micro"])
    average = "macro" if first.get("suite") else "micro"
    differences = []
    for a, b in itertools.combinations(dirs, 2):
        theirs = frames[a].loc[frames[b].index]
        suite = bool(first.get("suite"))
        slices = paired_tests(frames[b], theirs, names, [], seed=options.seed, suite=suite)
        differences += [{"row": b, "over": a} | vars(one) for one in slices]
    pairs = []
    for a, b in itertools.combinations(options.judges, 2):
        columns = {
            judge: np.concatenate([frame[f"{ANSWER_SCORE}.{judge}"] for frame in frames.values()])
            for judge in (a, b)
        }
        groups = np.concatenate([frame["group"] for frame in frames.values()]).astype(str)
        order = [
            sorted(dirs, key=lambda row: -results[row][average][f"{ANSWER_SCORE}.{judge}"]["value"])
            for judge in (a, b)
        ]  # noqa: B023
        found = agreement(columns[a], columns[b], groups, seed=options.seed)
        pairs.append({"a": a, "b": b, **found, "same_order": order[0] == order[1]})
    return {
        "format": FORMAT,
        "set": {key: first["set"].get(key) for key in ("name", "fingerprint", "content", "num_queries")},
        "average": average,
        "answerer": first["rag"]["answerer"],
        "judges": first["rag"]["judges"],
        "metrics": names,
        "rows": {
            name: {metric: one[average][metric] for metric in names} | one["rag"]
            for name, one in results.items()
        },
        "differences": differences,
        "agreement": pairs,
        "statistics": first["statistics"],
    }


def table(content: Mapping[str, Any]) -> str:
    """Rows, differences and agreement for the terminal, in points of 100."""
    names = content["metrics"]

    def words(figure: Mapping[str, Any]) -> str:
        return f"{100 * figure['value']:.1f} {in_words(figure['low'], figure['high'])}"

    frame = pd.DataFrame(
        {name: [words(row[name]) for row in content["rows"].values()] for name in names},
        index=list(content["rows"]),
    )
    lines = [f"{content['set']['name']}, {content['average']} mean", frame.to_string()]
    wanted = "macro" if content["average"] == "macro" else "all queries"
    for one in content["differences"]:
        if one["slice"] == wanted and one["metric"] == ANSWER_SCORE:
            shown = {"value": one["difference"], "low": one["low"], "high": one["high"]}
            lines.append(f"{one['row']} over {one['over']}: {words(shown)}, p {one['p']:.4f}")
    for one in content["agreement"]:
        kappa = words(one["kappa"]) if one["kappa"] else "not defined"
        lines.append(f"agreement of {one['a']} and {one['b']} on {one['num']} answers: kappa x 100 {kappa}")
    for one in content["spent"]:
        lines.append(f"{one['endpoint']}: {one['calls']} calls, {one['cost']:.4f} paid")
    return "\n".join(lines)
