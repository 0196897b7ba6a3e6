"""The command line: ``rge data rationales records=FILE.jsonl out=FILE.jsonl model.name=NAME [key=value ...]``.

A model that sees query and target writes a rationale for every positive of every record. Rationales that fail a check are
left out and counted by reason, as are records without any rationale. Answers are stored beside the result, so the command
resumes. With ``candidates=N`` several are written, and ``select=CHECKPOINT`` lets an embedder choose among those that pass.
``records=FOLDER out=FOLDER`` processes every file of a folder, such as ``rge data mmeb`` writes, under one budget.
"""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow.parquet as pq

from data_prep.jsonl import json_line
from data_prep.rationales import checks, prompts
from data_prep.rationales.leak import PictureLeak, Shown, bare_text, caption_leak, text_leak
from data_prep.rmir.config import AtLeastOne, EncoderConfig
from data_prep.rmir.pictures.encoders import CheckpointEncoder
from rge.calls.caller import Caller, Outcome
from rge.calls.failures import RequestRejected
from rge.calls.model_config import ModelConfig, check_model
from rge.calls.prices import confirm, fill_prices
from rge.calls.replies import ReplyError
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore, open_locked
from rge.common.errors import UserError
from rge.common.files import replacing, write_json
from rge.common.images import picture_bytes
from rge.common.options import parse_options
from rge.common.schema import ImageRef, Positive, Record, Target
from rge.data.sources import RecordFile, located
from rge.diagnose.knowability import knowability, measure_knowability

if TYPE_CHECKING:
    from data_prep.rationales.gain import GainJudge  # imports torch

SAMPLING_TEMPERATURE = 0.7
"""Default for several candidates, which would all be the same at 0."""
WINDOW = 1000
"""Records whose pictures and rationales are compared with each other."""
GAIN_WINDOW = 256
"""Pairs whose targets share one softmax when gains are measured."""

SCORES = ".scores.jsonl"
PICTURES = "pictures.parquet"
"""File beside records of the rmir pipeline: id, caption and origin of each picture."""


@dataclass(frozen=True, kw_only=True)
class RationaleOptions:
    """Have a model that sees query and target write oracle rationales for training records."""

    task: Literal[("auto", *prompts.TASKS)] = "auto"  # type: ignore[valid-type]
    """Task of the prompt; auto: inferred from each record."""
    leak: Literal["keep", "drop", "rewrite"] = "keep"
    """What to do with a rationale that copies more than `max_leak` of its target: keep, drop, or rewrite (request it
    once more, then drop it)."""
    max_leak: float = 0.5
    """Highest leak score that passes: the share of the target that a rationale gives away (docs/data_prep.md)."""
    max_words: AtLeastOne = 50
    """Maximum words of a rationale; longer ones are left out."""
    temperature: float | None = None
    """Sampling temperature; null: 0, or 0.7 if several are written (at 0 they would all be the same)."""
    candidates: AtLeastOne = 1
    """Rationales written for each pair."""
    select: str | None = None
    """Checkpoint that chooses among the candidates; null: take the first that passes the checks."""
    min_gain: float | None = None
    """Minimum gain of a chosen rationale (nats); those with less are left out. null: keep all."""
    min_knowability: float | None = None
    """Minimum share of a rationale's words that the checkpoint of `select` writes on its own; those with less are left
    out. null: keep all."""
    captions: Path | None = None
    """Parquet table with id and caption of target pictures, for the leak score; null: ``pictures.parquet`` beside the
    records, if it exists."""
    on_unanswered: Literal["wait", "proceed"] = "wait"
    """What to do if calls are unanswered (outages): wait until the same command has asked them again, or proceed
    without these pairs."""
    encoder: EncoderConfig | None = None
    """Encoder of target pictures, or of their captions, for the leak score (kinds as for ``rge data rmir``); null: the
    checkpoint of `select`, if there is one."""
    records: Path
    """Training records, JSON lines; or a folder of such files."""
    out: Path
    """Training records with rationales; a folder if ``records`` is one. Pictures are referenced, not copied."""
    model: ModelConfig
    """The writer, with the same settings as a model of ``rge data rmir``; its ``budget`` covers all files."""
    prices: Path | None = None
    """Price table (YAML) for a writer without prices in its settings; null: rge/calls/prices.yaml."""
    dry_run: bool = False
    """Make no calls; print the number of calls, tokens and the cost."""
    yes: bool = False
    """On a terminal, do not ask for confirmation before the first paid call; the estimate is still printed."""


