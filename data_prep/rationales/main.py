"""The command line: ``python -m data_prep rationales records=FILE.jsonl out=FILE.jsonl model=NAME [key=value ...]``.

Every positive of every record gets a rationale by a model that sees query and target. One that fails a check is left
out with its reason; a record without any is left out too. Answers are kept beside the result, so the command resumes.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.calls.cache import ReplyCache
from data_prep.calls.client import Caller, ModelConfig
from data_prep.calls.replies import ReplyError
from data_prep.calls.request import Picture, Request
from data_prep.options import UserError, read_options
from data_prep.rationales import checks, prompts
from data_prep.rmir.run import write_text
from rge.images import ImageError, picture_bytes
from rge.schema import Positive, Record
from rge.sources import RecordError, RecordFile

DEFAULTS = {
    "records": "", "out": "", "model": "", "base_url": "", "api": "openai", "key_env": "", "concurrency": "32",
    "max_words": "50", "temperature": "0", "task": "auto", "leak": "keep", "max_leak": "0.5", "input_price": "0",
    "output_price": "0", "budget": "",
}  # fmt: skip
WINDOW = 1000
"""Records asked about at a time."""


def main(words: Sequence[str]) -> None:
    """Write rationales.

    Args:
        words: see `DEFAULTS`. ``leak`` says what becomes of a rationale that copies more than ``max_leak`` of its
            target's text: keep, drop, or rewrite (asked once more, then dropped). ``task`` is auto or one of
            `prompts.TASKS`.

    Raises:
        UserError: a word is wrong, a file cannot be read, or the calls cannot go on.
    """
    options = DEFAULTS | read_options(words, DEFAULTS)
    for key in ("records", "out", "model"):
        if not options[key]:
            raise UserError(f"{key} is missing: {key}=...")
    if options["leak"] not in ("keep", "drop", "rewrite"):
        raise UserError(f"leak must be keep, drop or rewrite, got {options['leak']!r}")
    if options["task"] not in ("auto", *prompts.TASKS):
        raise UserError(f"task must be auto or one of {', '.join(prompts.TASKS)}; got {options['task']!r}")
    try:
        model = ModelConfig(
            name=options["model"],
            base_url=options["base_url"] or None,
            api=options["api"],
            key_env=options["key_env"] or None,
            concurrency=int(options["concurrency"]),
            input_price=float(options["input_price"]),
            output_price=float(options["output_price"]),
            budget=float(options["budget"]) if options["budget"] else None,
        )
        settings = {
            "max_words": int(options["max_words"]),
            "temperature": float(options["temperature"]),
            "max_leak": float(options["max_leak"]),
        }
    except ValueError as error:
        raise UserError(f"a number is needed: {error}") from None
    records, out = Path(options["records"]), Path(options["out"])
    report = write(records, out, model, task=options["task"], leak=options["leak"], **settings)
    print(json.dumps(report, indent=1))


def write(
    records: Path,
    out: Path,
    model: ModelConfig,
    *,
    task: str,
    leak: str,
    max_leak: float,
    max_words: int,
    temperature: float,
) -> dict[str, Any]:
    """Write ``out`` with rationales, and ``out`` + ``.report.json``.

    Args:
        records: training records.
        out: training records with rationales; pictures are referred to where they are.
        model: the writer.
        task: auto or one of `prompts.TASKS`.
        leak: keep, drop or rewrite.
        max_leak: see `checks.leak`.
        max_words: of a rationale.
        temperature: of the writer.

    Returns:
        The report.

    Raises:
        UserError: see `main`.
    """
    try:
        RecordFile(records)
    except RecordError as error:
        raise UserError(str(error)) from None
    if out.resolve() == records.resolve():
        raise UserError(f"out={out} would overwrite the records")
    cache = ReplyCache(out.with_name(f"{out.name}.replies.sqlite"))
    caller = Caller({model.name: model}, cache, progress="rationales")
    counts: Counter[str] = Counter()
    leaks: list[float] = []
    lines: list[str] = []

    def ask(pairs: list[tuple[Record, Positive]], rewrite: bool) -> list[tuple[str | None, list[str], float]]:
        requests = []
        for record, positive in pairs:
            found = prompts.task_of(record, positive) if task == "auto" else task
            pictures = [_picture(records.parent / ref, model) for ref in record.query.images]
            target = _picture(records.parent / positive.image, model) if positive.image else None
            parts = prompts.parts(
                record, positive, found, pictures, target, max_words=max_words, rewrite=rewrite
            )
            requests.append(
                Request(model.name, parts, temperature=temperature, max_tokens=max(256, 4 * max_words))
            )
        results = []
        for (_, positive), outcome in zip(pairs, caller.run(requests), strict=True):
            if outcome.lost:
                raise UserError(
                    f"a call got no answer: {outcome.error}. What was answered is kept; run this again"
                )
            try:
                if outcome.error is not None:
                    raise outcome.error
                text = prompts.read(outcome.reply)
            except ReplyError as error:
                results.append((None, [error.kind], 0.0))
                continue
            results.append((text, checks.faults(text, max_words=max_words), checks.leak(text, positive.text)))
        return results

    for window in _windows(records):
        pairs = [(record, positive) for record in window for positive in record.positives]
        results = ask(pairs, rewrite=False)
        if leak == "rewrite":
            again = [row for row, (_, _, score) in enumerate(results) if score > max_leak]
            counts["rewritten"] += len(again)
            for row, result in zip(again, ask([pairs[row] for row in again], rewrite=True), strict=True):
                results[row] = result
        position = 0
        for record in window:
            kept = []
            for positive in record.positives:
                text, faults, score = results[position]
                position += 1
                if text is not None and leak != "keep" and score > max_leak:
                    faults = [*faults, "leak"]
                counts["asked"] += 1
                counts.update(f"dropped: {fault}" for fault in faults)
                if text is not None and not faults:
                    kept.append(positive.model_copy(update={"rationale": text}))
                    leaks.append(score)
            counts["records"] += bool(kept)
            counts["records without a rationale"] += not kept
            if kept:
                lines.append(
                    _moved(record.model_copy(update={"positives": kept}), records.parent, out.parent)
                )
    write_text(out, "".join(f"{line}\n" for line in lines))
    report = {
        **counts,
        "kept": len(leaks),
        "leak_mean": round(sum(leaks) / len(leaks), 4) if leaks else 0.0,
        "leak_above_limit": sum(score > max_leak for score in leaks),
        "models": cache.ledger(),
    }
    write_text(out.with_name(f"{out.name}.report.json"), json.dumps(report, indent=1) + "\n")
    cache.close()
    return report


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


def _picture(ref: Path, model: ModelConfig) -> Picture:
    try:
        return Picture(str(ref), hashlib.sha256(picture_bytes(str(ref))).hexdigest(), model.max_side_px)
    except ImageError as error:
        raise UserError(str(error)) from None


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
