"""The data set card (``README.md``)."""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from huggingface_hub import DatasetCardData
from jinja2 import Environment, FileSystemLoader, Template

from data_prep.rmir.decisions import AGREEMENT, REVIEWED, about_panel
from rge.common.files import read_json, write_text
from rge.stats.intervals import in_words

TEMPLATES = Path(__file__).parent / "templates"
HUB_LICENCES = (
    "apache-2.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0",
    "cc0-1.0", "gpl-2.0", "gpl-3.0", "mit", "odc-by", "pddl",
)  # fmt: skip
"""Licence identifiers that the hub accepts; others are listed per picture in the table of pictures."""


def write(run: Path) -> Path | None:
    """Write the card of a run's data set from all its reports, and return its path.

    None: there is no data set, or it was made with other settings than the report's, of which the card must not speak.
    """
    report = read_json(run / "report.json") or {}
    if not (run / "dataset").is_dir() or (report and "split" not in report["stages"]):
        return None
    people, reviewed = (about_panel(run / name) or {} for name in (AGREEMENT, REVIEWED))
    return write_into(run / "dataset", report, people, reviewed)


def write_into(
    folder: Path, report: dict[str, Any], people: dict[str, Any], reviewed: dict[str, Any], name: str = ""
) -> Path:
    """Write ``README.md`` into the folder of a data set, and return its path.

    ``report``, ``people`` and ``reviewed`` are results of `data_prep.rmir.results`: of `report.collect`, `review.compare` and
    `review.settle`; empty if there are none yet. ``name`` is used if the report is empty.
    """
    settings, stages = report.get("settings", {}), report.get("stages", {})
    name = settings.get("export", {}).get("name", name)
    columns = ["licence", "source", "author", "caption_by"]
    pictures = pq.read_table(folder / "pictures.parquet", columns=columns)
    licences = Counter(str(licence) for licence in pictures["licence"].to_pylist())
    captions_by = Counter(by or "none" for by in pictures["caption_by"].to_pylist())
    composition = _composition(folder)
    audit = stages.get("audit", {}).get("counts")
    rows = people.get("rows", {})
    accepted = rows.get("panel accepted")
    text = template("card.md").render(
        head=_head(folder, licences, sum(composition[-1][1:])),
        name=name,
        report=report,
        stages=stages,
        composition=composition,
        licences=licences,
        known={key: len(pictures) - pictures[key].null_count for key in ("source", "author")},
        captions_by=captions_by if captions_by.keys() - {"library", "none"} else None,
        filters=settings.get("library", {}).get("filters"),
        settings=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip() if settings else None,
        audit=audit,
        ks=cut_offs(audit),
        accepted=accepted if accepted and accepted["share"] is not None else None,
        in_words=in_words,
        verdicts=[
            (group, row)
            for group, row in rows.items()
            if row["share"] is not None and not group.startswith("by ")
        ],
        kappas=[row["kappa"] for row in people.get("between", {}).values() if row["kappa"] is not None],
        reviewed=reviewed,
    )
    write_text(folder / "README.md", text)
    return folder / "README.md"


def cut_offs(audit: dict[str, Any] | None) -> list[str]:
    """Cut-offs k of the audit's ``solved@k``."""
    solved = audit["shortcuts"].get("any shortcut", {}).get("all", {}) if audit else {}
    return [key.partition("@")[2] for key in solved if key.startswith("solved@")]


def figure(value: float | None) -> str:
    """A share or kappa with three digits."""
    return "undefined" if value is None else f"{value:.3f}"


def template(name: str) -> Template:
    """Load a file of ``templates/`` with the filters ``number``, ``share`` and ``cell``."""
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(loader=loader, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {
        "number": "{:,}".format,
        "share": figure,
        "cell": lambda text: " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;"),
    }
    return environment.get_template(name)


def tables(folder: Path) -> dict[str, tuple[str, str]]:
    """Subset -> (split, file) of the existing tables."""
    names = [name for name in ("train", "pictures") if (folder / f"{name}.parquet").is_file()]
    tests = sorted((folder / "test").glob("*.parquet"))
    found = {name: ("train", f"{name}.parquet") for name in names}
    return found | {path.stem: ("test", f"test/{path.name}") for path in tests}


def _head(folder: Path, licences: Counter[str], num_queries: int) -> str:
    """YAML header for the hub and Hugging Face `datasets`."""
    only = next(iter(licences)).lower().replace(" ", "-") if len(licences) == 1 else ""
    sizes = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
    return DatasetCardData(
        license=only if only in HUB_LICENCES else "other",
        language=["en"],
        tags=["image-retrieval", "composed-image-retrieval", "reasoning", "synthetic"],
        size_categories=[next((word for most, word in sizes if num_queries < most), "n>1M")],
        configs=[
            {"config_name": table, "data_files": [{"split": split, "path": path}]}
            for table, (split, path) in tables(folder).items()
        ],
    ).to_yaml()


def _composition(folder: Path) -> list[tuple[str, int, int]]:
    """(category, training queries, test queries) rows; the last row is the total."""
    train, test = (
        Counter(str(name) for name in pq.read_table(path, columns=["category"])["category"].to_pylist())
        if path.is_file()
        else Counter[str]()
        for path in (folder / "train.parquet", folder / "test" / "queries.parquet")
    )
    rows = [(name, train[name], test[name]) for name in sorted({*train, *test})]
    return [*rows, ("all", train.total(), test.total())]
