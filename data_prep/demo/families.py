"""The icon families: authors, licences, and which of them are held out from training."""

import csv
import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rge.common.errors import UserError


@dataclass(frozen=True, slots=True)
class Family:
    """Icons by one author in one style."""

    name: str  # as in the npm package ``@iconify-json/NAME`` and in picture ids, ``NAME/1F512``
    version: str  # of the npm package
    title: str  # the authors' name for it
    author: str  # to credit
    licence: str  # SPDX identifier
    url: str  # home of the drawings
    licence_url: str  # text of the licence
    # Parquet file of its pictures, relative to the split's folder. A share-alike family has a file of its own, so that
    # its licence does not extend to the others.
    library: str


def rows_of(table: str) -> list[dict[str, str]]:
    """Rows of a table beside this file, by its name without ``.tsv``."""
    with Path(__file__).with_name(f"{table}.tsv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True))


FAMILIES = tuple(Family(**row) for row in rows_of("families"))
TRAINING = FAMILIES[:5]
"""Families of the training and validation pictures."""
QUERIES = FAMILIES[5]
"""Held-out family of the test queries."""
GALLERY = FAMILIES[6]
"""Held-out family of the test gallery. Its 3-D and gradient variants share the design, so training excludes them too."""


def load_icons(family: Family, folder: Path) -> dict:
    """A family's ``icons.json``: ``icons`` and ``aliases`` by name, default ``width`` and ``height``.

    A package that the folder lacks is fetched with ``npm pack``. UserError: it has the wrong version, or cannot be fetched.
    """
    package = folder / "@iconify-json" / family.name
    if not (package / "icons.json").is_file():
        _fetch(family, package)
    version = json.loads((package / "package.json").read_text(encoding="utf-8"))["version"]
    if version != family.version:
        raise UserError(
            f"it is version {version}, but the pictures need {family.version}: remove it or pass another icons=",
            package,
            kind="version",
        )
    return json.loads((package / "icons.json").read_text(encoding="utf-8"))


def _fetch(family: Family, package: Path) -> None:
    name = f"@iconify-json/{family.name}@{family.version}"
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", "--pack-destination", scratch, name]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise UserError(
                f"npm is needed to fetch {name}: install it, or pass a folder laid out like node_modules",
                key="icons",
            ) from None
        except subprocess.CalledProcessError as error:
            raise UserError(f"npm pack failed: {error.stderr.strip()}", key=name) from None
        (archive,) = Path(scratch).glob("*.tgz")
        shutil.unpack_archive(archive, scratch, filter="data")
        shutil.copytree(Path(scratch) / "package", package, dirs_exist_ok=True)