@dataclass
class _Candidate:
    """One candidate: its text, or None with the reason in `faults`. Scores are None if they could not be measured."""

    text: str | None
    faults: list[str]
    leaks: dict[str, float] = field(default_factory=dict)
    measured: bool = False
    gain: float | None = None
    knowability: float | None = None

    @property
    def leak(self) -> float | None:
        """The highest of the measured leaks."""
        return max(self.leaks.values(), default=None)


@dataclass
class _Pair:
    """A query and one of its targets, the candidates, and the rationale that the checkpoint of `select` itself writes."""

    record: Record
    positive: Positive
    samples: list[_Candidate] = field(default_factory=list)
    own: str | None = None

    @property
    def known(self) -> str:
        """Instruction and text of the query."""
        return f"{self.record.instruction or ''} {self.record.query.text or ''}".strip()

    @property
    def good(self) -> list[_Candidate]:
        """Candidates that passed the checks."""
        return [sample for sample in self.samples if sample.text is not None and not sample.faults]

    @property
    def unmeasured(self) -> list[_Candidate]:
        """Candidates without a leak score."""
        return [sample for sample in self.samples if sample.text is not None and not sample.measured]

    def weigh(self, gain_K: np.ndarray, own: str | None) -> None:
        """Set gain and knowability of the candidates that passed, given the checkpoint's own rationale."""
        self.own = own
        for candidate, gain in zip(self.good, gain_K, strict=True):
            candidate.gain = float(gain)
            if own is not None:
                candidate.knowability = knowability(candidate.text or "", own, self.known)


Window = list[list[_Pair]]
"""The pairs of each record of a window."""


@dataclass
class _File:
    """The state of one file of records."""

    records: Path
    out: Path
    captions: dict[str, str] = field(default_factory=dict)  # by picture id or path
    written: list[list[_Candidate]] = field(default_factory=list)  # candidates of each pair
    counts: Counter[str] = field(default_factory=Counter)
    chosen: list[_Candidate] = field(default_factory=list)
    # (chosen rationale, the checkpoint's own, text of the query, group)
    beside_own: list[tuple[str, str, str, str]] = field(default_factory=list)

    def windows(self) -> Iterator[Window]:
        """All pairs, `WINDOW` records at a time."""
        written = iter(self.written)
        with self.records.open(encoding="utf-8-sig") as lines:
            records = (Record.model_validate_json(line) for line in lines if line.strip())
            while batch := list(islice(records, WINDOW)):
                yield [
                    [_Pair(record, target, next(written, [])) for target in record.positives]
                    for record in batch
                ]

    def pairs(self) -> Iterator[_Pair]:
        """All pairs."""
        return (pair for window in self.windows() for pair in chain.from_iterable(window))

    def beside(self, ending: str) -> Path:
        """A file beside the result."""
        return self.out.with_name(f"{self.out.name}{ending}")


def main(words: Sequence[str]) -> None:
    """Write rationales, or estimate their cost (``dry_run=true``)."""
    options = parse_options(RationaleOptions, words, "rge data rationales")
    options = replace(options, model=fill_prices({"model": options.model}, options.prices)["model"])
    check_model("model", options.model)
    if options.candidates > 1 and options.temperature == 0:
        raise UserError(
            "temperature=0 writes the same rationale every time: candidates needs a temperature above 0"
        )
    for key in ("min_gain", "min_knowability"):
        if getattr(options, key) is not None and options.select is None:
            raise UserError(f"{key} needs select=CHECKPOINT: the embedder that measures it")
    if options.dry_run:
        print(estimate(options))
        return
    if options.model.paid():
        confirm(estimate(options), yes=options.yes)
    print(json.dumps(write(options), indent=1))


