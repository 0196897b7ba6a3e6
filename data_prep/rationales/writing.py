"""Write, check and choose rationales, and write the records that get one."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from data_prep.rationales import prompts
from data_prep.rationales.leak import caption_leak, picture_leaks, text_leak
from data_prep.rationales.options import RationaleOptions
from data_prep.rationales.pairs import (
    SCORES,
    Candidate,
    Pair,
    Source,
    Window,
    evenly,
    read_captions,
    replies_of,
    request_for,
    sources_of,
    written_row,
)
from data_prep.rmir.config import check_encoder
from data_prep.rmir.pictures.encoders import CheckpointEncoder, ImageEncoder, load_encoder
from rge.calls.caller import Caller, Outcome, check_answered
from rge.calls.request import Request
from rge.calls.store import AnswerStore
from rge.calls.wire.replies import ReplyError
from rge.common.errors import UserError
from rge.common.files import held, replacing, write_json
from rge.data.sources import json_line
from rge.data.verdicts import Verdicts

if TYPE_CHECKING:
    from data_prep.rationales.gain import GainJudge  # imports torch

LEAK_ENCODERS = ("siglip", "checkpoint")
"""Kinds of encoders that judge how far a rationale singles out the target's picture."""
GAIN_WINDOW = 256
"""Most pairs whose targets share one softmax when gains are measured."""


