"""The commands ``rge data mmeb fetch`` and ``rge data mmeb``.

The first downloads MMEB's training files from the hub, and compares their numbers of rows with the published ones. The second reads
them (``TIGER-Lab/MMEB-train``) and writes one file of training records per set. Expected layout: a
folder per set with ``original-*.parquet``, ``diverse_instruction-*.parquet`` or ``train-*.parquet`` (or .jsonl) and the columns ``qry``,
``qry_image_path``, ``pos_text``, ``pos_image_path``, ``neg_text``, ``neg_image_path``, where "" is a missing part and
``<|image_1|>`` in a text marks the picture; all pictures below one folder.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.files import relative, write_json, write_text
from rge.common.mmeb_prompts import SETS, SOURCE, canonical, plain, reword, split_instruction
from rge.common.options import AtLeastOne, one_of, parse_options
from rge.common.schema import Positive, QueryPart, Record, Target
from rge.data.sources import json_line
from rge.tables.rows import num_rows, table_rows
from rge.web.releases import FETCHED, check_whole, fetch_release

COLUMNS = ("qry", "qry_image_path", "pos_text", "pos_image_path")
NEGATIVES = ("neg_text", "neg_image_path")
ENDINGS = ("-*.parquet", "*.jsonl")
NO_PICTURE = "picture is missing"
TRAINED = tuple(name for name, about in SETS.items() if about["distribution"] == "IND")
"""The 20 sets with training data."""


@dataclass
class MmebOptions:
    """Import MMEB's training files, one file of records per set; for evaluation files see `rge eval import mmeb`."""

    src: Path
    """The release's files."""
    out: Path
    """Folder to write to; pictures are referenced, not copied."""
    images: Path | None = None
    """Folder that picture paths are relative to; null: src, src/images, src/MMEB-images."""
    split: Literal["original", "diverse_instruction", "train"] = "original"
    """Which of a set's training files to use."""
    sets: tuple[str, ...] = ("all",)
    """Sets by name; all: every set that has this part, all of which must be present."""
    instructions: Literal["vlm2vec", "rge"] = "vlm2vec"
    """vlm2vec leaves the texts as released; rge rewords them as the released RGE evaluation does."""
    max_per_set: AtLeastOne | None = None
    """Maximum number of rows drawn from each set; null: all."""
    seed: int = 0
    """Seed of the sample."""
    missing: Literal["error", "drop"] = "error"
    """What to do with rows whose picture is missing: error, or drop (leave out and count)."""


REPOSITORY = "TIGER-Lab/MMEB-train"
PUBLISHED = {
    "ImageNet-1K": 100, "N24News": 49, "HatefulMemes": 8, "VOC2007": 8, "SUN397": 20, "OK-VQA": 9, "A-OKVQA": 17, "DocVQA": 40,
    "InfographicsVQA": 24, "ChartQA": 28, "Visual7W": 70, "VisDial": 123, "CIRR": 26, "VisualNews_t2i": 100, "VisualNews_i2t": 100,
    "MSCOCO_t2i": 100, "MSCOCO_i2t": 113, "NIGHTS": 16, "WebQA": 17, "MSCOCO": 100,
}  # fmt: skip
"""Training rows of each set in thousands, rounded, as in VLM2Vec's paper (arXiv:2410.05160, Table 2).

With at most 50 thousand of each set, as the paper draws them, they sum to its 662 thousand.
"""


@dataclass
class FetchOptions:
    """Download MMEB's training files from the hub, compare their numbers of rows with the published ones, and import them.

    Repeating the command resumes an interrupted download at the same commit. ``fetch.json`` records commit and counts.
    """

    out: Path
    """Folder for the release: tables, archives of pictures, and the unpacked pictures in ``images``."""
    records: Path | None = None
    """Folder for training records, as `rge data mmeb src= out=` writes them; null: only download."""
    sets: tuple[str, ...] = ("all",)
    """Sets by name; all: the twenty."""
    split: Literal["original", "diverse_instruction"] = "original"
    """Which of a set's training files to count and to import."""
    instructions: Literal["vlm2vec", "rge"] = "rge"
    """Wording of the records, see `rge data mmeb --help`."""
    repo: str = REPOSITORY
    """Repository on the hub with this layout."""
    revision: str | None = None
    """Commit, tag or branch; null: the commit of an earlier call, else the newest."""
    partial: bool = False
    """Accept fewer rows than were published, with a warning."""