def estimate(options: RationaleOptions) -> str:
    """Estimate calls, tokens and cost from the real prompts, without making a call or writing a file.

    Raises:
        UserError: the records cannot be read.
    """
    model, path = options.model, _replies(options)
    with closing(AnswerStore(path if path.is_file() else None)) as store:
        stats = {kind: store.billing_stats(model.endpoint, kind) for kind in (False, True)}
        kept = store.num_replies()
    tasks: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for file in _files(options):
        for pair in file.pairs():
            request = _request(pair, file.records.parent, options, look=False)
            bills = stats[bool(request.num_pictures())]
            given, answered = model.estimate(request)
            most_in, most_out = model.estimate(request, bills)
            total.update({"in": round(options.candidates * given * bills.mean_input)})
            more = {"calls": 1, "out": answered, "most in": most_in, "most out": most_out}
            total.update({key: options.candidates * number for key, number in more.items()})
            tasks[_task(pair, options)] += 1
    batch = model.mode == "batch"
    least = model.cost(total["in"], 0, batch=batch)
    most = model.cost(total["most in"], total["most out"], batch=batch)
    rows = "\n".join(f"| {task} | {number:,} |" for task, number in tasks.most_common())
    text = (
        f"| task | pairs |\n|---|---:|\n{rows}\n\n{total['calls']:,} calls, {total['in']:,} input tokens, at most "
        f"{total['out']:,} output tokens: from {least:,.2f} (input alone) to at most {most:,.2f}. No calls were made yet."
    )
    if kept:
        text += f" {kept:,} answers are stored from before and not paid for again."
    if options.leak == "rewrite":
        text += " Rewrites cost extra: one call for each rationale that copies too much."
    return text


def write(options: RationaleOptions) -> dict[str, Any]:
    """Write the records with rationales to ``out``, and a report to ``out`` + ``.report.json``.

    The calls of all files are made together, so that a provider's batches are awaited once.

    Returns:
        The report; for a folder, the reports by file name.

    Raises:
        UserError: an unreadable file; another process writes there; calls are unanswered, or all are rejected.
    """
    files = _files(options)
    judge = _judge(options)
    by_sight = leak_encoder(options, judge)
    for file in files:
        file.captions = read_captions(file.records, options.captions)
        if options.leak != "keep" and by_sight is None:
            _check_measurable(file, options)
    replies = _replies(options)
    with closing(open_locked(replies.with_suffix(".lock"))), closing(AnswerStore(replies)) as store:
        caller = Caller({options.model.name: options.model}, store, progress=True)
        _ask(caller, files, options, rewrite=False)
        _measure_leaks(files, by_sight)
        if options.leak == "rewrite":
            _ask(caller, files, options, rewrite=True)
            _measure_leaks(files, by_sight)
        reports = {}
        for file in files:
            _finish(file, options, judge)
            report = _report(file, options, judge, by_sight)
            report["models"] = [asdict(entry) for entry in store.ledger()]
            write_json(file.beside(".report.json"), report)
            reports[file.out.name] = report
    return reports if options.records.is_dir() else reports[options.out.name]


def _judge(options: RationaleOptions) -> "GainJudge | None":
    if options.select is None:
        return None
    from data_prep.rationales.gain import GainJudge

    judge = GainJudge(options.select)
    if options.min_knowability is not None and judge.encoder.query_mode == "direct":
        raise UserError(
            f"min_knowability: {options.select} writes no rationales for queries; give another select, or none"
        )
    return judge


def _files(options: RationaleOptions) -> list[_File]:
    """The files to process."""
    records, out = options.records, options.out
    if out.resolve() == records.resolve():
        raise UserError(f"out={out} would overwrite the records")
    found = [_File(records, out)]
    if records.is_dir():
        paths = [path for path in sorted(records.glob("*.jsonl")) if not path.name.endswith(SCORES)]
        found = [_File(path, out / path.name) for path in paths]
    if not found:
        raise UserError(f"records={records} is a folder without .jsonl files")
    for file in found:
        RecordFile(file.records)  # checks every record
    return found


def _replies(options: RationaleOptions) -> Path:
    out = options.out
    return out / "replies.sqlite" if options.records.is_dir() else out.with_name(f"{out.name}.replies.sqlite")