class Writing:
    """The command at work. Raises `UserError`: an unreadable file, or a checkpoint or encoder that cannot be used."""

    def __init__(self, options: RationaleOptions):
        self.options, self.sources = options, sources_of(options)
        if options.select is not None or options.encoder is not None:
            # Measuring opens these, negatives' too, which no call shows; after all calls are paid. Only `select` embeds queries.
            records = [source.records for source in self.sources]
            if faults := Verdicts().undecodable(records, queries=options.select is not None):
                looks = (
                    "encoder looks at every target's" if options.select is None else "select looks at every"
                )
                listed = "\n".join(faults)
                raise UserError(
                    f"{looks} picture: repair these, or leave out their records:\n{listed}",
                    key="encoder" if options.select is None else "select",
                )
        self.judge = None if options.select is None else _judge(options.select)
        self.by_sight: ImageEncoder | None = None
        if options.encoder is not None:
            check_encoder("encoder", options.encoder, LEAK_ENCODERS)
            self.by_sight = load_encoder(options.encoder)
        elif self.judge is not None:
            self.by_sight = CheckpointEncoder(self.judge.encoder, self.judge.batch_size)
        for source in self.sources:
            source.captions = read_captions(source.records.path, options.captions)
            if options.leak != "keep" and self.by_sight is None:
                self._check_measurable(source)

    def _check_measurable(self, source: Source) -> None:
        """Raise if no target has a text or a caption to measure leaks by."""
        if not any(
            prompts.bare_text(pair.record, pair.positive) is not None or source.caption(pair.positive)
            for pair in source.pairs()
        ):
            raise UserError(
                f"{self.options.leak} cannot be measured: the targets are pictures without captions. Pass captions= (Parquet with "
                "id and caption) or encoder=",
                source.records.path,
                key="leak",
            )

    def run(self) -> dict[str, Any]:
        """Write the records with rationales to ``out``, and a report to ``out`` + ``.report.json``; returns it, for a folder by file.

        The calls of all files are made together, so that a provider's batches are awaited once. Raises `UserError`: another process
        writes there; calls are unanswered, or all are rejected.
        """
        options, replies = self.options, replies_of(self.options)
        with held(replies.parent, f"{replies.stem}.lock"), closing(AnswerStore(replies)) as store:
            caller = Caller({options.model.name: options.model}, store, progress=True)
            self._ask(caller, rewrite=False)
            self._measure_leaks()
            if options.leak == "rewrite":
                self._ask(caller, rewrite=True)
                self._measure_leaks()
            reports = {}
            for source in self.sources:
                self._finish(source)
                report = self._report(source) | {"models": [asdict(entry) for entry in store.ledger()]}
                write_json(source.beside(".report.json"), report)
                reports[source.out.name] = report
        return reports if options.records.is_dir() else reports[options.out.name]

    # --------------------------------------------------------------------------------------------------------- asking

    def _ask(self, caller: Caller, *, rewrite: bool) -> None:
        """Request the candidates of every pair, or rewrites of those that give too much away."""
        places: list[tuple[list[Candidate], int]] = []
        lost: list[Outcome] = []
        for source in self.sources:
            source.written = source.written or [[] for _ in source.pairs()]
            wanted = [self._wanted(samples, rewrite) for samples in source.written]
            source.counts["rewritten" if rewrite else "asked"] = sum(map(len, wanted))

        def requests() -> Iterator[Request]:
            for pair in chain.from_iterable(source.pairs() for source in self.sources):
                if wanted := self._wanted(pair.samples, rewrite):
                    request = request_for(pair, self.options, rewrite=rewrite)
                    places.extend((pair.samples, sample) for sample in wanted)
                    yield from (replace(request, sample=sample) for sample in wanted)

        def take(position: int, outcome: Outcome) -> None:
            samples, sample = places[position]
            if outcome.unanswered or outcome.rejected:
                lost.append(outcome)
            samples += [Candidate(None, [])] * (sample + 1 - len(samples))
            samples[sample] = self._read(outcome)

        total = None if rewrite else sum(source.counts["asked"] for source in self.sources)
        caller.run(requests(), take, read=prompts.read, title="rationales", total=total)
        unanswered = [outcome for outcome in lost if outcome.unanswered]
        num_calls = sum(source.counts["asked"] for source in self.sources)
        check_answered(unanswered, num_calls, wait=self.options.on_unanswered == "wait")
        if not rewrite and lost and len(lost) == len(places) and all(outcome.rejected for outcome in lost):
            caller.store.forget_rejections(outcome.key for outcome in lost)
            raise UserError(
                f"all {len(lost)} calls were rejected, such as: {lost[0].error}. Nothing was written; change the model's "
                "settings and run the same command again",
                kind="rejected",
            )

    def _wanted(self, written: Sequence[Candidate], rewrite: bool) -> list[int]:
        """Numbers of a pair's candidates to write or rewrite."""
        if not rewrite:
            return list(range(self.options.candidates))
        return [sample for sample, candidate in enumerate(written) if self._leaky(candidate)]

    def _leaky(self, candidate: Candidate) -> bool:
        return candidate.leak is not None and candidate.leak > self.options.max_leak

    def _read(self, outcome: Outcome) -> Candidate:
        try:
            text = prompts.read(outcome.answer())
        except ReplyError as error:
            return Candidate(None, [error.kind])
        return Candidate(text, prompts.faults(text, max_words=self.options.max_words))

    # ------------------------------------------------------------------------------------------------------ measuring

    def _measure_leaks(self) -> None:
        """Measure leaks of the candidates that have none yet, comparing the pictures of one window of records."""
        for source in self.sources:
            for window in source.windows():
                pairs = list(chain.from_iterable(window))
                new = [
                    (pair, candidate)
                    for pair in pairs
                    for candidate in pair.samples
                    if candidate.text is not None and candidate.leaks is None
                ]
                for pair, candidate in new:
                    candidate.leaks = _leaks_of_words(source, pair, candidate.text or "")
                if new and self.by_sight is not None:
                    _measure_by_sight(pairs, new, self.by_sight)

    def _weigh(self, judge: "GainJudge", window: Window) -> None:
        """Measure the gain of all candidates that passed the checks."""
        pairs = list(chain.from_iterable(window))
        for rows in evenly(len(pairs), GAIN_WINDOW):
            batch = pairs[rows.start : rows.stop]
            asked = [(pair.record, pair.positive) for pair in batch]
            texts = [[candidate.text or "" for candidate in pair.good] for pair in batch]
            for pair, gain_K in zip(batch, judge.judge(asked, texts), strict=True):
                for candidate, gain in zip(pair.good, gain_K, strict=True):
                    candidate.gain = float(gain)

    # ------------------------------------------------------------------------------------------------------- choosing

    def _finish(self, source: Source) -> None:
        """Choose among the candidates, and write the result and the scores."""
        for candidate in chain.from_iterable(source.written):
            if self.options.leak != "keep" and self._leaky(candidate):
                candidate.faults.append("leak")
            source.counts.update(f"dropped: {fault}" for fault in candidate.faults)
        with replacing(source.out) as out, replacing(source.beside(SCORES)) as beside:
            with out.open("w", encoding="utf-8") as records, beside.open("w", encoding="utf-8") as scores:
                for window in source.windows():
                    if self.judge is not None:
                        self._weigh(self.judge, window)
                    for pairs in window:
                        chosen = [self._choose(source, pair) for pair in pairs]
                        for pair, best in zip(pairs, chosen, strict=True):
                            scores.writelines(_score_lines(pair, best))
                        records.write(_record_line(source, pairs, chosen))

    def _choose(self, source: Source, pair: Pair) -> Candidate | None:
        """The candidate with the highest gain among those that pass; the first of equals."""
        good, counts = pair.good, source.counts
        if not good:
            return None
        best = max(good, key=lambda candidate: candidate.gain or 0.0)
        counts["not chosen"] += len(good) - 1
        if self.options.min_gain is not None and (best.gain or 0.0) < self.options.min_gain:
            counts["dropped: gain"] += 1
            return None
        source.chosen.append(best)
        return best

    def _report(self, source: Source) -> dict[str, Any]:
        chosen = source.chosen
        leaks = [candidate.leak for candidate in chosen if candidate.leak is not None]
        report: dict[str, Any] = {
            "records": 0,
            "records without a rationale": 0,
            **source.counts,
            "kept": len(chosen),
            "leak_mean": _mean(leaks),
            "leak_above_limit": sum(leak > self.options.max_leak for leak in leaks),
            "leak_not_measured": len(chosen) - len(leaks),
        }
        if self.by_sight is not None:
            report["leak_encoder"] = self.by_sight.name
        if self.judge is not None:
            report["select"] = self.options.select
            report["gain_mean"] = _mean([best.gain for best in chosen if best.gain is not None])
        return report


