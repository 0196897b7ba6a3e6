"""The command line: ``rge data rationales records=FILE.jsonl out=FILE.jsonl model.name=NAME [key=value ...]``.

Every positive of every record gets a rationale by a model that sees query and target. One that fails a check is left
out with its reason; a record without any is left out too. Answers are kept beside the result, so the command resumes.
With ``candidates=N`` several are written, and ``select=CHECKPOINT`` lets an embedder choose among those that pass.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pyarrow.parquet as pq
from pydantic import Field

from data_prep.rationales import checks, prompts
from data_prep.rationales.leak import PictureLeak, Shown, caption_leak, text_leak
from data_prep.rmir.config import EncoderConfig
from data_prep.rmir.pictures.encoders import CheckpointEncoder
from rge.calls.caller import LOST_RUNS, Caller, Outcome
from rge.calls.model_config import ModelConfig, check_model
from rge.calls.replies import ReplyError
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore
from rge.common.errors import UserError
from rge.common.files import write_text
from rge.common.images import picture_bytes
from rge.common.options import parse_options
from rge.common.schema import ImageRef, Positive, Record
from rge.data.sources import RecordFile, located
from rge.diagnose.knowability import knowability, measure_knowability

if TYPE_CHECKING:
    from data_prep.rationales.gain import GainJudge  # imports torch

SAMPLING_TEMPERATURE = 0.7
"""Of several candidates, where none is given: at 0 all of them would be the same."""
WINDOW = 1000
"""Records asked about at a time."""
GAIN_WINDOW = 256
"""Pairs whose targets a rationale must tell apart."""

PICTURES = "pictures.parquet"
"""Beside records of the rmir pipeline: id, caption and origin of each picture."""

Pair = tuple[Record, Positive]


AtLeastOne = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How rationales are asked for and chosen."""

    task: Literal[("auto", *prompts.TASKS)] = "auto"  # type: ignore[valid-type]
    """What is asked for; auto: what each record's category calls for."""
    leak: Literal["keep", "drop", "rewrite"] = "keep"
    """What becomes of a rationale that copies more than `max_leak` of its target: keep, drop, or rewrite (asked once more,
    then dropped)."""
    max_leak: float = 0.5
    """Highest leak score that passes: the share of the target that the rationale gives away (docs/data_prep.md)."""
    max_words: AtLeastOne = 50
    """Words of a rationale, at most; longer ones are left out."""
    temperature: float | None = None
    """Sampling temperature; null: 0, or 0.7 where several are written, which at 0 would all be the same."""
    candidates: AtLeastOne = 1
    """Rationales written for each pair."""
    select: str | None = None
    """Checkpoint that chooses among them; null takes the first that passes the checks."""
    min_gain: float | None = None
    """A chosen rationale that gains less (nats) is left out; null keeps every one."""
    min_knowability: float | None = None
    """Rationales of whose words the checkpoint of `select` writes a smaller share by itself are left out; null keeps every
    one."""
    captions: Path | None = None
    """Parquet table with id and caption of target pictures, which the leak score compares with; null: ``pictures.parquet``
    beside the records, if it is there."""
    encoder: EncoderConfig | None = None
    """Encoder that the leak score sees target pictures by, or their captions (kinds as of ``rge data rmir``); null: the
    checkpoint of `select`, if there is one."""


@dataclass(frozen=True, kw_only=True)
class RationaleOptions(Settings):
    """Write oracle rationales for training records by a model that sees query and target."""

    records: Path
    """Training records, JSON lines."""
    out: Path
    """Training records with rationales; pictures are referred to where they are."""
    model: ModelConfig
    """The writer: its settings are those of a model of ``rge data rmir``."""
    dry_run: bool = False
    """Ask nothing; print calls, tokens and money."""


@dataclass
class _Written:
    # One candidate: its text, or None and why there is none. Scores are None where they could not be measured.
    text: str | None
    faults: list[str]
    leaks: dict[str, float] = field(default_factory=dict)
    gain: float | None = None
    knowability: float | None = None

    @property
    def leak(self) -> float | None:
        """The worst of what was measured."""
        return max(self.leaks.values(), default=None)