def _finish(file: _File, options: RationaleOptions, judge: "GainJudge | None") -> None:
    """Choose among the candidates, and write the result and the scores."""
    folder = file.records.parent
    for candidate in chain.from_iterable(file.written):
        if options.leak != "keep" and _leaky(candidate, options):
            candidate.faults.append("leak")
        file.counts.update(f"dropped: {fault}" for fault in candidate.faults)
    with replacing(file.out) as out, replacing(file.beside(SCORES)) as beside:
        with out.open("w", encoding="utf-8") as records, beside.open("w", encoding="utf-8") as scores:
            for window in file.windows():
                if judge is not None:
                    _weigh(judge, folder, window)
                for pairs in window:
                    chosen = [_choose(pair, options, file) for pair in pairs]
                    for pair, best in zip(pairs, chosen, strict=True):
                        scores.writelines(_score_lines(pair, best))
                    records.write(_record_line(pairs, chosen, file))


def _record_line(pairs: Sequence[_Pair], chosen: Sequence[_Candidate | None], file: _File) -> str:
    """The record with the targets that have a rationale; "" if none has."""
    kept = [
        pair.positive.model_copy(update={"rationale": best.text})
        for pair, best in zip(pairs, chosen, strict=True)
        if best is not None
    ]
    if not kept:
        file.counts["records without a rationale"] += 1
        return ""
    file.counts["records"] += 1
    return _moved(
        pairs[0].record.model_copy(update={"positives": kept}), file.records.parent, file.out.parent
    )


def _report(
    file: _File, options: RationaleOptions, judge: "GainJudge | None", by_sight: PictureLeak | None
) -> dict[str, Any]:
    leaks = [candidate.leak for candidate in file.chosen if candidate.leak is not None]
    report: dict[str, Any] = {
        "records": 0,
        "records without a rationale": 0,
        **file.counts,
        "kept": len(file.chosen),
        "leak_mean": _mean(leaks),
        "leak_above_limit": sum(leak > options.max_leak for leak in leaks),
        "leak_not_measured": len(file.chosen) - len(leaks),
    }
    if by_sight is not None:
        report["leak_encoder"] = by_sight.name
    if judge is not None:
        report["select"] = options.select
        report["gain_mean"] = _mean([best.gain for best in file.chosen if best.gain is not None])
        beside = file.beside_own
        report["knowability"] = measure_knowability(*zip(*beside, strict=True)) if beside else None
    return report


def _check_measurable(file: _File, options: RationaleOptions) -> None:
    """Raise if no target has a text or a caption to measure leaks by."""
    if not any(
        bare_text(pair.record, pair.positive) is not None or _caption(pair.positive, file.captions)
        for pair in file.pairs()
    ):
        raise UserError(
            f"leak={options.leak} cannot be measured: the targets of {file.records} are pictures without captions. "
            "Pass captions= (Parquet with id and caption) or encoder="
        )


def leak_encoder(options: RationaleOptions, judge: "GainJudge | None") -> PictureLeak | None:
    """Encoder for leaks of target pictures: `options.encoder`, else the checkpoint of `select`."""
    if options.encoder is not None:
        return PictureLeak.of(options.encoder)
    if judge is not None:
        return PictureLeak(CheckpointEncoder(judge.encoder, judge.batch_size), by_picture=True)
    return None


def _weigh(judge: "GainJudge", folder: Path, window: Window) -> None:
    """Measure gain and knowability of all candidates that passed the checks."""
    records = [pairs[0].record for pairs in window]
    written: Sequence[str | None] = judge.own(folder, records) or [None] * len(records)
    flat = [(pair, own) for pairs, own in zip(window, written, strict=True) for pair in pairs]
    for start in range(0, len(flat), GAIN_WINDOW):
        batch = flat[start : start + GAIN_WINDOW]
        asked = [(pair.record, pair.positive) for pair, _ in batch]
        texts = [[candidate.text or "" for candidate in pair.good] for pair, _ in batch]
        for (pair, own), gain_K in zip(batch, judge.judge(folder, asked, texts), strict=True):
            pair.weigh(gain_K, own)


def _score_lines(pair: _Pair, best: _Candidate | None) -> list[str]:
    rows = [
        {
            "record": pair.record.id,
            "target": pair.positive.id,
            "sample": sample,
            "chosen": candidate is best,
            "faults": candidate.faults,
            "rationale": candidate.text,
            **{f"leak_{name}": round(leak, 4) for name, leak in candidate.leaks.items()},
            "gain": candidate.gain,
            "knowability": candidate.knowability,
        }
        for sample, candidate in enumerate(pair.samples)
    ]
    return [f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows]