def fetch(options: FetchOptions) -> dict[str, Any]:
    """Download, count and import; returns the content of ``fetch.json``. UserError: rows are missing, and as of `fetch_release`."""
    names = [canonical(name) for name in (TRAINED if options.sets == ("all",) else options.sets)]
    one_of("sets", names, TRAINED)
    # The hub's names of some sets have underscores.
    folders = [one for name in names for one in dict.fromkeys((name, name.replace("-", "_")))]
    patterns = [pattern for folder in folders for pattern in (f"{folder}/*", f"images_zip/{folder}.zip*")]
    unpack = {f"images_zip/{folder}.zip": "images" for folder in folders}
    about = fetch_release(options.out, "MMEB-train", {options.repo: ("", patterns)}, unpack, options.revision)
    counts = {name: sum(map(num_rows, _files(options.out, name, options.split))) for name in names}
    lacking = [
        f"{name} has {count:,} of about {PUBLISHED[name]},000 rows"
        for name, count in counts.items()
        if round(count / 1000) < PUBLISHED[name]
    ]
    write_json(options.out / FETCHED, about | {"rows": counts, "partial": lacking})
    check_whole(options.out, lacking, partial=options.partial)
    for words in lacking:
        print(f"WARNING: partial: {words}", file=sys.stderr)
    print(f"{options.out}: {sum(counts.values()):,} rows in {len(names)} sets")
    if options.records is not None:
        _import(
            MmebOptions(
                options.out,
                options.records,
                split=options.split,
                sets=tuple(names),
                instructions=options.instructions,
            )
        )
    return about


def main(words: Sequence[str]) -> None:
    """Fetch the release, or convert it."""
    if words and words[0] == "fetch":
        fetch(parse_options(FetchOptions, words[1:], "rge data mmeb fetch"))
    else:
        _import(parse_options(MmebOptions, words, "rge data mmeb"))


def _import(options: MmebOptions) -> None:
    """Convert, and print the counts."""
    report = convert(options)
    for name, counts in report["sets"].items():
        print(f"{name}: {', '.join(f'{key} {value:,}' for key, value in counts.items())}")
    print(options.out / "report.json")
    print(
        "The texts include their wording: train on them with profile: plain, as the recipe mmeb does, and as they are evaluated"
    )


def convert(options: MmebOptions) -> dict[str, Any]:
    """Write ``out/NAME.jsonl`` for every set, each atomically, and ``out/report.json``.

    Returns:
        The report: rows read, written and left out, by set.

    Raises:
        UserError: a set or picture is missing, or a row does not fit the layout.
    """
    src, out, split = options.src, options.out, options.split
    names = [canonical(name) for name in (TRAINED if options.sets == ("all",) else options.sets)]
    one_of("sets", names, TRAINED)
    files = {name: _files(src, name, split) for name in names}
    if absent := [name for name, found in files.items() if not found]:
        present = sorted(path.name for path in src.glob("*/"))
        raise UserError(
            f"{split} files of {len(absent)} sets are missing: {', '.join(absent)}"
            f" (found: {', '.join(present) or 'none'}); sets=NAME,... converts only the named ones",
            src,
            key="sets",
        )
    report: dict[str, Any] = {
        "source": f"TIGER-Lab/MMEB-train, split {split}", "instructions": options.instructions, "wording": "included",
        "sets": {},
    }  # fmt: skip
    for name in names:
        work = _Import(name, options)
        lines = [json_line(record) for record in work.records(files[name])]
        work.check_left(len(lines))
        write_text(out / f"{name}.jsonl", "".join(lines))
        report["sets"][name] = {**work.counts, "written": len(lines)}
    write_json(out / "report.json", report)
    return report


Part = tuple[str, str]
"""Text and picture path of a query or a target; "" stands for a missing one."""
Where = tuple[str, str]
"""A set and the row in it, for messages."""


