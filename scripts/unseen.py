"""The demo's test questions with pictures or words that training never showed: is the thing named correctly, and the answer retrieved?

    python scripts/unseen.py checkpoints=rge/demo_checkpoint,runs/smol/joint/final
    apt-get download tuxpaint-stamps-default
    dpkg-deb -x tuxpaint-stamps-default_*.deb stamps
    python scripts/unseen.py stamps=stamps checkpoints=runs/photos/joint/final,rge/demo_checkpoint

**Words**: ``scripts/rewordings.tsv`` asks for each relation in other words: once with a word that is in no training record, paraphrased or
not, and once in words that are all in the records with paraphrases (`data_prep.demo.build.write_paraphrased`). **Pictures**, with ``stamps=``: some of that Debian package's stamps for children to paint with are cut-out photographs; ``scripts/photos.tsv`` lists
those whose text names a concept of the demo (the pictures are not in this repository). Each replaces, on a white square, the drawing in
every question about that thing.

Only the first phrasing of each question is used; gallery and right answers stay the same. Every checkpoint is evaluated on both sets, with
and without the replacement, under ``out``. A rationale names the thing right if its first clause is that of the set's own rationales.
Intervals are 95 %, resampled by the thing shown; differences are paired by question and thing.
"""

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from arms import DEMO_SET, ROOT, percent, run
from demo import judge_words
from PIL import Image

from eval.sets.write_set import Candidate, Query, write_set
from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import parse_options
from rge.stats import intervals

TEST = ROOT / DEMO_SET
LIST = ROOT / "scripts" / "photos.tsv"
REWORDINGS = ROOT / "scripts" / "rewordings.tsv"
INSIDE = Path("usr/share/tuxpaint/stamps")
MARGIN = 0.05
"""Of a square's side, left white around a photograph."""
PICTURES, WORDS = ("drawings", "photographs"), ("as trained", "reworded", "in known words")
"""What the sets of a comparison show or ask; the first is what training showed."""
COLUMNS = {"reworded": "question", "in known words": "in_known_words"}
"""Columns of the rewordings by kind."""
ABOUT = ["category", "group", "instruction"]
FIGURES = ("named", "hit@1")


@dataclass(frozen=True)
class Options:
    """Which checkpoints are asked about which photographs, or in which words."""

    checkpoints: tuple[str, ...]
    """Checkpoint directories; each is compared with the first."""
    stamps: Path | None = None
    """Folder that the package was unpacked into; empty: words are replaced, not pictures."""
    out: Path = Path("runs/unseen")
    """Sets and evaluations."""


def main(words: list[str]) -> None:
    """Write the sets, evaluate every checkpoint, print the table."""
    options = parse_options(Options, words, "python scripts/unseen.py")
    kinds = PICTURES if options.stamps else WORDS
    sets = {kind: options.out / kind.replace(" ", "_") for kind in kinds}
    write(sets, find(options.stamps) if options.stamps else None)
    found = {}
    for number, checkpoint in enumerate(options.checkpoints):
        for kind, folder in sets.items():
            out = options.out / f"eval_{number}_{folder.name}"
            about = [f"checkpoint={checkpoint}", f"set={folder}", f"out={out}", "overwrite=true"]
            run([sys.executable, "-m", "rge", "eval", "run", *about, "report=false", "exact=false"])
            found[checkpoint, kind] = values(out)
    print(table(options.checkpoints, kinds, found))


def find(stamps: Path) -> dict[str, list[Path]]:
    """The listed photographs by the concept that they show; UserError if some are not there."""
    root = stamps / INSIDE if (stamps / INSIDE).is_dir() else stamps
    listed = pd.read_csv(LIST, sep="\t").groupby("concept")["stamp"]
    found = {concept: [root / stamp for stamp in stamps] for concept, stamps in listed}
    if missing := [path for paths in found.values() for path in paths if not path.is_file()]:
        raise UserError(
            f"{len(missing)} of the photographs in {LIST.name} are not in {root}, e.g. {missing[0].name}: give stamps= the folder "
            "that tuxpaint-stamps-default 2022.06.04 was unpacked into"
        )
    return found


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


def rewordings(kind: str) -> dict[str, str]:
    """The question in other words by relation; empty for kinds that change none."""
    table = pd.read_csv(REWORDINGS, sep="\t").set_index("relation")
    return table[COLUMNS[kind]].to_dict() if kind in COLUMNS else {}


