"""Photographs in place of the demo's test drawings: are they named right, and is the answer found?

    apt-get download tuxpaint-stamps-default
    dpkg-deb -x tuxpaint-stamps-default_*.deb stamps
    python scripts/photos.py stamps=stamps checkpoints=runs/photos/joint/final,rge/demo_checkpoint

The Debian package has stamps for children to paint with; some are cut-out photographs. ``scripts/photos.tsv`` lists those whose
text names a concept of the demo; the pictures are not in this repository. Each replaces, on a white square, the drawing in every
question of the demo's test set about that thing (first phrasing only); gallery and right answers stay the same. Every checkpoint
is evaluated on both sets, ``drawings`` and ``photographs``, under ``out``.

A rationale names the thing right if its first clause is that of the set's own rationales. Intervals are 95 %, resampled by
the thing shown; differences are paired by question and thing.
"""

import csv
import io
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from arms import DEMO_SET, ROOT, run
from demo import judge_words
from PIL import Image

from eval.sets.write_set import Candidate, Query, write_set
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import parse_options
from rge.stats import intervals

TEST = ROOT / DEMO_SET
LIST = ROOT / "scripts" / "photos.tsv"
INSIDE = Path("usr/share/tuxpaint/stamps")
MARGIN = 0.05
"""Of a square's side, left white around a photograph."""
KINDS = ("drawings", "photographs")
ABOUT = ["text", "category", "group", "instruction"]
FIGURES = ("named", "hit@1")


@dataclass(frozen=True)
class Options:
    """Which checkpoints are asked about which photographs."""

    stamps: Path
    """Folder that the package was unpacked into."""
    checkpoints: tuple[str, ...]
    """Checkpoint directories; each is compared with the first."""
    out: Path = Path("runs/stamps")
    """Sets and evaluations."""


def main(words: list[str]) -> None:
    """Write both sets, evaluate every checkpoint, print the table."""
    options = parse_options(Options, words, "python scripts/photos.py")
    photographs = find(options.stamps)
    sets = {kind: options.out / kind for kind in KINDS}
    write(sets, photographs)
    found = {}
    for number, checkpoint in enumerate(options.checkpoints):
        for kind, folder in sets.items():
            out = options.out / f"eval_{number}_{kind}"
            evaluate(checkpoint, folder, out)
            found[checkpoint, kind] = values(out)
    print(table(options.checkpoints, found, sum(map(len, photographs.values())), len(photographs)))


def find(stamps: Path) -> dict[str, list[Path]]:
    """The listed photographs by the concept that they show.

    Raises:
        UserError: some are not there.
    """
    root = stamps / INSIDE if (stamps / INSIDE).is_dir() else stamps
    found = defaultdict(list)
    with LIST.open(encoding="utf-8", newline="") as rows:
        for row in csv.DictReader(rows, delimiter="\t"):
            found[row["concept"]].append(root / row["stamp"])
    if missing := [path for paths in found.values() for path in paths if not path.is_file()]:
        raise UserError(
            f"{len(missing)} of the photographs in {LIST.name} are not in {root}, e.g. {missing[0].name}: give stamps= the folder "
            "that tuxpaint-stamps-default 2022.06.04 was unpacked into"
        )
    return dict(found)


