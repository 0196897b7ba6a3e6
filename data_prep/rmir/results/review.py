"""Human review of a sample of the panel's decisions: the page and its verdicts.

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
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from data_prep.rmir import arithmetic as maths
from data_prep.rmir import frames
from data_prep.rmir.decisions import AGREEMENT, triplet_name, write_about_panel
from data_prep.rmir.results import card
from data_prep.rmir.results.agreement import defined, fleiss_kappa
from rge.calls.pictures import data_url
from rge.calls.request import Picture
from rge.common.errors import UserError
from rge.common.options import parse_options
from rge.stats.intervals import cluster_bootstrap, figures, in_words, index_of

ACCEPT, REJECT, UNSURE = "accept", "reject", "unsure"
VERDICTS = (ACCEPT, REJECT, UNSURE)
PAPER = "the RMIR paper: 81 % of 200"


@dataclass
class AgreementOptions:
    """Compare people's verdicts with the panel's decisions."""

    run: Path
    """Folder of the run."""
    verdicts: tuple[Path, ...]
    """Files saved by the page, one per person."""


def draw(run: Path, size: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Draw triplets in random order: half accepted and half rejected, if there are enough.

    Returns:
        Rows of ``decided`` joined with those of the queries.

    Raises:
        UserError: the run is not finished, or has no decided triplet in the split.
    """
    queries = frames.by("query_id", frames.stage_rows(run, "generate", "queries"))
    splits = frames.by("query_id", frames.stage_rows(run, "split", "splits"))
    doubted = frames.by("id", frames.stage_rows(run, "keep", "doubted"))
    parts = ("test", "train") if split == "all" else (split,)
    decided = [
        row
        for row in frames.stage_rows(run, "keep", "decided")
        if splits.get(row["query_id"], {}).get("split") in parts and row["candidate_id"] not in doubted
    ]

    def in_state(state: str) -> list[dict[str, Any]]:
        return [queries[row["query_id"]] | row for row in decided if row["state"] == state]

    kept, rejected = in_state(maths.KEPT), in_state(maths.REJECTED)
    if not kept and not rejected:
        raise UserError(f"{run} has no decided triplet in split={split}")
    rng = random.Random(seed)
    num_kept = min(len(kept), size - min(len(rejected), size // 2))
    chosen = rng.sample(kept, num_kept) + rng.sample(rejected, min(len(rejected), size - num_kept))
    rng.shuffle(chosen)
    return chosen


def page(run: Path, chosen: Sequence[dict[str, Any]], side_px: int = 800) -> str:
    """The review page for triplets of `draw`: one self-contained HTML file with embedded pictures."""
    images = frames.by("id", frames.stage_rows(run, "seed", "images"))
    shown = dict.fromkeys(name for row in chosen for name in (row["image_id"], row["candidate_id"]))
    names = {name: str(number) for number, name in enumerate(shown)}
    pictures = {name: Picture(images[name]["ref"], images[name]["sha256"], side_px) for name in names}
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
    sample = hashlib.sha256(
        json.dumps([(item["key"], item["shown"]) for item in items]).encode()
    ).hexdigest()[:16]
    data = {
        "sample": sample,
        "items": items,
        "pictures": {number: data_url(pictures[name]) for name, number in names.items()},
    }
    # Escaping every "<" keeps texts from closing the script element or opening a comment in it. json.dumps also escapes
    # lone surrogates.
    text = json.dumps(data).replace("<", "\\u003c")
    script = (card.TEMPLATES / "review.js").read_text(encoding="utf-8")
    # The content security policy allows only this script, even if other code gets into the page.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # A path may contain bytes that are not valid UTF-8.
    title, quoted = (part.encode("utf-8", "replace").decode() for part in (run.name, shlex.quote(str(run))))
    return card.template("review.html").render(
        title=title,
        run=quoted,
        data=text,
        script=script,
        script_hash=f"sha256-{digest}",
    )


def agreement(words: Sequence[str]) -> None:
    """Compare verdicts with the panel's decisions and print the agreement."""
    options = parse_options(AgreementOptions, words, "rge data agreement")
    print(agreement_of(options.run, read_verdicts(options.run, options.verdicts)))
    if (page := card.write(options.run)) is not None:
        print(f"added to {page}")


def agreement_of(run: Path, people: "Mapping[str, Said]") -> str:
    """Write ``agreement.json`` (used by the card) and return the report as text; arguments as in `compare`."""
    report = compare(run, people)
    write_about_panel(run / AGREEMENT, report)
    lines = [
        "| verdicts | agree with the panel | of | queries | share | 95 % interval, % | unsure |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for name, row in report["rows"].items():
        counts = f"{row['agree']} | {row['of']} | {row['queries']} | {card.figure(row['share'])}"
        lines.append(f"| {name} | {counts} | {in_words(row['low'], row['high'])} | {row['unsure']} |")
    lines.append(
        f"\nFleiss' kappa of people and panel: {card.figure(report['kappa'])}. For comparison, {PAPER}."
    )
    for pair, row in report["between"].items():
        lines.append(
            f"{pair}: same verdict on {row['same']} of {row['of']}, kappa {card.figure(row['kappa'])}."
        )
    lines += [
        f"{row['by']} on {row['key']} ({row['verdict'] or 'no verdict'}): {row['comment']}"
        for row in report["comments"]
    ]
    return "\n".join(lines)


Said = dict[str, dict[str, str]]
"""A person's ``verdict`` (or "") and ``comment`` on each triplet."""
STATES = {ACCEPT: maths.KEPT, REJECT: maths.REJECTED}
"""State that each verdict gives a triplet."""


@dataclass(frozen=True)
class _Vote:
    """A person's verdict and the panel's decision."""

    by: str
    query: str
    category: str
    kept: bool  # by the panel
    accepted: bool | None  # by the person; None: unsure

    def groups(self) -> tuple[str, ...]:
        """Rows of the report that it counts towards."""
        return "all", f"by {self.by}", "panel accepted" if self.kept else "panel rejected", self.category


def _votes(run: Path, people: Mapping[str, Said]) -> list[_Vote]:
    queries = frames.by("query_id", frames.stage_rows(run, "generate", "queries"))
    decided, found = _decided(run), []
    verdicts = [(name, key, row["verdict"]) for name, said in people.items() for key, row in said.items()]
    for name, key, verdict in verdicts:
        if verdict:
            query, kept = queries[decided[key]["query_id"]], decided[key]["state"] == maths.KEPT
            accepted = None if verdict == UNSURE else verdict == ACCEPT
            found.append(_Vote(name, query["query_id"], query["category"], kept, accepted))
    return found


def compare(run: Path, people: Mapping[str, Said]) -> dict[str, Any]:
    """Agreement of people with the panel.

    Verdicts on the same query are correlated, so the intervals resample queries, not verdicts.

    Returns:
        ``rows``: agree, of, queries, share with its 95 % interval, and unsure (excluded from the others), overall, by
        person, by the panel's decision and by category; ``kappa`` of verdicts and decisions; ``between``: agreement of
        each pair of people on what both judged, with unsure as a verdict; ``comments``.
    """
    votes = _votes(run, people)
    groups: dict[str, list[_Vote]] = {"all": []}
    for vote in votes:
        for group in vote.groups():
            groups.setdefault(group, []).append(vote)
    if len(people) == 1:
        groups.pop(f"by {next(iter(people))}", None)
    sure = [(vote.accepted, vote.kept) for vote in votes if vote.accepted is not None]
    comments = [
        {"by": name, "key": key, **row}
        for name, said in people.items()
        for key, row in said.items()
        if row["comment"]
    ]
    rows = {group: _row(found) for group, found in groups.items()}
    kappa = _kappa(sure, (True, False))
    return defined({"rows": rows, "kappa": kappa, "between": _between(people), "comments": comments})


def _row(votes: Sequence[_Vote]) -> dict[str, Any]:
    """Figures of one row of the report."""
    sure = [vote for vote in votes if vote.accepted is not None]
    hits, queries = [vote.accepted == vote.kept for vote in sure], [vote.query for vote in sure]
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
    sure: dict[str, list[str]] = {}
    for said in people.values():
        for name, row in said.items():
            states = sure.setdefault(name, [])
            if row["verdict"] in STATES:
                states.append(STATES[row["verdict"]])
    checked = sum(map(bool, sure.values()))
    agreed = {name: found[0] for name, found in sure.items() if len(found) >= agree and len({*found}) == 1}
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
    images = frames.by("id", frames.stage_rows(run, "seed", "images"))
    queries = frames.by("query_id", frames.stage_rows(run, "generate", "queries"))
    known = {}
    for key, row in _decided(run).items():
        query = queries.get(
            row["query_id"]
        )  # None, like pictures that are missing: an earlier stage may be being redone
        if (
            row["state"] in STATES.values()
            and query
            and {query["image_id"], row["candidate_id"]} <= images.keys()
        ):
            known[key] = shown_hash(query | row, images)
    people: dict[str, Said] = {}
    for file in files:
        by, said = _verdicts(file, known)
        if by in people:
            raise UserError(
                f"{file}: two files are from {by!r}; change the name (`by`) in one file, or its file name"
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
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"]
        raise UserError(f"{file} holds no verdicts ({why}): save them with the page's key S") from None
    rows = {
        key: {"verdict": row.verdict or "", "comment": row.comment or ""}
        for key, row in saved.verdicts.items()
        if key in known and row.shown in (None, known[key])
    }
    strange = [key for key in saved.verdicts if key not in rows]
    if not rows:
        raise UserError(
            f"{file}: a verdict is on {strange[0]!r}, which this run did not decide, or whose question or pictures have "
            "changed; is run= correct?"
        )
    if strange:
        print(
            f"{file}: {len(strange)} of {len(saved.verdicts)} verdicts are left out, such as that on {strange[0]!r}, which this run "
            "did not decide, or whose question or pictures have changed",
            file=sys.stderr,
        )
    return saved.by or file.stem, rows


def shown_hash(row: Mapping[str, Any], images: Mapping[str, dict[str, Any]]) -> str:
    """Hash of the question and the pictures of a triplet, whose name may come to stand for others when a stage is redone."""
    shown = [images[row[key]]["sha256"] for key in ("image_id", "candidate_id")]
    return hashlib.sha256(json.dumps([row["query"], *shown]).encode()).hexdigest()[:16]


def _decided(run: Path) -> dict[str, dict[str, Any]]:
    """The panel's decisions, by `triplet_name`."""
    return {triplet_name(row): row for row in frames.stage_rows(run, "keep", "decided")}