@dataclass
class _Tally:
    counts: Counter[str] = field(default_factory=Counter)
    chosen: list[_Written] = field(default_factory=list)
    # Of each chosen rationale: itself, the model's own, text of the query, group.
    beside_own: list[tuple[str, str, str, str]] = field(default_factory=list)


def main(words: Sequence[str]) -> None:
    """Write rationales, or say what they would cost (``dry_run=true``).

    Args:
        words: see `RationaleOptions`.

    Raises:
        UserError: a word is wrong, a file cannot be read, or the calls cannot go on.
    """
    options = parse_options(RationaleOptions, words, "rge data rationales")
    model = options.model
    check_model("model", model)
    if options.candidates > 1 and options.temperature == 0:
        raise UserError(
            "temperature=0 writes the same rationale every time: candidates needs a temperature above 0"
        )
    for key in ("min_gain", "min_knowability"):
        if getattr(options, key) is not None and options.select is None:
            raise UserError(f"{key} needs select=CHECKPOINT: the embedder that measures it")
    if options.dry_run:
        print(estimate(options.records, model, options))
        return
    report = write(options.records, options.out, model, options)
    print(json.dumps(report, indent=1))


def estimate(records: Path, model: ModelConfig, settings: Settings) -> str:
    """Calls, tokens and money, from the real prompts and without asking or writing anything.

    Raises:
        UserError: the records cannot be read.
    """
    RecordFile(records)  # checks every record
    calls = tokens_in = tokens_out = 0
    tasks: Counter[str] = Counter()
    for window in _windows(records):
        for pair in ((record, positive) for record in window for positive in record.positives):
            request = _request(pair, records.parent, model, settings, look=False)
            cost_in, cost_out = model.estimate(request)
            calls += settings.candidates
            tokens_in += settings.candidates * cost_in
            tokens_out += settings.candidates * cost_out
            tasks[_task(pair, settings)] += 1
    lines = [
        "| task | pairs |",
        "|---|---:|",
        *(f"| {task} | {number:,} |" for task, number in tasks.most_common()),
    ]
    lines.append(
        f"\n{calls:,} calls, {tokens_in:,} input tokens, at most {tokens_out:,} output tokens, at most "
        f"{model.cost(tokens_in, tokens_out, batch=model.mode == 'batch'):,.2f}. Nothing was asked."
        + (
            " Rewrites come on top: one call for each rationale that copies too much."
            if settings.leak == "rewrite"
            else ""
        )
    )
    return "\n".join(lines)


