"""Human review of a sample of the panel's decisions: the page, and its verdicts.

    rge data agreement run=DIR verdicts=FILE.json[,FILE.json]

As in the RMIR paper (appendix B.1: 200 triplets, 81 % agreement) half of the sample are answers that the panel accepted, half
ones that it rejected. The page does not say which, in no part of it.
"""

import base64
import hashlib
import html
import io
import json
import math
import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from PIL import Image

from data_prep.rmir import arithmetic as maths
from data_prep.rmir import frames
from data_prep.rmir.decisions import triplet_name
from data_prep.rmir.results import card
from data_prep.rmir.results.agreement import defined, fleiss_kappa
from rge.common.errors import UserError
from rge.common.files import write_json
from rge.common.images import load_image
from rge.common.options import parse_options
from rge.stats.intervals import cluster_bootstrap, figures, in_words, index_of

TEMPLATES = Path(__file__).parent / "templates"
ACCEPT, REJECT, UNSURE = "accept", "reject", "unsure"
VERDICTS = (ACCEPT, REJECT, UNSURE)
PAPER = "the RMIR paper: 81 % of 200"


class ReviewError(UserError):
    """The run or the verdicts cannot be used; the message says why."""


@dataclass
class AgreementOptions:
    """Compare people's verdicts with the panel's decisions."""

    run: Path
    """Folder of the run."""
    verdicts: tuple[Path, ...]
    """Files saved by the page, one per person."""


