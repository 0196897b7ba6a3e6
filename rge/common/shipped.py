"""Files that come with the package: recipes, launch configs and the demo's pictures, from a checkout or from a wheel."""

from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
"""What holds the packages `rge`, `eval` and `data_prep`: the checkout, or site-packages."""
RECIPES = HOME / "rge" / "recipes" if (HOME / "rge" / "recipes").is_dir() else HOME / "recipes"
"""A wheel has them inside `rge`; a checkout beside it, where people look."""


def find(path: str | Path) -> Path:
    """Where a file or folder is that a recipe or a command names.

    A path is relative to the working folder. One that is not there and begins with ``recipes/`` or ``data_prep/`` is
    looked for among the files that came with the package, so that the demo can be run from any folder.

    Args:
        path: as it was written.

    Returns:
        A path that exists, else `path` as it was.
    """
    path = Path(path)
    if path.is_absolute() or path.exists() or not path.parts:
        return path
    shipped = {"recipes": RECIPES, "data_prep": HOME / "data_prep"}.get(path.parts[0])
    if shipped is None or not (found := shipped.joinpath(*path.parts[1:])).exists():
        return path
    return found
