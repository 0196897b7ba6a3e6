"""The prompt files in ``prompt_files/``, each of which a folder of the user's may override.

``kinds.md``           the kinds of reasoning with their examples; each begins with a line ``CODE (name): ...``
``constraints.md``     what every question must keep
``content_policy.md``  what the writer declines (``generate.content_policy``)
``generate.md``, ``filter.md``, ``judge.md``  the prompts around them
``caption.md``         what a caption is asked for with (``caption.model``)

The tasks, constraints and tagged formats are those of RMIR's appendix A; the words and examples are ours.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from rge.common.errors import UserError

SHIPPED = Path(__file__).parent / "prompt_files"
FORM = "Answer in exactly this format"
"""With this the format of each prompt begins; it is said again where an answer could not be read."""
PLACES = {
    "generate.md": ("kinds", "constraints", "policy", "codes"),
    "filter.md": ("kinds", "constraints"),
    "judge.md": ("kinds",),
    "caption.md": (),
    "kinds.md": (),
    "constraints.md": (),
    "content_policy.md": (),
}
"""What each file has places for, in braces; a file of the user's may leave some out."""
NEEDED = {
    "generate.md": ("{codes}", FORM, "<query>", "<target_desc>", "<reasoning>", "<Example_CODE_1>"),
    "filter.md": (FORM, "<is_valid>yes or no</is_valid>"),
    "judge.md": (FORM, "<consistent>True, False or ABSTAIN</consistent>"),
    "caption.md": (FORM, "<caption>"),
}
"""Without these an answer could not be read."""


class WordingError(UserError):
    """A file of prompts cannot be used; the message names it and the fix."""


@dataclass(frozen=True)
class Wording:
    """The texts of a run."""

    codes: dict[str, str]  # of each kind of reasoning, by name, as they stand in the tags of answers
    generate: str  # of the writer; with places for ``codes`` and ``policy``
    filter: str  # of the check
    judge: str  # of the judges
    caption: str  # of the captions
    content_policy: str  # for the place of that name

    def asked(self, names: list[str], *, content_policy: bool) -> str:
        """The writer's prompt for some kinds of reasoning."""
        codes = ", ".join(self.codes[name] for name in names)
        policy = f"{self.content_policy}\n\n" if content_policy else ""
        return _filled(self.generate, {"codes": codes, "policy": policy})


@functools.cache
def wording(folder: str | None = None) -> Wording:
    """Read the texts; a folder's files replace the shipped ones of the same name.

    Raises:
        WordingError: it is no folder, has a file of another name, or one that lacks what answers are read by.
    """
    texts = {name: _text(SHIPPED / name) for name in PLACES}
    if folder is not None:
        texts |= _replaced(Path(folder))
    codes = {name: code for code, name in re.findall(r"^([A-Z]+) \((\w+)\):", texts["kinds.md"], flags=re.M)}
    if not codes:
        raise WordingError(f"{folder}/kinds.md has no line such as 'FUNC (functional): which tool is needed'")
    inner = {"kinds": texts["kinds.md"], "constraints": texts["constraints.md"]}
    return Wording(
        codes,
        _filled(texts["generate.md"], inner),
        _filled(texts["filter.md"], inner),
        _filled(texts["judge.md"], inner),
        texts["caption.md"],
        texts["content_policy.md"],
    )


def _replaced(folder: Path) -> dict[str, str]:
    """The texts of a user's folder, by file; errors as of `wording`."""
    if not folder.is_dir():
        raise WordingError(f"prompts={folder} is no folder")
    texts = {path.name: _text(path) for path in sorted(folder.glob("*.md"))}
    if not texts:
        raise WordingError(f"prompts={folder} has none of the files {', '.join(PLACES)}")
    for name, text in texts.items():
        if name not in PLACES:
            raise WordingError(f"{folder / name} replaces nothing; the files are {', '.join(PLACES)}")
        if missing := [one for one in NEEDED.get(name, ()) if one not in text]:
            raise WordingError(f"{folder / name} lacks {missing[0]!r}, by which its answers are read")
    return texts


def _filled(text: str, values: dict[str, str]) -> str:
    # Not str.format: an example may well have braces.
    return re.sub(
        "|".join(rf"\{{{name}\}}" for name in values), lambda place: values[place.group()[1:-1]], text
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WordingError(f"{path} cannot be read: {error}") from None