def _judge(checkpoint: str) -> "GainJudge":
    from data_prep.rationales.gain import GainJudge

    return GainJudge(checkpoint)


def _leaks_of_words(source: Source, pair: Pair, rationale: str) -> dict[str, float]:
    record, positive = pair.record, pair.positive
    leaks = {"text": text_leak(rationale, prompts.bare_text(record, positive))}
    if positive.pictures:
        leaks["caption"] = caption_leak(rationale, source.caption(positive), pair.known)
    return {name: leak for name, leak in leaks.items() if leak is not None}


def _measure_by_sight(
    pairs: Sequence[Pair], new: Sequence[tuple[Pair, Candidate]], by_sight: ImageEncoder
) -> None:
    shown = {
        target.id: str(target.pictures[0])
        for pair in pairs
        for target in (*pair.record.positives, *pair.record.negatives)
        if target.pictures
    }
    asked = [(pair.positive.id, candidate.text or "", pair.known) for pair, candidate in new]
    for (_, candidate), leak in zip(new, picture_leaks(by_sight, shown, asked), strict=True):
        if leak is not None:
            candidate.leaks = {**(candidate.leaks or {}), "picture": leak}


def _score_lines(pair: Pair, best: Candidate | None) -> Iterator[str]:
    for sample, candidate in enumerate(pair.samples):
        row = {
            "record": pair.record.id,
            "target": pair.positive.id,
            "sample": sample,
            "chosen": candidate is best,
            "faults": candidate.faults,
            "rationale": candidate.text,
            **{f"leak_{name}": round(leak, 4) for name, leak in (candidate.leaks or {}).items()},
            "gain": candidate.gain,
        }
        yield f"{json.dumps(row, ensure_ascii=False)}\n"


def _record_line(source: Source, pairs: Sequence[Pair], chosen: Sequence[Candidate | None]) -> str:
    """The record with the targets that have a rationale; "" if none has."""
    kept = [
        pair.positive.model_copy(update={"rationale": best.text})
        for pair, best in zip(pairs, chosen, strict=True)
        if best is not None
    ]
    if not kept:
        source.counts["records without a rationale"] += 1
        return ""
    source.counts["records"] += 1
    return json_line(written_row(pairs[0].record.model_copy(update={"positives": kept}), source.out))


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0
