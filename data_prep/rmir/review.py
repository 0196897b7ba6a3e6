"""Human review of a sample of the panel's decisions: the page, its verdicts, and their application.

    rge data review run=DIR out=PAGE.html
    rge data review run=DIR apply=FILE.json[,FILE.json]
    rge data agreement run=DIR verdicts=FILE.json[,FILE.json]

As in the RMIR paper (appendix B.1: 200 triplets, 81 % agreement), half of the sample was accepted by the panel and half
rejected. Nothing in the page, including its source, reveals which.
"""

import base64
import hashlib
import json
import random
import shlex
import sys
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from data_prep.rmir import arithmetic as maths
from data_prep.rmir import frames
from data_prep.rmir.config import RmirConfig, load_config
from data_prep.rmir.decisions import AGREEMENT, REVIEWED, triplet_name, write_about_panel
from data_prep.rmir.main import SETTINGS, run_stages
from data_prep.rmir.results import report
from data_prep.rmir.results.audit import defined, fleiss_kappa
from data_prep.rmir.run import Row, Run
from rge.calls.request import Picture
from rge.calls.wire.pictures import data_url
from rge.common.errors import UserError
from rge.common.files import write_text
from rge.common.options import AtLeastOne, parse_options
from rge.stats.intervals import cluster_bootstrap, figures, in_words, index_of

ACCEPT, REJECT, UNSURE = VERDICTS = "accept", "reject", "unsure"
STATES = {ACCEPT: maths.KEPT, REJECT: maths.REJECTED}
"""State that each verdict gives a triplet."""
PAPER = "the RMIR paper: 81 % of 200"
SIDE_PX = 800
"""Maximum side of the pictures embedded in the page: 200 triplets of photos take about 40 MB."""


@dataclass
class ReviewOptions:
    """Write a page on which people review a sample of a run's triplets; or apply their verdicts."""

    run: Path
    """Folder of a finished run."""
    out: Path | None = None
    """The HTML file to write."""
    sample: Annotated[int, Field(ge=2)] = 200
    """Triplets on the page: half accepted by the panel and half rejected, if there are enough."""
    split: Literal["test", "train", "all"] = "test"
    """Split whose queries they are drawn from."""
    seed: int = 0
    """Seed of the sample."""
    apply: tuple[Path, ...] = ()
    """Files saved by the page, one per person, instead of out=: an answer on which these people agree against the panel
    is removed from the data set or added to it."""
    agree: AtLeastOne = 2
    """Number of people who must give the same verdict on a triplet, with none disagreeing, for apply= to act on it."""


