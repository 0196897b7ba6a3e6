"""The prompt files in ``prompt_files/``; files of the same name in a user's folder override them.

``kinds.md``           the kinds of reasoning with examples; each begins with a line ``CODE (name): ...``
``constraints.md``     constraints that every question must meet
``content_policy.md``  pictures that the writer declines (``generate.content_policy``)
``generate.md``, ``filter.md``, ``judge.md``  the prompts that include them, as {kinds}, {constraints} and {policy}
``caption.md``         the prompt for captions (``caption.model``)

The tasks, constraints and tagged formats are those of RMIR's appendix A; the words and examples are ours.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from rge.common.errors import UserError

SHIPPED = Path(__file__).parent / "prompt_files"
FORM = "Answer in exactly this format"
"""Start of the format section of each prompt, which is repeated when an answer could not be parsed."""
FILES = (
    "generate.md", "filter.md", "judge.md", "caption.md", "kinds.md", "constraints.md", "content_policy.md",
)  # fmt: skip
NEEDED = {
    "generate.md": ("{codes}", FORM, "<query>", "<target_desc>", "<reasoning>", "<Example_CODE_1>"),
    "filter.md": (FORM, "<is_valid>yes or no</is_valid>"),
    "judge.md": (FORM, "<consistent>True, False or ABSTAIN</consistent>"),
    "caption.md": (FORM, "<caption>"),
}
"""Text that each file must contain for its answers to be parsable."""


@dataclass(frozen=True)
class Wording:
    """The prompts of a run."""

    codes: dict[str, str]  # kind of reasoning -> its code in the tags of answers
    generate: str  # with placeholders for ``codes`` and ``policy``
    filter: str
    judge: str
    caption: str
    content_policy: str  # inserted for ``policy``

    def asked(self, names: list[str], *, content_policy: bool) -> str:
        """The writer's prompt for the given kinds of reasoning."""
        codes = ", ".join(self.codes[name] for name in names)
        policy = f"{self.content_policy}\n\n" if content_policy else ""
        return _filled(self.generate, {"codes": codes, "policy": policy})


@functools.cache
def wording(folder: str | None = None) -> Wording:
    """Read the texts; a folder's files replace the shipped ones of the same name. Raises `UserError`: one is unusable."""
    texts = {name: _text(SHIPPED / name) for name in FILES}
    if folder is not None:
        texts |= _replaced(Path(folder))
    kinds = re.findall(r"^([A-Z]+) \((\w+)\):", texts["kinds.md"], flags=re.M)
    for words in zip(*kinds, strict=True):
        if twice := [word for word in words if words.count(word) > 1]:
            raise UserError(
                "it stands for two kinds; each needs its own code and name",
                f"{folder}/kinds.md",
                key=twice[0],
            )
    codes = {name: code for code, name in kinds}
    if not codes:
        raise UserError(
            "it has no line such as 'FUNC (functional): which tool is needed'",
            f"{folder}/kinds.md",
            kind="empty",
        )
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
    """Texts of a user's folder, by file name; raises as `wording` does."""
    texts = {path.name: _text(path) for path in sorted(folder.glob("[!.]*.md"))}
    if not texts:
        raise UserError(f"it is no folder with any of the files {', '.join(FILES)}", folder, key="prompts")
    for name, text in texts.items():
        if name not in FILES:
            raise UserError(
                f"it does not replace any prompt; the files are {', '.join(FILES)}",
                folder / name,
                kind="unknown",
            )
        if missing := [part for part in NEEDED.get(name, ()) if part not in text]:
            raise UserError(
                "it must contain this, or its answers cannot be parsed",
                folder / name,
                key=missing[0],
                kind="lacking",
            )
    return texts


def _filled(text: str, values: dict[str, str]) -> str:
    # Not str.format, since examples may contain braces.
    return re.sub(
        "|".join(rf"\{{{name}\}}" for name in values), lambda place: values[place.group()[1:-1]], text
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig").strip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"it cannot be read: {error}", path, kind="unreadable") from None