def _measure_leaks(files: Sequence[_File], by_sight: PictureLeak | None) -> None:
    """Measure leaks of the candidates that have none yet, comparing the pictures of one window of records."""
    for file in files:
        for window in file.windows():
            pairs = list(chain.from_iterable(window))
            new = [(pair, candidate) for pair in pairs for candidate in pair.unmeasured]
            for pair, candidate in new:
                candidate.leaks = _leaks_of_words(pair, candidate.text or "", file.captions)
                candidate.measured = True
            if new and by_sight is not None:
                _measure_by_sight(file, pairs, new, by_sight)


def _leaks_of_words(pair: _Pair, rationale: str, captions: Mapping[str, str]) -> dict[str, float]:
    record, positive = pair.record, pair.positive
    leaks = {"text": text_leak(rationale, bare_text(record, positive))}
    if positive.image:
        leaks["caption"] = caption_leak(rationale, _caption(positive, captions), pair.known)
    return {name: leak for name, leak in leaks.items() if leak is not None}


def _measure_by_sight(
    file: _File, pairs: Sequence[_Pair], new: Sequence[tuple[_Pair, _Candidate]], by_sight: PictureLeak
) -> None:
    shown = {
        target.id: Shown(str(located(target.image, file.records.parent)), _caption(target, file.captions))
        for pair in pairs
        for target in (*pair.record.positives, *pair.record.negatives)
        if target.image is not None
    }
    asked = [(pair.positive.id, candidate.text or "", pair.known) for pair, candidate in new]
    for (_, candidate), leak in zip(new, by_sight.scores(shown, asked), strict=True):
        if leak is not None:
            candidate.leaks["picture"] = leak


def _ask(caller: Caller, files: Sequence[_File], options: RationaleOptions, *, rewrite: bool) -> None:
    """Request the candidates of every pair, or rewrites of those that give too much away."""
    places: dict[int, tuple[_File, int, int]] = {}
    unanswered: list[Outcome] = []
    rejected: list[Outcome] = []
    for file in files:
        file.written = file.written or [[] for _ in file.pairs()]
        samples = [_wanted(of_pair, options, rewrite) for of_pair in file.written]
        file.counts["rewritten" if rewrite else "asked"] = sum(map(len, samples))

    def requests() -> Iterator[Request]:
        for file in files:
            for number, pair in enumerate(file.pairs()):
                wanted = _wanted(file.written[number], options, rewrite)
                if wanted:
                    request = _request(pair, file.records.parent, options, rewrite=rewrite)
                for sample in wanted:
                    places[len(places)] = file, number, sample
                    yield replace(request, sample=sample)

    def take(position: int, outcome: Outcome) -> None:
        file, number, sample = places[position]
        if outcome.unanswered:
            unanswered.append(outcome)
        if outcome.rejected:
            rejected.append(outcome)
        samples = file.written[number]
        samples += [_Candidate(None, [])] * (sample + 1 - len(samples))
        samples[sample] = _read(outcome, options)

    total = None if rewrite else sum(file.counts["asked"] for file in files)
    caller.run(requests(), take, read=prompts.read, title="rationales", total=total)
    if unanswered:
        message = (
            f"{len(unanswered)} of {len(places)} calls are unanswered, such as: {unanswered[0].error}. The other answers are "
            "stored; run the same command again to repeat only these calls"
        )
        if options.on_unanswered == "wait":
            raise UserError(f"{message}. on_unanswered=proceed continues without them")
        print(message, file=sys.stderr)
    if not rewrite and rejected and len(rejected) == len(places):
        caller.store.forget_rejections(outcome.key for outcome in rejected)
        raise RequestRejected(
            f"all {len(rejected)} calls were rejected, such as: {rejected[0].error}. Nothing was written; change the model's "
            "settings and run the same command again"
        )


def _wanted(written: Sequence[_Candidate], options: RationaleOptions, rewrite: bool) -> list[int]:
    """Numbers of a pair's candidates to write or rewrite."""
    if not rewrite:
        return list(range(options.candidates))
    return [sample for sample, candidate in enumerate(written) if _leaky(candidate, options)]


