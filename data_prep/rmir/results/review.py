"""A person checks a sample of the panel's decisions: a page to look at, and what its verdicts say.

    rge data review run=DIR out=review.html [sample=200] [split=test] [seed=0]
    rge data agreement run=DIR verdicts=FILE.json[,FILE.json]

As in the RMIR paper (appendix B.1: 200 triplets, 81 % agreement) half of the sample are answers that the panel accepted, half
ones that it rejected. The page does not say which, in no part of it.
"""

import base64
import hashlib
import html
import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from data_prep.rmir import arithmetic as maths
from data_prep.rmir import frames
from data_prep.rmir.results.agreement import defined, fleiss_kappa, wilson
from rge.common.errors import UserError
from rge.common.files import write_text
from rge.common.images import load_image
from rge.common.options import parse_options

PAGE = Path(__file__).parent / "templates" / "review.html"
SIDE_PX = 640
"""Pictures are shown at most this large, so that a page of 200 triplets stays below some tens of megabytes."""
PAPER = "the RMIR paper: 81 % of 200"


class ReviewError(UserError):
    """The run or the verdicts cannot be used; the message says why."""


@dataclass
class ReviewOptions:
    """Write a page on which a person accepts or rejects a sample of a run's triplets."""

    run: Path
    """Folder of a finished run."""
    out: Path
    """The HTML file to write."""
    sample: Annotated[int, Field(ge=2)] = 200
    """Triplets on the page: half accepted by the panel, half rejected, as far as there are."""
    split: Literal["test", "train", "all"] = "test"
    """Queries that they are drawn from."""
    seed: int = 0
    """Seed of the draw."""


@dataclass
class AgreementOptions:
    """Compare verdicts of people with the panel's decisions."""

    run: Path
    """Folder of the run."""
    verdicts: tuple[Path, ...]
    """Files saved by the page, one a person."""


def review(words: Sequence[str]) -> None:
    """Write the page.

    Args:
        words: see `ReviewOptions`.

    Raises:
        UserError: a word is wrong, or the run is not finished.
    """
    options = parse_options(ReviewOptions, words, "rge data review")
    out = options.run
    chosen = draw(out, options.sample, options.split, options.seed)
    write_text(options.out, page(out, chosen))
    kept = sum(row["state"] == maths.KEPT for row in chosen)
    print(
        f"{options.out}: {len(chosen)} triplets, {kept} accepted and {len(chosen) - kept} rejected by the panel"
    )