def write(sets: dict[str, Path], photographs: dict[str, list[Path]] | None) -> None:
    """The retrieval sets of a comparison; a query's id ends in the number of its photograph, or in 0.

    ``sets`` are folders by kind, `PICTURES` or `WORDS`; of ``photographs`` by concept (None for `WORDS`), other questions are left out.
    """
    rows = pd.read_parquet(TEST / "queries.parquet")
    rows = rows[rows["id"].str.endswith(".0")]
    if photographs is not None:
        rows = rows[rows["group"].isin(photographs)]
    corpus = [
        Candidate(row["id"], image=row["image"]["bytes"])
        for row in pd.read_parquet(TEST / "corpus.parquet").to_dict("records")
    ]
    judged = pd.read_parquet(TEST / "qrels.parquet").groupby("query-id")
    shown = {concept: [square(path) for path in paths] for concept, paths in (photographs or {}).items()}
    for kind, folder in sets.items():
        queries, qrels, words = [], [], rewordings(kind)
        for row, about in zip(rows.to_dict("records"), rows[ABOUT].to_dict("records"), strict=True):
            text = words.get(row["id"].partition(".")[0], row["text"])
            own = tuple(image["bytes"] for image in row["image"])
            for number, picture in enumerate(shown.get(row["group"], own)):
                name = f"{row['id']}.{number}"
                images = (picture,) if kind == "photographs" else own
                queries.append(Query(id=name, images=images, text=text, **about))
                right = judged.get_group(row["id"])[["corpus-id", "score"]]
                qrels += [(name, target, int(score)) for target, score in right.itertuples(index=False)]
        source = "the demo's test set" + ("; tuxpaint-stamps-default" if photographs else "")
        meta = {"name": f"rge-demo-{folder.name}", "source": source}
        write_set(folder, meta=meta, queries=queries, corpus=corpus, qrels=qrels, overwrite=True)


def values(out: Path) -> pd.DataFrame:
    """Per query: the thing, whether it is named right, and whether the first candidate is a right answer."""
    rows = pd.read_parquet(out / "per_query.parquet", columns=["query_id", "group", "rationale", "hit@1"])
    return with_named(rows).set_index("query_id").sort_index()


def with_named(rows: pd.DataFrame) -> pd.DataFrame:
    """Per-query results with a column ``named``: 1 if the rationale names the thing right."""
    asked = rows["query_id"].str.rpartition(".")[0]  # without the last number
    return rows.assign(named=judge_words(asked, rows["rationale"], TEST)["named"].to_numpy(float))


def table(
    checkpoints: tuple[str, ...], kinds: tuple[str, ...], found: dict[tuple[str, str], pd.DataFrame]
) -> str:
    """Per cent with intervals: every checkpoint on both sets, what the replacement costs it, and its distance to the first."""
    first = found[checkpoints[0], kinds[0]]
    lines = [
        f"{len(first)} questions about {first['group'].nunique()} things",
        f"{'':50s}{'named, %':>22s}{'hit@1, %':>22s}",
    ]
    for checkpoint in checkpoints:
        lines += [line(f"{checkpoint[-30:]}, {kind}", found[checkpoint, kind]) for kind in kinds]
        for kind in kinds[1:]:
            shown, replaced = found[checkpoint, kinds[0]], found[checkpoint, kind]
            lines.append(line(f"{checkpoint[-30:]}, {kind}, difference", replaced, less=shown))
    for checkpoint in checkpoints[1:]:
        for kind in kinds:
            label, base = f"first - {checkpoint[-30:]}, {kind}", found[checkpoints[0], kind]
            lines.append(line(label, base, less=found[checkpoint, kind]))
    return "\n".join(lines)


def line(label: str, rows: pd.DataFrame, less: pd.DataFrame | None = None) -> str:
    """One line of the table; with ``less``, of the differences."""
    value_QM = rows[list(FIGURES)].to_numpy(float)
    if less is not None:
        value_QM = value_QM - less.loc[rows.index, list(FIGURES)].to_numpy(float)
    bootstrap = intervals.cluster_bootstrap(value_QM, intervals.index_of(rows["group"].tolist()))
    found = intervals.figures(bootstrap, (0.0, 1.0) if less is None else intervals.OF_DIFFERENCES)
    return f"{label:50s}" + "".join(f"{percent(one['value'], one['low'], one['high']):>22s}" for one in found)


if __name__ == "__main__":
    start(main)
