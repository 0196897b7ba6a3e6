"""The icon families: who drew them, under which licence, and which of them training never sees."""

import csv
import json
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rge.common.errors import UserError


@dataclass(frozen=True, slots=True)
class Family:
    """One set of drawings by one hand."""

    name: str  # of the npm package ``@iconify-json/NAME`` and of the pictures, ``NAME/1F512``
    version: str  # of that package
    title: str  # what its makers call it
    author: str  # to be credited
    licence: str  # SPDX identifier
    url: str  # home of the drawings
    licence_url: str  # text of the licence
    # Parquet file of its pictures, relative to the folder of the split that shows them. A share-alike family has its own,
    # so that the licence of the others stays what it is.
    library: str


def _read() -> list[Family]:
    with Path(__file__).with_name("families.tsv").open(encoding="utf-8", newline="") as lines:
        return [Family(**row) for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]


FAMILIES = tuple(_read())
TRAINING = FAMILIES[:5]
"""Families that draw the training and validation pictures."""
QUERIES = FAMILIES[5]
"""Held out: draws the pictures of the test queries."""
GALLERY = FAMILIES[6]
"""Held out: draws the test gallery. Its 3-D and gradient sisters are the same design and stay out of training too."""


def load_icons(family: Family, folder: Path) -> dict:
    """Icons of a family, as iconify stores them; the package is fetched with ``npm pack`` when the folder lacks it.

    Returns:
        Content of ``icons.json``: ``icons`` and ``aliases`` by name, default ``width`` and ``height``.

    Raises:
        UserError: the package there has another version, or cannot be fetched.
    """
    package = folder / "@iconify-json" / family.name
    if not (package / "icons.json").is_file():
        _fetch(family, package)
    version = json.loads((package / "package.json").read_text(encoding="utf-8"))["version"]
    if version != family.version:
        raise UserError(
            f"{package} is version {version}, the pictures come from {family.version}: remove it or give another icons="
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
                f"npm is needed to fetch {name}; or give icons=DIR, laid out like node_modules"
            ) from None
        except subprocess.CalledProcessError as error:
            raise UserError(f"npm pack {name} failed: {error.stderr.strip()}") from None
        (archive,) = Path(scratch).glob("*.tgz")
        package.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as content:
            for member in ("icons.json", "package.json"):
                found = content.extractfile(f"package/{member}")
                if found is None:
                    raise UserError(f"{name}: {member} in the package is no file")
                (package / member).write_bytes(found.read())