@dataclass
class AgreementOptions:
    """Compare people's verdicts with the panel's decisions."""

    run: Path
    """Folder of the run."""
    verdicts: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Files saved by the page, one per person."""


def review(words: Sequence[str]) -> None:
    """Write the page, or apply verdicts."""
    options = parse_options(ReviewOptions, words, "rge data review")
    if (options.out is None) == (not options.apply):
        raise UserError("give either out=FILE.html to write a page, or apply=FILES to apply verdicts").about(
            "out", "apply"
        )
    if options.out is None:
        apply(options.run, options.apply, options.agree)
        return
    chosen = draw(options.run, options.sample, options.split, options.seed)
    write_text(options.out, page(options.run, chosen))
    kept = sum(row["state"] == maths.KEPT for row in chosen)
    print(
        f"{options.out}: {len(chosen)} triplets, {kept} accepted and {len(chosen) - kept} rejected by the panel"
    )


def apply(out: Path, files: Sequence[Path], agree: int) -> None:
    """Write ``reviewed.json`` and redo pool, sets, audit, report and card; makes no model calls."""
    if len(files) < agree:
        raise UserError(
            f"it has the verdicts of {len(files)} people, but agree={agree} people must give the same verdict",
            key="apply",
        )
    with closing(Run(_settings(out))) as run:
        if run.done("keep") is None:
            raise UserError("the panel's decisions are not finished: run the command that made it again", out)
        people = read_verdicts(out, files)
        found = settle(out, people, agree)
        write_about_panel(out / REVIEWED, found)
        agreement_of(out, people)
        run_stages(run, ("pool", "split", "audit"))
        report.write(run)
    print(
        f"{agree} or more of {len(people)} people agreed on {found['settled']} of {found['checked']} triplets: "
        f"{found['removed']} answers removed, {found['added']} added; {found['open']} left as the panel decided\n"
        f"{out / 'dataset'}"
    )


def _settings(out: Path) -> RmirConfig:
    """The settings of the last command that ran in a folder."""
    path = out / SETTINGS
    again = f"run the command that made {out} again (it makes no new calls), then this one"
    if not path.is_file():
        raise UserError(f"it does not exist: {again}", path)
    try:
        return load_config([f"config={path}", f"out={out}"])
    except UserError as error:
        raise UserError(
            f"it is perhaps of an earlier version, with other keys: {again}.\n{error}", path, kind="version"
        ) from None


def draw(run: Path, size: int, split: str, seed: int) -> list[Row]:
    """Draw triplets in random order: half accepted and half rejected, if there are enough.

    Returns:
        Rows of ``decided`` joined with those of the queries.

    Raises:
        UserError: the run is not finished, or has no decided triplet in the split.
    """
    queries = frames.stage_rows_by("query_id", run, "generate", "queries")
    splits = frames.stage_rows_by("query_id", run, "split", "splits")
    doubted = frames.stage_rows_by("id", run, "keep", "doubted")
    parts = ("test", "train") if split == "all" else (split,)
    decided = [
        row
        for row in frames.stage_rows(run, "keep", "decided")
        if row["query_id"] in splits
        and splits[row["query_id"]]["split"] in parts
        and row["candidate_id"] not in doubted
    ]

    def in_state(state: str) -> list[Row]:
        return [queries[row["query_id"]] | row for row in decided if row["state"] == state]

    kept, rejected = in_state(maths.KEPT), in_state(maths.REJECTED)
    if not kept and not rejected:
        raise UserError(f"it has no decided triplet in split={split}", run, key="split")
    rng = random.Random(seed)
    num_kept = min(len(kept), size - min(len(rejected), size // 2))
    chosen = rng.sample(kept, num_kept) + rng.sample(rejected, min(len(rejected), size - num_kept))
    rng.shuffle(chosen)
    return chosen


def page(run: Path, chosen: Sequence[Row]) -> str:
    """The review page for triplets of `draw`: one self-contained HTML file with embedded pictures."""
    images = frames.stage_rows_by("id", run, "seed", "images")
    shown = dict.fromkeys(name for row in chosen for name in (row["image_id"], row["candidate_id"]))
    names = {name: str(number) for number, name in enumerate(shown)}
    items = [
        {
            "key": triplet_name(row),
            "shown": shown_hash(row, images),
            "query": row["query"],
            "given": names[row["image_id"]],
            "answer": names[row["candidate_id"]],
        }
        for row in chosen
    ]
    data = {
        "sample": _hash([(item["key"], item["shown"]) for item in items]),
        "items": items,
        "pictures": {
            number: data_url(Picture(images[name]["ref"], images[name]["sha256"], SIDE_PX))
            for name, number in names.items()
        },
    }
    # Escaping every "<" keeps texts from closing the script element or opening a comment in it. json.dumps also escapes
    # lone surrogates.
    text = json.dumps(data).replace("<", "\\u003c")
    script = (report.TEMPLATES / "review.js").read_text(encoding="utf-8")
    # The content security policy allows only this script, even if other code gets into the page.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # A path may contain bytes that are not valid UTF-8.
    title, quoted = (part.encode("utf-8", "replace").decode() for part in (run.name, shlex.quote(str(run))))
    return report.template("review.html").render(
        title=title, run=quoted, data=text, script=script, script_hash=f"sha256-{digest}"
    )


def agreement(words: Sequence[str]) -> None:
    """Compare verdicts with the panel's decisions and print the agreement."""
    options = parse_options(AgreementOptions, words, "rge data agreement")
    print(agreement_of(options.run, read_verdicts(options.run, options.verdicts)))
    if (page := report.write_card(options.run)) is not None:
        print(f"added to {page}")


