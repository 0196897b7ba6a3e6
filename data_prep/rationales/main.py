"""The command line: ``rge data rationales records=FILE.jsonl out=FILE.jsonl model=NAME [key=value ...]``.

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
from typing import Annotated, Any, Literal

import pyarrow.parquet as pq
from pydantic import Field

from data_prep.rationales import checks, prompts
from rge.calls.caller import Caller, Outcome
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
    """Highest leak score that passes: the share of the target's words that the rationale gives away (docs/data_prep.md)."""
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
    captions: Path | None = None
    """Parquet table with id and caption of target pictures, which the leak score compares with; null: ``pictures.parquet``
    beside the records, if it is there."""


@dataclass(frozen=True, kw_only=True)
class RationaleOptions(Settings):
    """Write oracle rationales for training records by a model that sees query and target."""

    records: Path
    """Training records, JSON lines."""
    out: Path
    """Training records with rationales; pictures are referred to where they are."""
    model: str
    """Name the endpoint knows the writer by."""
    base_url: str | None = None
    """Such as http://HOST:8000/v1 of vLLM; null: the provider's own."""
    api: Literal["openai", "anthropic", "gemini"] = "openai"
    """openai (any compatible endpoint), anthropic or gemini."""
    mode: Literal["calls", "batch"] = "calls"
    """calls, or batch: the provider's batch mode, at half the price and within a day."""
    key_env: str | None = None
    """Environment variable that holds the key; null: the endpoint needs none."""
    concurrency: AtLeastOne = 32
    """Calls under way at once."""
    input_price: float = 0.0
    """Per million tokens."""
    output_price: float = 0.0
    """Per million tokens."""
    picture_tokens: int = 1500
    """Tokens of one picture, for estimates."""
    budget: float | None = None
    """What the model may cost in all, over all runs on one cache; null: no limit."""
    dry_run: bool = False
    """Ask nothing; print calls, tokens and money."""


@dataclass
class _Written:
    # One candidate: its text, or None and why there is none.
    text: str | None
    faults: list[str]
    leak: float = 0.0
    gain: float | None = None


@dataclass
class _Tally:
    counts: Counter[str] = field(default_factory=Counter)
    leaks: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)


def main(words: Sequence[str]) -> None:
    """Write rationales, or say what they would cost (``dry_run=true``).

    Args:
        words: see `RationaleOptions`.

    Raises:
        UserError: a word is wrong, a file cannot be read, or the calls cannot go on.
    """
    options = parse_options(RationaleOptions, words, "rge data rationales")
    model = ModelConfig(
        name=options.model,
        base_url=options.base_url,
        api=options.api,
        mode=options.mode,
        key_env=options.key_env,
        concurrency=options.concurrency,
        input_price=options.input_price,
        output_price=options.output_price,
        picture_tokens=options.picture_tokens,
        budget=options.budget,
    )
    check_model(model.name, model)
    if options.candidates > 1 and options.temperature == 0:
        raise UserError(
            "temperature=0 writes the same rationale every time: candidates needs a temperature above 0"
        )
    if options.min_gain is not None and options.select is None:
        raise UserError("min_gain needs select=CHECKPOINT: the embedder that measures the gain")
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
    store = AnswerStore(out.with_name(f"{out.name}.replies.sqlite"))
    caller = Caller({model.name: model}, store, progress=True)
    tally = _Tally()
    captions = read_captions(records, settings.captions)
    lines: list[str] = []
    for window in _windows(records):
        pairs = [(record, positive) for record in window for positive in record.positives]
        written = _ask_all(caller, pairs, records.parent, model, settings, tally, captions)
        if judge is not None:
            for start in range(0, len(pairs), GAIN_WINDOW):
                some = range(start, min(start + GAIN_WINDOW, len(pairs)))
                good = [[one for one in written[row] if not one.faults] for row in some]
                found = judge.judge(
                    records.parent,
                    [pairs[row] for row in some],
                    [[one.text or "" for one in ones] for ones in good],
                )
                for ones, gain_K in zip(good, found, strict=True):
                    for one, gain in zip(ones, gain_K, strict=True):
                        one.gain = float(gain)
        position = 0
        for record in window:
            kept = []
            for positive in record.positives:
                text = _choose(written[position], settings, tally)
                position += 1
                if text is not None:
                    kept.append(positive.model_copy(update={"rationale": text}))
            tally.counts["records"] += bool(kept)
            tally.counts["records without a rationale"] += not kept
            if kept:
                lines.append(
                    _moved(record.model_copy(update={"positives": kept}), records.parent, out.parent)
                )
    write_text(out, "".join(f"{line}\n" for line in lines))
    report = {
        **tally.counts,
        "kept": len(tally.leaks),
        "leak_mean": _mean(tally.leaks),
        "leak_above_limit": sum(score > settings.max_leak for score in tally.leaks),
        **({"gain_mean": _mean(tally.gains), "select": settings.select} if judge is not None else {}),
        "models": [asdict(one) for one in store.ledger()],
    }
    write_text(out.with_name(f"{out.name}.report.json"), json.dumps(report, indent=1) + "\n")
    store.close()
    return report