def draw(run: Path, size: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Draw triplets: half accepted, half rejected, as far as there are; in random order.

    Args:
        run: folder of a finished run.
        size: of the sample.
        split: ``test``, ``train``, or ``all`` queries with an answer.
        seed: of the draw.

    Returns:
        Rows with query_id, candidate_id, state, category, query and image_id.

    Raises:
        ReviewError: the run is not finished, or has no such triplet.
    """
    queries = {row["query_id"]: row for row in _rows(run, "generate/queries", "generated")}
    splits = {row["query_id"]: row["split"] for row in _rows(run, "split/splits.parquet", "splits")}
    doubted = {row["id"] for row in _rows(run, "keep/doubted.parquet", "pool")}
    found: dict[str, list[dict[str, Any]]] = {maths.KEPT: [], maths.REJECTED: []}
    for row in _rows(run, "keep/decided.parquet", "decided"):
        part = splits.get(row["query_id"], "dropped")
        wanted = part in ("test", "train") if split == "all" else part == split
        if wanted and row["state"] in found and row["candidate_id"] not in doubted:
            query = queries[row["query_id"]]
            found[row["state"]].append(
                {key: row[key] for key in ("query_id", "candidate_id", "state")}
                | {key: query[key] for key in ("category", "query", "image_id")}
            )
    if not any(found.values()):
        raise ReviewError(f"{run} has no decided triplet in split={split}")
    rng = random.Random(seed)
    half = {state: min(len(rows), size // 2) for state, rows in found.items()}
    for state, other in ((maths.KEPT, maths.REJECTED), (maths.REJECTED, maths.KEPT)):
        half[state] = min(len(found[state]), size - half[other])
    chosen = [row for state, rows in found.items() for row in rng.sample(rows, half[state])]
    rng.shuffle(chosen)
    return chosen


def page(run: Path, chosen: Sequence[dict[str, Any]]) -> str:
    """The page as one file: pictures inside, nothing loaded from elsewhere.

    Args:
        run: folder of the run.
        chosen: of `draw`.

    Returns:
        HTML.
    """
    refs = {row["id"]: row["ref"] for row in _rows(run, "seed/images.parquet", "images")}
    shown = dict.fromkeys(name for row in chosen for name in (row["image_id"], row["candidate_id"]))
    names = {name: str(number) for number, name in enumerate(shown)}
    items = [
        {
            "key": _key(row),
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
        "pictures": {number: _data_url(refs[name]) for name, number in names.items()},
    }
    # "</" would end the script element that holds the data.
    text = json.dumps(data, ensure_ascii=False).replace("</", "<\\/")
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=html.escape(run.name), run=html.escape(str(run)), data=text
    )


def agreement(words: Sequence[str]) -> None:
    """Compare verdicts with the panel's decisions, and print what was found.

    Args:
        words: see `AgreementOptions`.

    Raises:
        UserError: a word is wrong, a file cannot be read, or a verdict is about no triplet of the run.
    """
    options = parse_options(AgreementOptions, words, "rge data agreement")
    report = compare(options.run, options.verdicts)
    lines = ["| verdicts | agree with the panel | of | share | 95 % interval |", "|---|---:|---:|---:|---|"]
    for name, row in report["rows"].items():
        lines.append(
            f"| {name} | {row['agree']} | {row['of']} | {row['share']:.3f} | {row['low']:.3f} to {row['high']:.3f} |"
        )
    lines.append(f"\nKappa of person and panel {_figure(report['kappa'])} (Fleiss). For comparison, {PAPER}.")
    for pair, row in report["between"].items():
        lines.append(
            f"{pair}: the same verdict on {row['same']} of {row['of']}, kappa {_figure(row['kappa'])}."
        )
    print("\n".join(lines))
    write_text(options.run / "agreement.json", json.dumps(report, indent=1) + "\n")


def compare(run: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Agreement of people with the panel.

    Args:
        run: folder of the run.
        files: saved by the page, one a person.

    Returns:
        ``rows``: agree, of, share and its 95 % interval (Wilson) over all, by person, by what the panel decided and by
        category; ``kappa`` of verdicts and decisions; ``between``: agreement of each two people on what both judged.

    Raises:
        ReviewError: a file is no such file or is empty, or a verdict is about a triplet that the run does not have.
    """
    queries = {row["query_id"]: row for row in _rows(run, "generate/queries", "generated")}
    decided = {_key(row): row for row in _rows(run, "keep/decided.parquet", "decided")}
    verdicts = {file.stem: _verdicts(file, decided) for file in files}
    if len(verdicts) < len(files):
        raise ReviewError("each file of verdicts needs a name of its own")
    said = [(name, key, verdict) for name, found in verdicts.items() for key, verdict in found.items()]
    groups: dict[str, list[bool]] = {"all": []}
    counts = []
    for name, key, verdict in said:
        state = decided[key]["state"]
        agrees = verdict == (state == maths.KEPT)
        for group in (
            "all",
            *([f"by {name}"] if len(files) > 1 else []),
            "panel accepted" if state == maths.KEPT else "panel rejected",
            queries[decided[key]["query_id"]]["category"],
        ):
            groups.setdefault(group, []).append(agrees)
        votes = [verdict, state == maths.KEPT]
        counts.append([votes.count(True), votes.count(False)])
    rows = {}
    for group, found in groups.items():
        low, high = wilson(sum(found), len(found))
        rows[group] = {
            "agree": sum(found),
            "of": len(found),
            "share": sum(found) / len(found),
            "low": low,
            "high": high,
        }
    between = {}
    names = list(verdicts)
    for place, left in enumerate(names):
        for right in names[place + 1 :]:
            both = sorted(verdicts[left].keys() & verdicts[right].keys())
            pairs = [[verdicts[left][key], verdicts[right][key]] for key in both]
            if pairs:
                between[f"{left} and {right}"] = {
                    "same": sum(a == b for a, b in pairs),
                    "of": len(pairs),
                    "kappa": fleiss_kappa(
                        np.array([[pair.count(True), pair.count(False)] for pair in pairs])
                    ),
                }
    return defined({"rows": rows, "kappa": fleiss_kappa(np.array(counts)), "between": between})


def _verdicts(file: Path, decided: dict[str, dict[str, Any]]) -> dict[str, bool]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["verdicts"]
    except OSError as error:
        raise ReviewError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise ReviewError(f"{file} holds no verdicts: save them with the page's key S") from None
    if not found or not all(isinstance(verdict, bool) for verdict in found.values()):
        raise ReviewError(f"{file} holds no verdicts, or others than true and false")
    for key in found:
        if key not in decided or decided[key]["state"] not in (maths.KEPT, maths.REJECTED):
            raise ReviewError(
                f"{file}: a verdict is about {key!r}, which this run did not decide: is run= the right one?"
            )
    return found


def _figure(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def _key(row: dict[str, Any]) -> str:
    return f"{row['query_id']} -> {row['candidate_id']}"


def _rows(run: Path, name: str, schema: str) -> list[dict[str, Any]]:
    path = run / name
    if not path.exists():
        raise ReviewError(f"{path} does not exist: finish the run first (python -m data_prep rmir)")
    return frames.read_rows(path, schema)


def _data_url(ref: str) -> str:
    image = load_image(ref)
    image.thumbnail((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