class _Import:
    """The conversion of one set: its picture folders and counts."""

    def __init__(self, name: str, options: MmebOptions):
        self.name, self.options = name, options
        src, images = options.src, options.images
        self.roots = [images] if images is not None else [src, src / "images", src / "MMEB-images"]
        self.counts: Counter[str] = Counter()
        # Path of each picture relative to the records; None: missing.
        self.known: dict[str, str | None] = {}

    def records(self, files: Sequence[Path]) -> Iterator[Record]:
        """Records of the sampled rows; without ``max_per_set``, of all rows."""
        total, most = sum(map(num_rows, files)), self.options.max_per_set
        chosen: Collection[int] = range(total)
        if most is not None and most < total:
            rng = np.random.default_rng([self.options.seed, *self.name.encode()])
            chosen = set(rng.choice(total, most, replace=False).tolist())
        rows = enumerate(row for file in files for row in table_rows(file))
        for number, row in progress_bar(rows, total=total, desc=self.name):
            if number in chosen and (record := self._record(row, number)) is not None:
                yield record

    def check_left(self, num_records: int) -> None:
        """Raise if the set has no records, or, with ``missing=error``, lost any picture."""
        num_lost = self.counts[f"left out: {NO_PICTURE}"]
        if num_lost and self.options.missing == "error":
            shown = next(path for path, found in self.known.items() if found is None)
            roots = ", ".join(map(str, self.roots))
            raise UserError(
                f"{num_lost:,} of {self.counts['read']:,} rows have no picture, such as this one below {roots}: unpack the set's "
                "archive, give images=DIR, or leave such rows out with missing=drop",
                self.name,
                key=shown,
                kind="missing",
            )
        if not num_records:
            raise UserError(f"no row is left ({dict(self.counts)})", self.name)

    def _record(self, row: dict[str, Any], number: int) -> Record | None:
        name, counts, split = self.name, self.counts, self.options.split
        where = name, f"row {number + 1}"
        if lacking := [column for column in COLUMNS if column not in row]:
            raise UserError(f"the column is missing; found: {', '.join(row)}", *where, lacking[0])
        counts["read"] += 1
        queries = _parts(row, "qry", "qry_image_path", where)
        if len(queries) != 1:
            raise UserError(f"{len(queries)} queries; one is needed", *where, "qry")
        [(whole, path)] = queries
        instruction, text = split_instruction(name, whole)
        positives = [part for part in _parts(row, "pos_text", "pos_image_path", where) if any(part)]
        negatives = _parts(row, *NEGATIVES, where) if row.keys() >= {*NEGATIVES} else []
        if reason := self._unusable((text, path), positives):
            counts[f"left out: {reason}"] += 1
            return None
        negatives = self._usable_negatives(positives, negatives)
        if instruction is None:
            text = self._worded(text, "query")
        else:
            instruction = self._worded(instruction, "query")
        counts["instruction told apart"] += instruction is not None
        counts["with negatives"] += bool(negatives)
        return Record(
            id=f"{name}-{number:07d}",
            group=hashlib.sha256((path or whole).encode()).hexdigest()[:16],
            source=f"{SOURCE}{name}",
            split="train" if split == "original" else split,
            category=SETS[name]["meta_task"],
            instruction=instruction,
            query=QueryPart(text=text or None, images=[self._picture(path)] if path else []),  # type: ignore[list-item]
            positives=[Positive(**self._target(part)) for part in dict.fromkeys(positives)],
            negatives=[Target(**self._target(part)) for part in dict.fromkeys(negatives)],
            wording="included",
        )

    def _unusable(self, query: Part, positives: Sequence[Part]) -> str | None:
        """Reason to skip a row, or None; a missing query or target picture is one."""
        if not any(query):
            return "empty query"
        if not positives:
            return "empty target"
        return None if all(self._is_there(part) for part in (query, *positives)) else NO_PICTURE

    def _usable_negatives(self, positives: Sequence[Part], negatives: Sequence[Part]) -> list[Part]:
        """Negatives whose picture exists and that are not also a target."""
        negatives = [part for part in negatives if any(part)]
        shown = [part for part in negatives if self._is_there(part)]
        right = {_id(part) for part in positives}
        kept = [part for part in shown if _id(part) not in right]
        self.counts["negatives without their picture"] += len(negatives) - len(shown)
        self.counts["negatives equal to the target"] += len(shown) - len(kept)
        return kept

    def _worded(self, text: str, side: str) -> str:
        return reword(self.name, text, side) if self.options.instructions == "rge" else text

    def _target(self, part: Part) -> dict[str, Any]:
        text, path = part
        text = self._worded(text, "candidate") if text else ""
        return {"id": _id(part), "text": text or None, "image": self._picture(path) if path else None}

    def _is_there(self, part: Part) -> bool:
        return not part[1] or self._picture(part[1]) is not None

    def _picture(self, path: str) -> str | None:
        if path not in self.known:
            file = next((root / path for root in self.roots if (root / path).is_file()), None)
            self.known[path] = None if file is None else relative(file, self.options.out)
        return self.known[path]


def _parts(row: dict[str, Any], text: str, image: str, where: Where) -> list[Part]:
    """(text without picture placeholders, picture path) pairs of two parallel columns."""
    texts, paths = (_cells(row[column], where, column) for column in (text, image))
    size = max(len(texts), len(paths), 1)
    texts, paths = texts or [""] * size, paths or [""] * size
    if len(texts) != len(paths):
        raise UserError(f"{len(texts)} values in {text}, {len(paths)} in this column", *where, image)
    return list(zip(map(plain, texts), paths, strict=True))


def _cells(value: Any, where: Where, column: str) -> list[str]:
    """The texts of a cell, "" for missing ones. Raises `UserError`: it holds anything else."""
    if value is None:
        return []
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    if wrong := [one for one in found if not isinstance(one, str | None)]:
        raise UserError(f"it must be a text, got {wrong[0]!r}", *where, column)
    return [one or "" for one in found]


def _id(part: Part) -> str:
    # Equal content gets equal ids, so that in-batch masking recognises rows of the same class.
    return hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16]


def _files(src: Path, name: str, split: str) -> list[Path]:
    patterns = [
        f"{folder}/{split}{ending}" for folder in (name, name.replace("-", "_")) for ending in ENDINGS
    ]
    return next((found for pattern in patterns if (found := sorted(src.glob(pattern)))), [])
