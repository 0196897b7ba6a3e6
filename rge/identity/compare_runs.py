"""``rge compare-runs A B``: how two runs differ."""

from dataclasses import dataclass
from pathlib import Path

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.files import read_json
from rge.common.options import parse_options, positional
from rge.config import without_unused
from rge.identity.run_identity import IDENTITY, Identity, differences, in_words, unknown


@dataclass
class CompareRunsOptions:
    """Show the files, keys and modules in which two runs, states, checkpoints or evaluations differ; exit code 1 if they do.

    ``rge compare-runs A B`` is short for ``a=`` and ``b=``.
    """

    a: Path
    """Folder of a run, one of its stages, a state, a checkpoint, a backbone or an evaluation."""
    b: Path
    """Another one."""


RECORDED_IN = ("rge.json", "done.json", "results.json", IDENTITY)


def main(words: list[str]) -> int:
    """Print the differences; 1 if there are any."""
    options = parse_options(CompareRunsOptions, positional(words, "a", "b"), "rge compare-runs A B")
    files = [_recorded_in(path) for path in (options.a, options.b)]
    a, b = map(read_identity, files)
    lines = in_words(differences(a, b))
    for part in unknown(a, b):
        file = files[0] if a.get(part) is None else files[1]
        lines.append(f"unknown: {part}, which {file} does not record")
    print("\n".join([f"a = {files[0]}", f"b = {files[1]}", *(lines or ["no differences"])]))  # noqa: T201
    return 1 if lines else 0


def read_identity(path: Path) -> Identity:
    """The identity in a file of `RECORDED_IN`, with the recipe of a training."""
    content = read_json(path) or {}
    identity: Identity = dict(content if path.name == IDENTITY else content.get("identity") or {})
    identity.pop("key", None)  # of an evaluation: the hash of the rest
    if "recipe" in content and path.name != IDENTITY:
        identity = {
            "recipe": without_unused(content["recipe"]),
            "progress": {"step": content.get("step")},
            **identity,
        }
    return identity


def _recorded_in(path: Path) -> Path:
    folders = [path]
    for stage in (path, path / "rl", path / "joint", path / "cold_start"):
        folders += [stage / "final", *sorted(stage.glob("state/step_*"), reverse=True)]
    for folder in folders:
        for name in RECORDED_IN:
            if (folder / name).is_file():
                return folder / name
    raise UserError(
        f"{path} is not a run, state, checkpoint or evaluation: it contains none of {', '.join(RECORDED_IN)}"
    )


if __name__ == "__main__":
    start(main)