def write(records: Path, out: Path, model: ModelConfig, settings: Settings) -> dict[str, Any]:
    """Write ``out`` with rationales, and ``out`` + ``.report.json``.

    Args:
        records: training records.
        out: training records with rationales; pictures are referred to where they are.
        model: the writer.
        settings: see `Settings`.

    Returns:
        The report.

    Raises:
        UserError: see `main`.
    """
    RecordFile(records)  # checks every record
    if out.resolve() == records.resolve():
        raise UserError(f"out={out} would overwrite the records")
    judge = None
    if settings.select is not None:
        from data_prep.rationales.gain import GainJudge

        judge = GainJudge(settings.select)
        if settings.min_knowability is not None and judge.encoder.query_mode == "direct":
            raise UserError(
                f"min_knowability: {settings.select} writes no rationales for queries; give another select, or none"
            )
    by_sight = leak_encoder(settings, judge)
    captions = read_captions(records, settings.captions)
    if settings.leak != "keep" and by_sight is None and not _measurable(records, captions):
        raise UserError(
            f"leak={settings.leak}: no leak can be measured, for the targets are pictures without captions. Give captions= "
            "(Parquet with id and caption) or encoder="
        )
    store = AnswerStore(out.with_name(f"{out.name}.replies.sqlite"))
    caller = Caller({model.name: model}, store, progress=True)
    tally = _Tally()
    lines: list[str] = []
    scores: list[str] = []
    for window in _windows(records):
        pairs = [(record, positive) for record in window for positive in record.positives]
        measure = _Leaks(records.parent, pairs, captions, by_sight)
        written = _ask_all(caller, pairs, records.parent, model, settings, tally, measure)
        own = judge.own(records.parent, window) if judge is not None else None
        if judge is not None:
            own_of = own and [
                text for record, text in zip(window, own, strict=True) for _ in record.positives
            ]
            _weigh(judge, records.parent, pairs, written, own_of)
        position = 0
        for number, record in enumerate(window):
            kept = []
            for positive in record.positives:
                best = _choose(written[position], settings, tally)
                scores += _score_lines(record, positive, written[position], best)
                if best is not None:
                    kept.append(positive.model_copy(update={"rationale": best.text}))
                    if own is not None:
                        tally.beside_own.append((best.text or "", own[number], _known(record), record.group))
                position += 1
            tally.counts["records"] += bool(kept)
            tally.counts["records without a rationale"] += not kept
            if kept:
                lines.append(
                    _moved(record.model_copy(update={"positives": kept}), records.parent, out.parent)
                )
    write_text(out, "".join(f"{line}\n" for line in lines))
    write_text(out.with_name(f"{out.name}.scores.jsonl"), "".join(f"{line}\n" for line in scores))
    leaks = [one.leak for one in tally.chosen if one.leak is not None]
    report = {
        **tally.counts,
        "kept": len(tally.chosen),
        "leak_mean": _mean(leaks),
        "leak_above_limit": sum(leak > settings.max_leak for leak in leaks),
        "leak_not_measured": len(tally.chosen) - len(leaks),
        **({"leak_encoder": by_sight.name} if by_sight is not None else {}),
        **(
            {
                "select": settings.select,
                "gain_mean": _mean([one.gain for one in tally.chosen if one.gain is not None]),
                "knowability": measure_knowability(*zip(*tally.beside_own, strict=True))
                if tally.beside_own
                else None,
            }
            if judge is not None
            else {}
        ),
        "models": [asdict(one) for one in store.ledger()],
    }
    write_text(out.with_name(f"{out.name}.report.json"), json.dumps(report, indent=1) + "\n")
    store.close()
    return report


def _measurable(records: Path, captions: Mapping[str, str]) -> bool:
    """Whether any target has a text or a caption."""
    positives = (
        positive for window in _windows(records) for record in window for positive in record.positives
    )
    return any(positive.text is not None or positive.id in captions for positive in positives)


def leak_encoder(settings: Settings, judge: "GainJudge | None") -> PictureLeak | None:
    """What target pictures are looked at with: the encoder that is named, or the checkpoint that chooses."""
    if settings.encoder is not None:
        return PictureLeak.of(settings.encoder)
    if judge is not None:
        return PictureLeak(CheckpointEncoder(judge.encoder, judge.batch_size), by_picture=True)
    return None


def _weigh(
    judge: "GainJudge", folder: Path, pairs: list[Pair], written: list[list[_Written]], own: list[str] | None
) -> None:
    """Gain and knowability of all candidates that passed the checks."""
    for start in range(0, len(pairs), GAIN_WINDOW):
        some = range(start, min(start + GAIN_WINDOW, len(pairs)))
        good = [[one for one in written[row] if not one.faults] for row in some]
        texts = [[one.text or "" for one in ones] for ones in good]
        found = judge.judge(folder, [pairs[row] for row in some], texts)
        for row, ones, gain_K in zip(some, good, found, strict=True):
            for one, gain in zip(ones, gain_K, strict=True):
                one.gain = float(gain)
                if own is not None:
                    one.knowability = knowability(one.text or "", own[row], _known(pairs[row][0]))