def square(path: Path) -> bytes:
    """A cut-out as PNG, in the middle of a white square."""
    with Image.open(path) as opened:
        cut = opened.convert("RGBA")
    cut = cut.crop(cut.getchannel("A").getbbox())
    side = round(max(cut.size) / (1 - 2 * MARGIN))
    ground = Image.new("RGB", (side, side), "white")
    ground.paste(cut, ((side - cut.width) // 2, (side - cut.height) // 2), cut)
    buffer = io.BytesIO()
    ground.save(buffer, "PNG")
    return buffer.getvalue()


def write(sets: dict[str, Path], photographs: dict[str, list[Path]]) -> None:
    """Both retrieval sets; a query's id ends in the number of its photograph."""
    rows = pd.read_parquet(TEST / "queries.parquet")
    rows = rows[rows["id"].str.endswith(".0") & rows["group"].isin(photographs)]
    corpus = [
        Candidate(row["id"], image=row["image"]["bytes"])
        for row in pd.read_parquet(TEST / "corpus.parquet").to_dict("records")
    ]
    judged = pd.read_parquet(TEST / "qrels.parquet").groupby("query-id")
    shown = {concept: [square(path) for path in paths] for concept, paths in photographs.items()}
    for kind, folder in sets.items():
        queries, qrels = [], []
        for row, about in zip(rows.to_dict("records"), rows[ABOUT].to_dict("records"), strict=True):
            own = tuple(image["bytes"] for image in row["image"])
            for number, picture in enumerate(shown[row["group"]]):
                name = f"{row['id']}.{number}"
                images = own if kind == "drawings" else (picture,)
                queries.append(Query(id=name, images=images, **about))
                right = judged.get_group(row["id"])[["corpus-id", "score"]]
                qrels += [(name, target, int(score)) for target, score in right.itertuples(index=False)]
        meta = {"name": f"rge-demo-{kind}", "source": "the demo's test set; tuxpaint-stamps-default"}
        write_set(folder, meta=meta, queries=queries, corpus=corpus, qrels=qrels, overwrite=True)


def evaluate(checkpoint: str, folder: Path, out: Path) -> None:
    """Run `rge eval run`; exit with its code if it fails."""
    words = [f"checkpoint={checkpoint}", f"set={folder}", f"out={out}", "overwrite=true", "report=false"]
    run([sys.executable, "-m", "rge", "eval", "run", *words, "exact=false"])


def values(out: Path) -> pd.DataFrame:
    """Per query: the thing, whether it is named right, and whether the first candidate is a right answer."""
    rows = pd.read_parquet(out / "per_query.parquet", columns=["query_id", "group", "rationale", "hit@1"])
    asked = rows["query_id"].str.rpartition(".")[0]  # without the number of the photograph
    named = judge_words(asked, rows["rationale"], TEST)["named"]
    return rows.assign(named=named.astype(float)).set_index("query_id").sort_index()


def table(
    checkpoints: tuple[str, ...], found: dict[tuple[str, str], pd.DataFrame], num: int, things: int
) -> str:
    """Per cent with intervals: every checkpoint on both sets, and what it gains over the first on photographs."""
    first = found[checkpoints[0], KINDS[0]]
    lines = [
        f"{num} photographs of {things} things, {len(first)} questions",
        f"{'':44s}{'named, %':>22s}{'hit@1, %':>22s}",
    ]
    for checkpoint in checkpoints:
        lines += [line(f"{checkpoint[-30:]}, {kind}", found[checkpoint, kind]) for kind in KINDS]
    for checkpoint in checkpoints[1:]:
        for kind in KINDS:
            label, base = f"first - {checkpoint[-20:]}, {kind}", found[checkpoints[0], kind]
            lines.append(line(label, base, less=found[checkpoint, kind]))
    return "\n".join(lines)


def line(label: str, rows: pd.DataFrame, less: pd.DataFrame | None = None) -> str:
    """One line of the table; with ``less``, of the differences."""
    value_QM = rows[list(FIGURES)].to_numpy(float)
    if less is not None:
        value_QM = value_QM - less.loc[rows.index, list(FIGURES)].to_numpy(float)
    bootstrap = intervals.cluster_bootstrap(value_QM, intervals.index_of(rows["group"].tolist()))
    found = intervals.figures(bootstrap, (0.0, 1.0) if less is None else intervals.OF_DIFFERENCES)
    cells = (f"{100 * one['value']:.1f} {intervals.in_words(one['low'], one['high'])}" for one in found)
    return f"{label:44s}" + "".join(f"{cell:>22s}" for cell in cells)


if __name__ == "__main__":
    start(main)
