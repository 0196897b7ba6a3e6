"""Hooks of `mkdocs.yml`: README, CONTRIBUTING and CHANGELOG become pages of the site, with links adapted.

Also prints the annotated tree, one line per file from its docstring: `python scripts/docs_site.py > docs/tree.md`.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages outside docs/, and their names on the site."""

READ_FIRST = ("train.py", "step/training_step.py", "model/packing.py", "rollout/generate.py", "losses.py")
"""Files of rge/."""

SPEAKING = ("__init__", "__main__", "config", "options", "errors")
"""Files whose names say what they are."""


def on_files(files, config):
    """Add the pages outside docs/."""
    from mkdocs.structure.files import File

    for name, page in BESIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links of the repository into links of the site; links to files that are not pages become plain text."""
    beside = page.file.src_uri in BESIDE.values()
    folder = ROOT if beside else ROOT / "docs"

    def link(found: re.Match) -> str:
        words, target, anchor = found.group(1), found.group(2), found.group(3) or ""
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT):
            return found.group(0)
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("docs/") and path.is_file():
            return f"{words}({name.removeprefix('docs/')}{anchor})"
        return f"{words}({BESIDE[name]}{anchor})" if name in BESIDE else words.strip("![]")

    return re.sub(r"(!?\[[^\]]*\])\(([^)#:\s]+)(#[^)]*)?\)", link, markdown)


def tree() -> str:
    """The annotated tree as Markdown."""
    lines = [
        "# What each file is for",
        "",
        "Each line is the first sentence of a file's docstring, by `python scripts/docs_site.py > docs/tree.md`. A room's `__main__.py` "
        "(its command), `config.py` (its section of the recipe), `options.py` and `errors.py` have no line. Read first: "
        + ", ".join(f"`rge/{name}`" for name in READ_FIRST)
        + ".",
    ]
    for top in ("rge", "data_prep", "eval", "scripts"):
        folders = sorted({path.parent for path in (ROOT / top).rglob("*.py")})
        for folder in folders:
            shared = folder.name in ("rge", "common")  # there, these names hold more than one room's
            left_out = SPEAKING[: 2 if shared else None]
            files = sorted(path for path in folder.glob("*.py") if path.stem not in left_out)
            if folder.name == "benches":  # `python scripts/bench.py` lists them
                files = []
            package = folder / "__init__.py"
            says = [first_sentence(package), ""] if package.exists() else []
            if not files and not any(says):
                continue
            lines += ["", f"## `{folder.relative_to(ROOT).as_posix()}/`", "", *says]
            lines += [f"- `{path.name}`: {first_sentence(path)}" for path in files]
    return "\n".join(lines) + "\n"


def first_sentence(path: Path) -> str:
    """What a file's docstring says first."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph)[0]


if __name__ == "__main__":
    print(tree(), end="")