def _score_lines(
    record: Record, positive: Positive, written: list[_Written], best: _Written | None
) -> list[str]:
    rows = [
        {
            "record": record.id,
            "target": positive.id,
            "sample": sample,
            "chosen": one is best,
            "faults": one.faults,
            "rationale": one.text,
            **{f"leak_{name}": round(leak, 4) for name, leak in one.leaks.items()},
            "gain": one.gain,
            "knowability": one.knowability,
        }
        for sample, one in enumerate(written)
    ]
    return [json.dumps(row, ensure_ascii=False) for row in rows]


def _known(record: Record) -> str:
    return f"{record.instruction or ''} {record.query.text or ''}".strip()


class _Leaks:
    """Leak scores of rationales for the pairs of one window, whose pictures are told apart."""

    def __init__(
        self, folder: Path, pairs: list[Pair], captions: Mapping[str, str], by_sight: PictureLeak | None
    ):
        self.pairs, self.captions, self.by_sight = pairs, captions, by_sight
        targets = [
            target for record, _ in pairs for target in (*record.positives, *record.negatives) if target.image
        ]
        self.shown = {
            target.id: Shown(str(located(target.image, folder)), captions.get(target.id))
            for target in targets
            if target.image is not None
        }

    def measure(self, found: Mapping[tuple[int, int], _Written]) -> None:
        """Fill in the leaks of what was written, by row of the pair and number of the draw."""
        texts = {at: one.text for at, one in found.items() if one.text is not None}
        for at, text in texts.items():
            record, positive = self.pairs[at[0]]
            leaks = {
                "text": text_leak(text, positive.text),
                "caption": caption_leak(text, self.captions.get(positive.id), _known(record))
                if positive.image
                else None,
            }
            found[at].leaks = {name: leak for name, leak in leaks.items() if leak is not None}
        if self.by_sight is not None:
            asked = [
                (self.pairs[row][1].id, text, _known(self.pairs[row][0])) for (row, _), text in texts.items()
            ]
            for at, leak in zip(texts, self.by_sight.scores(self.shown, asked), strict=True):
                if leak is not None:
                    found[at].leaks["picture"] = leak


def _ask_all(
    caller: Caller,
    pairs: list[Pair],
    folder: Path,
    model: ModelConfig,
    settings: Settings,
    tally: _Tally,
    leaks: _Leaks,
) -> list[list[_Written]]:
    """The candidates of each pair, checked; a leak that is not kept is a fault."""
    asked = [(row, sample) for row in range(len(pairs)) for sample in range(settings.candidates)]

    def ask(wanted: list[tuple[int, int]], rewrite: bool) -> dict[tuple[int, int], _Written]:
        requests = [
            _request(pairs[row], folder, model, settings, sample=sample, rewrite=rewrite)
            for row, sample in wanted
        ]
        outcomes = caller.run(requests, read=prompts.read, title="rationales")
        works = bool(caller.counts.asked or caller.counts.cached)
        if again := caller.held_up_by(outcomes, works=works):
            raise UserError(
                f"{len(again)} of {len(requests)} calls got no answer, such as: {again[0].error}. What was answered is kept; run "
                f"this again. A call without an answer in {LOST_RUNS} runs is passed over, where others are answered"
            )
        new = {at: _read(outcome, settings) for at, outcome in zip(wanted, outcomes, strict=True)}
        leaks.measure(new)
        return new

    def leaky(one: _Written) -> bool:
        return one.leak is not None and one.leak > settings.max_leak

    found = ask(asked, rewrite=False)
    if settings.leak == "rewrite":
        again = [at for at in asked if leaky(found[at])]
        tally.counts["rewritten"] += len(again)
        found.update(ask(again, rewrite=True))
    for one in found.values():
        if settings.leak != "keep" and leaky(one):
            one.faults.append("leak")
    tally.counts["asked"] += len(asked)
    tally.counts.update(f"dropped: {fault}" for one in found.values() for fault in one.faults)
    return [[found[row, sample] for sample in range(settings.candidates)] for row in range(len(pairs))]