def agreement_of(run: Path, people: "Mapping[str, Said]") -> str:
    """Write ``agreement.json`` (used by the card) and return the report as text; arguments as in `compare`."""
    found = compare(run, people)
    write_about_panel(run / AGREEMENT, found)
    lines = [
        "| verdicts | agree with the panel | of | queries | share | 95 % interval, % | unsure |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for name, row in found["rows"].items():
        counts = f"{row['agree']} | {row['of']} | {row['queries']} | {report.figure(row['share'])}"
        lines.append(f"| {name} | {counts} | {in_words(row['low'], row['high'])} | {row['unsure']} |")
    lines.append(
        f"\nFleiss' kappa of people and panel: {report.figure(found['kappa'])}. For comparison, {PAPER}."
    )
    for pair, row in found["between"].items():
        lines.append(
            f"{pair}: same verdict on {row['same']} of {row['of']}, kappa {report.figure(row['kappa'])}."
        )
    lines += [
        f"{row['by']} on {row['key']} ({row['verdict'] or 'no verdict'}): {row['comment']}"
        for row in found["comments"]
    ]
    return "\n".join(lines)


Said = dict[str, dict[str, str]]
"""A person's ``verdict`` (or "") and ``comment`` on each triplet."""
Vote = tuple[str, bool | None, bool]
"""Query, whether the person accepts the answer (None: unsure), and whether the panel does."""


def compare(run: Path, people: Mapping[str, Said]) -> dict[str, Any]:
    """Agreement of people with the panel.

    Verdicts on the same query are correlated, so the intervals resample queries, not verdicts.

    Returns:
        ``rows``: agree, of, queries, share with its 95 % interval, and unsure (excluded from the others), overall, by
        person, by the panel's decision and by category; ``kappa`` of verdicts and decisions; ``between``: agreement of
        each pair of people on what both judged, with unsure as a verdict; ``comments``.
    """
    queries, decided = frames.stage_rows_by("query_id", run, "generate", "queries"), _decided(run)
    groups: dict[str, list[Vote]] = {"all": []}
    comments = []
    for name, said in people.items():
        for key, row in said.items():
            if row["comment"]:
                comments.append({"by": name, "key": key, **row})
            if not row["verdict"]:
                continue
            query, kept = queries[decided[key]["query_id"]], decided[key]["state"] == maths.KEPT
            accepted = None if row["verdict"] == UNSURE else row["verdict"] == ACCEPT
            by = [f"by {name}"] if len(people) > 1 else []
            for group in ("all", *by, f"panel {'accepted' if kept else 'rejected'}", query["category"]):
                groups.setdefault(group, []).append((query["query_id"], accepted, kept))
    sure = [(accepted, kept) for _, accepted, kept in groups["all"] if accepted is not None]
    rows = {group: _row(votes) for group, votes in groups.items()}
    kappa = _kappa(sure, (True, False))
    return defined({"rows": rows, "kappa": kappa, "between": _between(people), "comments": comments})


def _row(votes: Sequence[Vote]) -> dict[str, Any]:
    """Figures of one row of the report."""
    sure = [vote for vote in votes if vote[1] is not None]
    hits, queries = [accepted == kept for _, accepted, kept in sure], [query for query, _, _ in sure]
    share: dict[str, float | None] = {"value": None, "low": None, "high": None}
    if sure:
        [share] = figures(cluster_bootstrap(np.array(hits, float)[:, None], index_of(queries)), (0.0, 1.0))
    return {
        "agree": hits.count(True), "of": len(sure), "queries": len(set(queries)),
        "share": share["value"], "low": share["low"], "high": share["high"], "unsure": len(votes) - len(sure),
    }  # fmt: skip


def _between(people: Mapping[str, Said]) -> dict[str, dict[str, Any]]:
    """Agreement of each pair of people on what both judged."""
    found = {}
    for (a, of_a), (b, of_b) in combinations(people.items(), 2):
        pairs = [[of_a[key]["verdict"], of_b[key]["verdict"]] for key in sorted(of_a.keys() & of_b.keys())]
        if both := [pair for pair in pairs if all(pair)]:
            same = sum(one == other for one, other in both)
            found[f"{a} and {b}"] = {"same": same, "of": len(both), "kappa": _kappa(both, VERDICTS)}
    return found


def _kappa(pairs: Sequence[Sequence[object]], categories: Sequence[object]) -> float:
    return fleiss_kappa(np.array([[pair.count(category) for category in categories] for pair in pairs]))


def settle(run: Path, people: Mapping[str, Said], agree: int) -> dict[str, Any]:
    """Decisions that overrule the panel, as the content of the file that `data_prep.rmir.decisions` reads.

    Returns:
        ``states`` of the overruled triplets, and numbers of checked, settled, removed, added and open ones.
    """
    decided = _decided(run)
    votes: dict[str, list[str]] = {}
    for said in people.values():
        for name, row in said.items():
            if row["verdict"] in STATES:
                votes.setdefault(name, []).append(STATES[row["verdict"]])
    checked = len(votes)
    agreed = {name: found[0] for name, found in votes.items() if len(found) >= agree and len({*found}) == 1}
    states_of = {name: state for name, state in agreed.items() if decided[name]["state"] != state}
    settled, removed = len(agreed), [*states_of.values()].count(maths.REJECTED)
    return {
        "agree": agree, "people": len(people), "checked": checked, "settled": settled, "open": checked - settled,
        "removed": removed, "added": len(states_of) - removed, "states": states_of,
    }  # fmt: skip


def read_verdicts(run: Path, files: Sequence[Path]) -> dict[str, Said]:
    """Read verdicts by person: the name saved in the file, else the file's name.

    Verdicts on another question or picture, or on a triplet that the run did not decide, are left out with a message.

    Raises:
        UserError: a file holds no verdicts, or only such; or two files have the same name.
    """
    images = frames.stage_rows_by("id", run, "seed", "images")
    queries = frames.stage_rows_by("query_id", run, "generate", "queries")
    known = {
        key: shown_hash(query | row, images)
        for key, row in _decided(run).items()
        if row["state"] in STATES.values()
        # Missing, like pictures, while an earlier stage is being redone.
        and (query := queries.get(row["query_id"]))
        and {query["image_id"], row["candidate_id"]} <= images.keys()
    }
    people: dict[str, Said] = {}
    for file in files:
        by, said = _verdicts(file, known)
        if by in people:
            raise UserError(
                "two files are from this person; change the name (`by`) in one file, or its file name",
                file,
                key=by,
            )
        people[by] = said
    return people


class _Saved(BaseModel):
    """A file saved by the page."""

    class Row(BaseModel):
        verdict: Literal["accept", "reject", "unsure", ""] | None
        comment: str | None = None
        shown: str | None = None  # `shown_hash`; pages of earlier versions do not save it

    by: str | None = None
    verdicts: Annotated[dict[str, Row], Field(min_length=1)]


def _verdicts(file: Path, known: dict[str, str]) -> tuple[str, Said]:
    try:
        saved = _Saved.model_validate_json(file.read_bytes().removeprefix(BOM_UTF8))  # an editor may add it
    except OSError as error:
        raise UserError(f"it cannot be read: {error.strerror or error}", file) from None
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"]
        raise UserError(
            f"it holds no verdicts ({why}): save them with the page's key S", file, kind="format"
        ) from None
    rows = {
        key: {"verdict": row.verdict or "", "comment": row.comment or ""}
        for key, row in saved.verdicts.items()
        if key in known and row.shown in (None, known[key])
    }
    strange = [key for key in saved.verdicts if key not in rows]
    if not rows:
        raise UserError(
            "this run did not decide it, or its question or pictures have changed; is run= correct?",
            file,
            key=strange[0],
        )
    if strange:
        print(
            f"{file}: {len(strange)} of {len(saved.verdicts)} verdicts are left out, such as that on {strange[0]!r}, which this run "
            "did not decide, or whose question or pictures have changed",
            file=sys.stderr,
        )
    return saved.by or file.stem, rows


def shown_hash(row: Row, images: Mapping[str, Row]) -> str:
    """Hash of the question and the pictures of a triplet, whose name may come to stand for others when a stage is redone."""
    return _hash([row["query"], *(images[row[key]]["sha256"] for key in ("image_id", "candidate_id"))])


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _decided(run: Path) -> dict[str, Row]:
    """The panel's decisions, by `triplet_name`."""
    return {triplet_name(row): row for row in frames.stage_rows(run, "keep", "decided")}