def _leaky(candidate: _Candidate, options: RationaleOptions) -> bool:
    return candidate.leak is not None and candidate.leak > options.max_leak


def _read(outcome: Outcome, options: RationaleOptions) -> _Candidate:
    try:
        text = prompts.read(outcome.answer())
    except ReplyError as error:
        return _Candidate(None, [error.kind])
    return _Candidate(text, checks.faults(text, max_words=options.max_words))


def _choose(pair: _Pair, options: RationaleOptions, file: _File) -> _Candidate | None:
    """The candidate with the highest gain among those that pass; the first of equals."""
    good, least = pair.good, options.min_knowability
    if not good:
        return None
    if least is not None:
        # None: it says nothing beyond the query, hence nothing that the model could not know.
        known = [sample for sample in good if sample.knowability is None or sample.knowability >= least]
        file.counts["below min_knowability"] += len(good) - len(known)
        if not known:
            file.counts["dropped: knowability"] += 1
            return None
        good = known
    best = max(good, key=lambda candidate: candidate.gain or 0.0)
    file.counts["not chosen"] += len(good) - 1
    if options.min_gain is not None and (best.gain or 0.0) < options.min_gain:
        file.counts["dropped: gain"] += 1
        return None
    file.chosen.append(best)
    if pair.own is not None:
        file.beside_own.append((best.text or "", pair.own, pair.known, pair.record.group))
    return best


def _task(pair: _Pair, options: RationaleOptions) -> str:
    return prompts.task_of(pair.record, pair.positive) if options.task == "auto" else options.task


def _request(
    pair: _Pair, folder: Path, options: RationaleOptions, *, rewrite: bool = False, look: bool = True
) -> Request:
    record, positive, model = pair.record, pair.positive, options.model
    parts = prompts.parts(
        record,
        positive,
        _task(pair, options),
        [_picture(ref, folder, model, look) for ref in record.query.images],
        _picture(positive.image, folder, model, look) if positive.image else None,
        max_words=options.max_words,
        rewrite=rewrite,
    )
    temperature = options.temperature
    if temperature is None:
        temperature = SAMPLING_TEMPERATURE if options.candidates > 1 else 0.0
    return Request(
        model.name,
        parts,
        temperature=temperature,
        max_tokens=max(256, 4 * options.max_words),
        form="<rationale>your rationale</rationale>",
        fields=(("rationale", None),),
    )


def read_captions(records: Path, given: Path | None) -> dict[str, str]:
    """Captions by id, from the given table or from the one that the rmir pipeline writes beside its records.

    Raises:
        UserError: the file is not such a table.
    """
    path = given or records.with_name(PICTURES)
    if given is None and not path.is_file():
        return {}
    try:
        table = pq.read_table(path, columns=["id", "caption"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"captions={path} is not a Parquet file with columns id and caption: {error}"
        ) from None
    rows = zip(table["id"].to_pylist(), table["caption"].to_pylist(), strict=True)
    return {str(name): caption for name, caption in rows if caption}


def _caption(target: Target, captions: Mapping[str, str]) -> str | None:
    """Caption of a target's picture, looked up by the target's id or the picture's path in the records."""
    return captions.get(target.id) or (captions.get(target.image) if isinstance(target.image, str) else None)


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


def _picture(ref: ImageRef, folder: Path, model: ModelConfig, look: bool) -> Picture:
    path = str(located(ref, folder))
    digest = hashlib.sha256(picture_bytes(path)).hexdigest() if look else ""
    return Picture(path, digest, model.max_side_px)


def _moved(record: Record, old: Path, new: Path) -> str:
    row = record.model_dump(exclude_none=True, exclude_defaults=True)
    shift = os.path.relpath(old.resolve(), new.resolve())  # ".." after a link leads out of the link's target

    def moved(image: str) -> str:
        return os.path.normpath(os.path.join(shift, image))

    for part in (*row["positives"], *row.get("negatives", ())):
        if "image" in part:
            part["image"] = moved(part["image"])
    if "images" in row["query"]:
        row["query"]["images"] = list(map(moved, row["query"]["images"]))
    return json_line(row)