def _read(outcome: Outcome, settings: Settings) -> _Written:
    try:
        text = prompts.read(outcome.answer())
    except ReplyError as error:
        return _Written(None, [error.kind])
    return _Written(text, checks.faults(text, max_words=settings.max_words))


def _choose(candidates: list[_Written], settings: Settings, tally: _Tally) -> _Written | None:
    good = [one for one in candidates if one.text is not None and not one.faults]
    if not good:
        return None
    if settings.min_knowability is not None:
        # One that says nothing beyond the query (None) holds nothing that the model could not know.
        known = [
            one for one in good if one.knowability is None or one.knowability >= settings.min_knowability
        ]
        tally.counts["below min_knowability"] += len(good) - len(known)
        good = known
        if not good:
            tally.counts["dropped: knowability"] += 1
            return None
    # The first that passes, or the one that gains most; the first of equals.
    best = max(good, key=lambda one: one.gain or 0.0) if settings.select is not None else good[0]
    tally.counts["not chosen"] += len(good) - 1
    if settings.min_gain is not None and best.gain is not None and best.gain < settings.min_gain:
        tally.counts["dropped: gain"] += 1
        return None
    tally.chosen.append(best)
    return best


def _task(pair: Pair, settings: Settings) -> str:
    return prompts.task_of(*pair) if settings.task == "auto" else settings.task


def _request(
    pair: Pair,
    folder: Path,
    model: ModelConfig,
    settings: Settings,
    *,
    sample: int = 0,
    rewrite: bool = False,
    look: bool = True,
) -> Request:
    record, positive = pair
    parts = prompts.parts(
        record,
        positive,
        _task(pair, settings),
        [_picture(ref, folder, model, look) for ref in record.query.images],
        _picture(positive.image, folder, model, look) if positive.image else None,
        max_words=settings.max_words,
        rewrite=rewrite,
    )
    return Request(
        model.name,
        parts,
        temperature=_temperature(settings),
        max_tokens=max(256, 4 * settings.max_words),
        sample=sample,
        form="<rationale>your rationale</rationale>",
        fields=(("rationale", None),),
    )


def _temperature(settings: Settings) -> float:
    if settings.temperature is not None:
        return settings.temperature
    return SAMPLING_TEMPERATURE if settings.candidates > 1 else 0.0


def read_captions(records: Path, given: Path | None) -> dict[str, str]:
    """Captions by id: of the table that is named, or of the one that the rmir pipeline writes beside its records.

    Raises:
        UserError: it is no such table.
    """
    path = given or records.with_name(PICTURES)
    if given is None and not path.is_file():
        return {}
    try:
        table = pq.read_table(path, columns=["id", "caption"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"captions={path} is no Parquet file with columns id and caption: {error}") from None
    rows = zip(table["id"].to_pylist(), table["caption"].to_pylist(), strict=True)
    return {str(name): caption for name, caption in rows if caption}


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


def _windows(path: Path) -> Iterator[list[Record]]:
    window = []
    with path.open(encoding="utf-8-sig") as lines:
        for line in lines:
            if line.strip():
                window.append(Record.model_validate_json(line))
            if len(window) == WINDOW:
                yield window
                window = []
    if window:
        yield window


def _picture(ref: ImageRef, folder: Path, model: ModelConfig, look: bool) -> Picture:
    path = str(located(ref, folder))
    digest = hashlib.sha256(picture_bytes(path)).hexdigest() if look else ""
    return Picture(path, digest, model.max_side_px)


def _moved(record: Record, old: Path, new: Path) -> str:
    row = record.model_dump(exclude_none=True, exclude_defaults=True)
    shift = os.path.relpath(old, new)
    for part in (*row["positives"], *row.get("negatives", ())):
        if "image" in part:
            part["image"] = os.path.normpath(os.path.join(shift, part["image"]))
    if "images" in row["query"]:
        row["query"]["images"] = [
            os.path.normpath(os.path.join(shift, image)) for image in row["query"]["images"]
        ]
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"))