def _ask_all(
    caller: Caller,
    pairs: list[Pair],
    folder: Path,
    model: ModelConfig,
    settings: Settings,
    tally: _Tally,
    captions: Mapping[str, str],
) -> list[list[_Written]]:
    """The candidates of each pair, checked; a leak that is not kept is a fault."""
    asked = [(row, sample) for row in range(len(pairs)) for sample in range(settings.candidates)]

    def ask(wanted: list[tuple[int, int]], rewrite: bool) -> list[_Written]:
        requests = [
            _request(pairs[row], folder, model, settings, sample=sample, rewrite=rewrite)
            for row, sample in wanted
        ]
        return [
            _read(outcome, *pairs[row], settings, captions)
            for (row, _), outcome in zip(
                wanted, caller.run(requests, read=prompts.read, title="rationales"), strict=True
            )
        ]

    found = dict(zip(asked, ask(asked, rewrite=False), strict=True))
    if settings.leak == "rewrite":
        again = [one for one in asked if found[one].leak > settings.max_leak]
        tally.counts["rewritten"] += len(again)
        found.update(zip(again, ask(again, rewrite=True), strict=True))
    for one in found.values():
        if one.text is not None and settings.leak != "keep" and one.leak > settings.max_leak:
            one.faults.append("leak")
    tally.counts["asked"] += len(asked)
    tally.counts.update(f"dropped: {fault}" for one in found.values() for fault in one.faults)
    return [[found[row, sample] for sample in range(settings.candidates)] for row in range(len(pairs))]


def _read(
    outcome: Outcome, record: Record, positive: Positive, settings: Settings, captions: Mapping[str, str]
) -> _Written:
    if outcome.lost:
        raise UserError(f"a call got no answer: {outcome.error}. What was answered is kept; run this again")
    try:
        text = prompts.read(outcome.answer())
    except ReplyError as error:
        return _Written(None, [error.kind])
    leak = checks.leak(text, positive.text)
    if positive.text is None:
        known = f"{record.instruction or ''} {record.query.text or ''}"
        leak = checks.picture_leak(text, captions.get(positive.id), known)
    return _Written(text, checks.faults(text, max_words=settings.max_words), leak)


def _choose(candidates: list[_Written], settings: Settings, tally: _Tally) -> str | None:
    good = [one for one in candidates if one.text is not None and not one.faults]
    if not good:
        return None
    # The first that passes, or the one that gains most; the first of equals.
    best = max(good, key=lambda one: one.gain or 0.0) if settings.select is not None else good[0]
    tally.counts["not chosen"] += len(good) - 1
    if settings.min_gain is not None and best.gain is not None and best.gain < settings.min_gain:
        tally.counts["dropped: gain"] += 1
        return None
    tally.leaks.append(best.leak)
    if best.gain is not None:
        tally.gains.append(best.gain)
    return best.text


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
    with path.open(encoding="utf-8") as lines:
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