def draw(run: Path, size: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Draw triplets: half accepted, half rejected where there are enough, in random order.

    Returns:
        Rows with query_id, candidate_id, state, category, query and image_id.

    Raises:
        ReviewError: the run is not finished, or has no such triplet.
    """
    queries = {row["query_id"]: row for row in _rows(run, "generate/queries", "generated")}
    splits = {row["query_id"]: row["split"] for row in _rows(run, "split/splits.parquet", "splits")}
    doubted = {row["id"] for row in _rows(run, "keep/doubted.parquet", "pool")}
    parts = ("test", "train") if split == "all" else (split,)
    found: dict[str, list[dict[str, Any]]] = {maths.KEPT: [], maths.REJECTED: []}
    for row in _rows(run, "keep/decided.parquet", "decided"):
        query = queries[row["query_id"]]
        if (
            splits.get(query["query_id"]) in parts
            and row["state"] in found
            and row["candidate_id"] not in doubted
        ):
            about = {key: row[key] for key in ("query_id", "candidate_id", "state")}
            found[row["state"]].append(about | {key: query[key] for key in ("category", "query", "image_id")})
    if not any(found.values()):
        raise ReviewError(f"{run} has no decided triplet in split={split}")
    rng = random.Random(seed)
    kept, rejected = found[maths.KEPT], found[maths.REJECTED]
    num_kept = min(len(kept), size - min(len(rejected), size // 2))
    chosen = rng.sample(kept, num_kept) + rng.sample(rejected, min(len(rejected), size - num_kept))
    rng.shuffle(chosen)
    return chosen


def page(run: Path, chosen: Sequence[dict[str, Any]], side_px: int = 800) -> str:
    """The page as one HTML file of triplets of `draw`: pictures inside, nothing loaded from elsewhere."""
    refs = {row["id"]: row["ref"] for row in _rows(run, "seed/images.parquet", "images")}
    shown = dict.fromkeys(name for row in chosen for name in (row["image_id"], row["candidate_id"]))
    names = {name: str(number) for number, name in enumerate(shown)}
    items = [
        {
            "key": triplet_name(row),
            "query": row["query"],
            "given": names[row["image_id"]],
            "answer": names[row["candidate_id"]],
        }
        for row in chosen
    ]
    sample = hashlib.sha256(json.dumps([item["key"] for item in items]).encode()).hexdigest()[:16]
    data = {
        "sample": sample,
        "items": items,
        "pictures": {number: _data_url(refs[name], side_px) for name, number in names.items()},
    }
    # Without any "<" no text can end the script element that holds it, nor begin a comment or a script in it; and what is
    # no Unicode, such as half of a pair, is escaped too.
    text = json.dumps(data).replace("<", "\\u003c")
    script = (TEMPLATES / "review.js").read_text(encoding="utf-8")
    # The browser runs this script and no other, whatever else should ever get into the page.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template((TEMPLATES / "review.html").read_text(encoding="utf-8")).substitute(
        title=_escaped(run.name),
        run=_escaped(shlex.quote(str(run))),
        data=text,
        script=script,
        script_hash=f"sha256-{digest}",
    )


def _escaped(text: str) -> str:
    # A path may hold bytes that are no text.
    return html.escape(text.encode("utf-8", "replace").decode())


def agreement(words: Sequence[str]) -> None:
    """Compare verdicts with the panel's decisions, and print what was found.

    Raises:
        UserError: a word is wrong, a file cannot be read, or a verdict is about no triplet of the run.
    """
    options = parse_options(AgreementOptions, words, "rge data agreement")
    print(agreement_of(options.run, read_verdicts(options.run, options.verdicts)))
    if (options.run / "dataset").is_dir():
        print(f"written into {card.write(options.run)}")


def agreement_of(run: Path, people: "Mapping[str, Said]") -> str:
    """Write ``agreement.json``, for the card, and say it in words; arguments as of `compare`."""
    report = compare(run, people)
    write_json(run / "agreement.json", report)
    lines = [
        "| verdicts | agree with the panel | of | queries | share | 95 % interval, % | unsure |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for name, row in report["rows"].items():
        counts = f"{row['agree']} | {row['of']} | {row['queries']} | {_figure(row['share'])}"
        lines.append(f"| {name} | {counts} | {in_words(row['low'], row['high'])} | {row['unsure']} |")
    lines.append(f"\nKappa of person and panel {_figure(report['kappa'])} (Fleiss). For comparison, {PAPER}.")
    for pair, row in report["between"].items():
        lines.append(
            f"{pair}: the same verdict on {row['same']} of {row['of']}, kappa {_figure(row['kappa'])}."
        )
    lines += [
        f"{row['by']} on {row['key']} ({row['verdict'] or 'no verdict'}): {row['comment']}"
        for row in report["comments"]
    ]
    return "\n".join(lines)


Said = dict[str, dict[str, str]]
"""A person's verdict (or "") and comment on each triplet."""


def compare(run: Path, people: Mapping[str, Said]) -> dict[str, Any]:
    """Agreement of people with the panel.

    Verdicts on one query are correlated: what a person thinks of a question decides several of its answers. So intervals
    resample queries, not verdicts.

    Returns:
        ``rows``: agree, of, queries, share and its 95 % interval, and how many are unsure (left out of the others) over
        all, by person, by what the panel decided and by category; ``kappa`` of verdicts and decisions; ``between``:
        agreement of each two people on what both judged, unsure being a verdict; ``comments``.
    """
    queries = {row["query_id"]: row for row in _rows(run, "generate/queries", "generated")}
    decided = {triplet_name(row): row for row in _rows(run, "keep/decided.parquet", "decided")}
    all_said = [(name, key, row) for name, said in people.items() for key, row in said.items()]
    groups: dict[str, list[tuple[bool | None, str]]] = {"all": []}
    votes: list[list[bool]] = []
    for name, key, row in all_said:
        if not row["verdict"]:
            continue
        kept, query = decided[key]["state"] == maths.KEPT, decided[key]["query_id"]
        agrees = None if row["verdict"] == UNSURE else (row["verdict"] == ACCEPT) == kept
        for group in (
            "all",
            *([f"by {name}"] if len(people) > 1 else []),
            "panel accepted" if kept else "panel rejected",
            queries[query]["category"],
        ):
            groups.setdefault(group, []).append((agrees, query))
        if agrees is not None:
            votes.append([row["verdict"] == ACCEPT, kept])
    pairs = {f"{a} and {b}": _said_by_both(people[a], people[b]) for a, b in combinations(people, 2)}
    between = {
        pair: {"same": sum(a == b for a, b in both), "of": len(both), "kappa": _kappa(both, VERDICTS)}
        for pair, both in pairs.items()
        if both
    }
    rows = {group: _row(found) for group, found in groups.items()}
    comments = [{"by": name, "key": key, **row} for name, key, row in all_said if row["comment"]]
    kappa = _kappa(votes, (True, False))
    return defined({"rows": rows, "kappa": kappa, "between": between, "comments": comments})


def _row(found: Sequence[tuple[bool | None, str]]) -> dict[str, Any]:
    """A row of the report of (agrees or None, query)."""
    sure = [(agrees, query) for agrees, query in found if agrees is not None]
    hits, queries = [agrees for agrees, _ in sure], [query for _, query in sure]
    share: dict[str, float | None] = {"value": None, "low": None, "high": None}
    if sure:
        [share] = figures(cluster_bootstrap(np.array(hits, float)[:, None], index_of(queries)), (0.0, 1.0))
    return {
        "agree": sum(hits), "of": len(sure), "queries": len(set(queries)),
        "share": share["value"], "low": share["low"], "high": share["high"], "unsure": len(found) - len(sure),
    }  # fmt: skip


def _said_by_both(one: Said, other: Said) -> list[list[str]]:
    keys = sorted(one.keys() & other.keys())
    pairs = [[one[key]["verdict"], other[key]["verdict"]] for key in keys]
    return [pair for pair in pairs if all(pair)]


def _kappa(pairs: Sequence[Sequence[object]], categories: Sequence[object]) -> float:
    return (
        fleiss_kappa(np.array([[pair.count(one) for one in categories] for pair in pairs]))
        if pairs
        else math.nan
    )


def settle(run: Path, people: Mapping[str, Said], agree: int) -> dict[str, Any]:
    """What people decide against the panel, as the file that `data_prep.rmir.decisions` reads.

    Returns:
        ``states`` of the triplets that are overruled, and how many were checked, settled, removed, added, left open.
    """
    panel = {triplet_name(row): row["state"] for row in _rows(run, "keep/decided.parquet", "decided")}
    states: dict[str, str] = {}
    checked = settled = 0
    for name in dict.fromkeys(name for said in people.values() for name in said):
        sure = [said[name]["verdict"] for said in people.values() if name in said]
        sure = [verdict for verdict in sure if verdict in (ACCEPT, REJECT)]
        checked += bool(sure)
        if len(sure) < agree or len(set(sure)) > 1:
            continue
        settled += 1
        state = maths.KEPT if sure[0] == ACCEPT else maths.REJECTED
        if panel[name] != state:
            states[name] = state
    removed = sum(state == maths.REJECTED for state in states.values())
    return {
        "agree": agree, "people": len(people), "checked": checked, "settled": settled, "open": checked - settled,
        "removed": removed, "added": len(states) - removed, "states": states,
    }  # fmt: skip


def read_verdicts(run: Path, files: Sequence[Path]) -> dict[str, Said]:
    """What people said, by the name they gave or else that of their file.

    Raises:
        ReviewError: a file is no such file or is empty, two have one name, or a verdict is about a triplet that the run did not
            decide.
    """
    decided = {triplet_name(row): row for row in _rows(run, "keep/decided.parquet", "decided")}
    people: dict[str, Said] = {}
    for file in files:
        by, said = _verdicts(file, decided)
        if by in people:
            raise ReviewError(
                f"{file}: there are two files of {by!r}; each person needs a name of their own (by in the file, or its name)"
            )
        people[by] = said
    return people


def _verdicts(file: Path, decided: dict[str, dict[str, Any]]) -> tuple[str, Said]:
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
        found, by = whole["verdicts"], str(whole.get("by") or file.stem)
        rows = {
            key: {"verdict": row["verdict"] or "", "comment": str(row.get("comment") or "")}
            for key, row in found.items()
        }
    except OSError as error:
        raise ReviewError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ReviewError(f"{file} holds no verdicts: save them with the page's key S") from None
    if not rows or any(row["verdict"] not in (*VERDICTS, "") for row in rows.values()):
        raise ReviewError(f"{file} holds no verdicts, or others than {', '.join(VERDICTS)}")
    for key in rows:
        if key not in decided or decided[key]["state"] not in (maths.KEPT, maths.REJECTED):
            raise ReviewError(
                f"{file}: a verdict is about {key!r}, which this run did not decide: is run= the right one?"
            )
    return by, rows


def _figure(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def _rows(run: Path, name: str, schema: str) -> list[dict[str, Any]]:
    path = run / name
    if not path.exists():
        raise ReviewError(f"{path} does not exist: finish the run first (python -m data_prep rmir)")
    return frames.read_rows(path, schema)


def _data_url(ref: str, side_px: int) -> str:
    image = load_image(ref)
    image.thumbnail((side_px, side_px), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
