"""The icon families: who drew them, under which licence, and which of them training never sees."""

import json
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rge.common.errors import UserError


@dataclass(frozen=True, slots=True)
class Family:
    """One set of drawings by one hand.

    Attributes:
        name: of the npm package ``@iconify-json/NAME`` and of the pictures, ``NAME/1F512``.
        version: of that package.
        title: what its makers call it.
        author: to be credited.
        licence: SPDX identifier.
        url: home of the drawings.
        licence_url: text of the licence.
        library: Parquet file of its pictures, relative to the folder of the split that shows them.
    """

    name: str
    version: str
    title: str
    author: str
    licence: str
    url: str
    licence_url: str
    library: str = "pictures.parquet"


_APACHE = "https://www.apache.org/licenses/LICENSE-2.0"
_CC_BY = "https://creativecommons.org/licenses/by/4.0/"
_CC_BY_SA = "https://creativecommons.org/licenses/by-sa/4.0/"

TRAINING = (
    Family(
        "noto",
        "1.2.9",
        "Noto Emoji",
        "Google Inc",
        "Apache-2.0",
        "https://github.com/googlefonts/noto-emoji",
        _APACHE,
    ),
    Family(
        "noto-v1",
        "1.2.5",
        "Noto Emoji (v1)",
        "Google Inc",
        "Apache-2.0",
        "https://github.com/googlefonts/noto-emoji",
        _APACHE,
    ),
    # Share-alike: kept in a file of its own, so that the licence of the others stays what it is.
    Family(
        "openmoji",
        "1.2.29",
        "OpenMoji",
        "OpenMoji",
        "CC-BY-SA-4.0",
        "https://openmoji.org",
        _CC_BY_SA,
        library="openmoji/pictures.parquet",
    ),
    Family(
        "emojione",
        "1.2.3",
        "EmojiOne 2 (Emojitwo)",
        "Emoji One",
        "CC-BY-4.0",
        "https://github.com/EmojiTwo/emojitwo",
        _CC_BY,
    ),
    Family(
        "fxemoji",
        "1.2.2",
        "Firefox OS Emoji",
        "Mozilla",
        "Apache-2.0",
        "https://github.com/mozilla/fxemoji",
        _APACHE,
    ),
)
"""Families that draw the training and validation pictures."""

QUERIES = Family(
    "twemoji", "1.2.5", "Twemoji", "Twitter", "CC-BY-4.0", "https://github.com/jdecked/twemoji", _CC_BY
)
"""Held out: draws the pictures of the test queries."""

GALLERY = Family(
    "fluent-emoji-flat",
    "1.2.6",
    "Fluent Emoji",
    "Microsoft Corporation",
    "MIT",
    "https://github.com/microsoft/fluentui-emoji",
    "https://github.com/microsoft/fluentui-emoji/blob/main/LICENSE",
)
"""Held out: draws the test gallery. Its 3-D and gradient sisters are the same design and stay out of training too."""

FAMILIES = (*TRAINING, QUERIES, GALLERY)


def load_icons(family: Family, folder: Path) -> dict:
    """Icons of a family, as iconify stores them; the package is fetched with ``npm pack`` when the folder lacks it.

    Args:
        family: which.
        folder: laid out like ``node_modules``: ``folder/@iconify-json/noto/icons.json``.

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
