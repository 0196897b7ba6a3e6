"""What stands beside the data: ``README.md``, the card that the library `datasets` and the hub read, and ``croissant.json``.

Croissant is MLCommons' description of data sets in JSON-LD (version 1.0 of its specification).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from data_prep.rmir.pictures.filters import described
from rge.common.files import write_text

HUB_LICENCES = (
    "apache-2.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0",
    "cc0-1.0", "gpl-2.0", "gpl-3.0", "mit", "odc-by", "pddl",
)  # fmt: skip
"""Names that the hub knows; other licences stand in the table of pictures, one by one."""
CROISSANT = "http://mlcommons.org/croissant/1.0"
_CONTEXT = {
    "@language": "en", "@vocab": "https://schema.org/", "citeAs": "cr:citeAs", "column": "cr:column",
    "conformsTo": "dct:conformsTo", "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"}, "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/", "equivalentProperty": "cr:equivalentProperty", "examples": {"@id": "cr:examples", "@type": "@json"}, "extract": "cr:extract",
    "field": "cr:field", "fileObject": "cr:fileObject", "fileProperty": "cr:fileProperty", "fileSet": "cr:fileSet",
    "format": "cr:format", "includes": "cr:includes", "isLiveDataset": "cr:isLiveDataset", "jsonPath": "cr:jsonPath",
    "key": "cr:key", "md5": "cr:md5", "parentField": "cr:parentField", "path": "cr:path", "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet", "references": "cr:references", "regex": "cr:regex", "repeated": "cr:repeated",
    "replace": "cr:replace", "samplingRate": "cr:samplingRate", "sc": "https://schema.org/", "separator": "cr:separator", "source": "cr:source",
    "subField": "cr:subField", "transform": "cr:transform",
}  # fmt: skip


def write(run: Path) -> Path:
    """Write card and metadata of a run's data set anew, with all that is known by now.

    Args:
        run: folder of the run, with ``dataset/``; ``report.json`` and ``agreement.json`` are read where they are there.

    Returns:
        The card.
    """
    return write_into(run / "dataset", _read(run / "report.json"), _read(run / "agreement.json"))


def write_into(folder: Path, report: dict[str, Any], people: dict[str, Any], name: str = "") -> Path:
    """Write ``README.md`` and ``croissant.json`` into the folder of a data set.

    Args:
        folder: with the tables.
        report: of `data_prep.rmir.results.report.collect`; empty where the run is not finished.
        people: of `data_prep.rmir.results.review.compare`; empty where nobody looked.
        name: of the data set, where there is no report to say it.

    Returns:
        The card.
    """
    name = report.get("settings", {}).get("export", {}).get("name", name)
    licences = Counter(
        str(licence)
        for licence in pq.read_table(folder / "pictures.parquet", columns=["licence"])["licence"].to_pylist()
    )
    page = folder / "README.md"
    write_text(page, f"---\n{_head(folder, licences)}---\n\n{_text(folder, name, report, people, licences)}")
    write_text(folder / "croissant.json", json.dumps(croissant(folder, name, licences), indent=1) + "\n")
    return page


def tables(folder: Path) -> dict[str, tuple[str, str]]:
    """Subset -> split and file, of what is there."""
    found = {"train": ("train", "train.jsonl"), "pictures": ("train", "pictures.parquet")}
    found |= {
        path.stem: ("test", f"test/{path.name}") for path in sorted((folder / "test").glob("*.parquet"))
    }
    if not (folder / "train.jsonl").stat().st_size:
        del found["train"]
    return found


def _licence_id(licences: Counter[str]) -> str:
    only = next(iter(licences)).lower().replace(" ", "-") if len(licences) == 1 else ""
    return only if only in HUB_LICENCES else "other"


def _head(folder: Path, licences: Counter[str]) -> str:
    found = tables(folder)
    size = _num_rows(folder / "test" / "queries.parquet") + _num_lines(folder / "train.jsonl")
    sizes = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
    head = {
        "license": _licence_id(licences),
        "language": ["en"],
        "tags": ["image-retrieval", "composed-image-retrieval", "reasoning", "synthetic"],
        "size_categories": [next((word for most, word in sizes if size < most), "n>1M")],
        "configs": [
            {"config_name": table, "data_files": [{"split": split, "path": path}]}
            for table, (split, path) in found.items()
        ],
    }
    return yaml.safe_dump(head, sort_keys=False)


def _text(
    folder: Path, name: str, report: dict[str, Any], people: dict[str, Any], licences: Counter[str]
) -> str:
    lines = [
        f"# {name}",
        "",
        "Questions about pictures whose answers are other pictures. Made by `python -m data_prep rmir`, the pipeline of the RMIR "
        "paper: a multimodal model wrote the questions, a panel of models judged the answers.",
        "",
        'Each table is a subset: `datasets.load_dataset("FOLDER", "train")`. Paths of pictures are relative to this folder. For '
        "training: `sources: [{path: train.jsonl}]`, or `{dataset: FOLDER, name: train}`. `test/` is a retrieval set for "
        "`python -m eval run`.",
    ]
    if not report:
        lines += [
            "",
            "The run is not finished: its last stage adds composition, costs, agreement and shortcuts to this page.",
        ]
    stages = report.get("stages", {})
    lines += ["", "## Composition", "", *_composition(folder, report)]
    lines += ["", "## Licences and origin", "", *_origins(folder, licences)]
    lines += ["", "## What was removed", "", *_removed(report)]
    if settings := report.get("settings"):
        lines += [
            "", "## How it was made", "", "Settings of the pipeline; prompts are in `data_prep/rmir/prompt_files`.", "",
            "```yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip(), "```",
        ]  # fmt: skip
    if stages:
        lines += ["", "## Cost", "", *_costs(report)]
    lines += ["", "## Agreement", "", *_agreement(stages, people)]
    if "audit" in stages:
        lines += ["", "## Known shortcuts", "", *_shortcuts(stages["audit"]["counts"])]
    return "\n".join(lines) + "\n"


def _composition(folder: Path, report: dict[str, Any]) -> list[str]:
    categories: dict[str, Counter[str]] = {"train": Counter(), "test": Counter()}
    with (folder / "train.jsonl").open(encoding="utf-8") as rows:
        categories["train"].update(json.loads(row).get("category", "none") for row in rows)
    if (folder / "test" / "queries.parquet").is_file():
        column = pq.read_table(folder / "test" / "queries.parquet", columns=["category"])["category"]
        categories["test"].update(str(value) for value in column.to_pylist())
    names = sorted({name for found in categories.values() for name in found})
    lines = ["| queries | train | test |", "|---|---:|---:|"]
    lines += [f"| {name} | {categories['train'][name]:,} | {categories['test'][name]:,} |" for name in names]
    lines.append(f"| all | {categories['train'].total():,} | {categories['test'].total():,} |")
    if report.get("funnel"):
        lines += ["", "| from the library to the sets | number | unit |", "|---|---:|---|"]
        lines += [f"| {what} | {number:,} | {unit} |" for what, number, unit in report["funnel"]]
    return lines


def _origins(folder: Path, licences: Counter[str]) -> list[str]:
    table = pq.read_table(folder / "pictures.parquet", columns=["source", "author"])
    number, names = table.num_rows, pq.read_schema(folder / "pictures.parquet").names
    captions = []
    if "caption_by" in names:
        by = pq.read_table(folder / "pictures.parquet", columns=["caption_by"])["caption_by"].to_pylist()
        found = Counter(name or "none" for name in by).most_common()
        captions = [
            "",
            "Where the library has no caption a model wrote one; `caption_by` in `pictures` says whose each is: "
            f"{', '.join(f'{_cell(name)} {count:,}' for name, count in found)}.",
        ]
    known = {key: number - table[key].null_count for key in ("source", "author")}
    return [
        "| licence | pictures |",
        "|---|---:|",
        *(f"| {_cell(licence)} | {count:,} |" for licence, count in licences.most_common()),
        "",
        f"`pictures` names the licence of each picture, the source of {known['source']:,} and the author of {known['author']:,} of "
        f"{number:,}. Questions and rationales are written by models.",
        *captions,
    ]


def _removed(report: dict[str, Any]) -> list[str]:
    lines = [
        "Pictures hold no metadata: place, time, device, author and thumbnail of EXIF, comments and profiles were removed before any "
        "picture was sent to a model or written here, and pictures on their side were turned."
    ]
    lines += (
        ["", described(report.get("settings", {}).get("library", {}).get("filters", ()))] if report else []
    )
    counts = report.get("stages", {}).get("seed", {}).get("counts", {})
    if counts.get("rejected"):
        lines += ["", "| left out of the library | pictures |", "|---|---:|"]
        lines += [f"| {_cell(reason)} | {number:,} |" for reason, number in counts["rejected"].items()]
    return lines


def _costs(report: dict[str, Any]) -> list[str]:
    lines = ["| stage | calls | cost |", "|---|---:|---:|"]
    found = report["stages"]
    lines += [
        f"| {name} | {stage['calls']:,} | {stage['cost']:.4f} |"
        for name, stage in found.items()
        if stage["calls"]
    ]
    calls, cost = (sum(stage[key] for stage in found.values()) for key in ("calls", "cost"))
    return [*lines, f"| all | {calls:,} | {cost:.4f} |"]


def _agreement(stages: dict[str, Any], people: dict[str, Any]) -> list[str]:
    lines = []
    if "audit" in stages:
        kappa = stages["audit"]["counts"]["judges"]["kappa"]
        figure = "undefined" if kappa is None else f"{kappa:.3f}"
        lines += [f"Panel of models: Fleiss' kappa {figure}."]
    rows = people.get("rows", {})
    accepted = rows.get("panel accepted")
    if not accepted or accepted["share"] is None:
        return [*lines, "No person has checked a sample of the answers (`python -m data_prep review`)."]
    lines += [
        f"Of {accepted['of']:,} sampled answers that the panel accepted, people accepted {100 * accepted['share']:.1f} % "
        f"[{100 * accepted['low']:.1f}, {100 * accepted['high']:.1f}] (95 %, {accepted['queries']:,} queries as clusters); "
        f"{accepted['unsure']:,} more were left unsure.",
        "",
        "| verdicts of people | agree with the panel | of | queries | share | 95 % interval | unsure |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for name, row in rows.items():
        if row["share"] is not None and not name.startswith("by "):
            lines.append(
                f"| {_cell(name)} | {row['agree']:,} | {row['of']:,} | {row['queries']:,} | {row['share']:.3f} "
                f"| {row['low']:.3f} to {row['high']:.3f} | {row['unsure']:,} |"
            )
    pairs = [row for row in people.get("between", {}).values() if row["kappa"] is not None]
    if pairs:
        lines += [
            "",
            f"Two people, the same verdict: kappa {', '.join(format(row['kappa'], '.3f') for row in pairs)}.",
        ]
    return lines


def _shortcuts(audit: dict[str, Any]) -> list[str]:
    either = audit["shortcuts"].get("any shortcut", {})
    ks = [key.partition("@")[2] for key in either.get("all", {}) if key.startswith("solved@")]
    lines = [
        "Share of the queries that are solved without half of their input (by text alone or by picture alone, with the encoders of "
        "this run):",
        "",
        f"| queries | number | {' | '.join(f'among the first {k}' for k in ks)} |",
        f"|---|---:|{'---:|' * len(ks)}",
    ]
    for name, row in either.items():
        shares = (row[f"solved@{k}"] for k in ks)
        cells = " | ".join("undefined" if share is None else f"{share:.3f}" for share in shares)
        lines.append(f"| {_cell(name)} | {row['queries']:,} | {cells} |")
    lines += ["", "| shared by training and test | pictures |", "|---|---:|"]
    return [*lines, *(f"| {what} | {number:,} |" for what, number in audit["overlap"].items())]


# ------------------------------------------------------------------------------------------------------------- Croissant


def croissant(folder: Path, name: str, licences: Counter[str]) -> dict[str, Any]:
    """The data set in Croissant's words: its files with their hashes, and the columns of each table.

    Args:
        folder: with the tables.
        name: of the data set.
        licences: of its pictures, with their numbers.
    """
    files, records = [], []
    for table, (split, path) in tables(folder).items():
        data = folder / path
        with data.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        kind = "application/jsonlines" if data.suffix == ".jsonl" else "application/x-parquet"
        files.append(
            {"@type": "cr:FileObject", "@id": path, "name": path, "contentUrl": path, "encodingFormat": kind, "sha256": digest}
        )  # fmt: skip
        columns = _columns(data)
        records.append({
            "@type": "cr:RecordSet", "@id": table, "name": table, "description": f"{_ABOUT.get(table, table)} (split {split})",
            "field": [
                {
                    "@type": "cr:Field", "@id": f"{table}/{column}", "name": column, "description": column,
                    "dataType": kind, **({"repeated": True} if repeated else {}),
                    "source": {
                        "fileObject": {"@id": path}, "extract": {"column": column},
                        **({"transform": {"jsonPath": "bytes"}} if kind == "sc:ImageObject" else {}),
                    },
                }
                for column, kind, repeated in columns
            ],
        })  # fmt: skip
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CROISSANT,
        "name": name,
        "description": "Questions about pictures whose answers are other pictures, written and judged by models.",
        "license": sorted(licences),
        "version": "1.0.0",
        "distribution": files,
        "recordSet": records,
    }


_ABOUT = {
    "train": "training records: query, positives, negatives",
    "pictures": "caption, source, author and licence of each picture; who wrote the caption, where models did",
    "corpus": "the pictures that every test query is ranked against",
    "queries": "test queries",
    "qrels": "right answers of the test queries",
    "negatives": "candidates that the panel rejected",
    "excluded": "candidates on which the panel abstained; they count neither way",
}


def _columns(path: Path) -> Sequence[tuple[str, str, bool]]:
    if path.suffix == ".jsonl":
        # What is nested stays JSON: the records' schema is rge.common.schema.Record.
        with path.open(encoding="utf-8") as rows:
            return [
                (key, "sc:Text", False)
                for key, value in json.loads(next(rows)).items()
                if isinstance(value, str)
            ]
    found = []
    for field in pq.read_schema(path):
        kind, repeated = field.type, pa.types.is_list(field.type)
        kind = kind.value_type if repeated else kind
        named = (
            "sc:ImageObject"
            if pa.types.is_struct(kind)
            else "sc:Integer"
            if pa.types.is_integer(kind)
            else "sc:Text"
        )
        found.append((field.name, named, repeated))
    return found


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _num_rows(path: Path) -> int:
    return pq.read_metadata(path).num_rows if path.is_file() else 0


def _num_lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for _ in lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
