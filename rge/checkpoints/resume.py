"""Whether a stage is finished, and whether the files on disk belong to this run: same recipe, records and start."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from accelerate import Accelerator

from rge.checkpoints.manifest import damage
from rge.checkpoints.settings import EYES, RGE_JSON, CheckpointError, read_settings
from rge.checkpoints.training_state import complete_states, newest_state
from rge.common.errors import Fault, UserError
from rge.common.files import find_shipped
from rge.common.options import IN_COLD_START, MAY_DIFFER, ROUNDING, marked
from rge.config import Recipe, RecipeJson, to_dict, without_unused
from rge.data.sources import Records
from rge.distributed import collectives as dist
from rge.distributed import launch
from rge.identity.run_identity import Identity, content_of, differences, flattened, in_words, run_identity
from rge.model.adapter_files import is_adapter_checkpoint

NOT_OF = {
    "cold_start": ("joint", "loss", "rollout", "rl"),
    "joint": ("rl",),
    "rl": ("cold_start", "joint"),
}
"""Sections that each stage does not depend on, in the stages' order; `rl` starts from a checkpoint with its own recipe."""

_MAY_DIFFER, _ROUNDING, _IN_COLD_START = (
    frozenset(marked(Recipe, mark)) for mark in (MAY_DIFFER, ROUNDING, IN_COLD_START)
)


def finished(folder: Path, recipe: Recipe, name: str) -> bool:
    """Whether the stage's checkpoint exists; CheckpointError if it is damaged, or of another recipe or other records."""
    final = folder / "final"
    if not (final / RGE_JSON).is_file():
        return False
    if problem := damage(final, contents=False):
        raise CheckpointError(
            f"it is damaged: {problem}. Delete it and start again; unless a later stage is finished, this one continues from "
            "its last state",
            final,
            kind="damaged",
        )
    settings = read_settings(final)
    made_with = settings.recipe.content()
    check_same_recipe(made_with, recipe, name, final)
    if changed_with(made_with, recipe, name):
        return False  # it goes on from its last state
    records = (settings.identity or {}).get("records", {})
    _check_same_records(_files_now(records), records, final)
    return True


def problems(recipe: Recipe, stages: Sequence[str], accelerator: Accelerator) -> Iterator[str]:
    """Reasons why the open stages cannot start or resume in the run's folder."""
    checks = [partial(check_start, recipe)]
    for name in stages:
        folder = Path(recipe.out, name)
        if not (folder / "final" / RGE_JSON).is_file():  # otherwise `finished` has said why it does not count
            checks.append(partial(check_state, folder, recipe, name, accelerator))
    for check in checks:
        try:
            check()
        except (UserError, OSError) as error:
            yield str(error)


def stage_identity(
    recipe: Recipe,
    name: str,
    records: Mapping[str, Records],
    start: str,
    commit: str | None,
    accelerator: Accelerator,
) -> Identity:
    """Everything besides the recipe that a stage's result depends on; all processes call it."""
    found = None
    if accelerator.is_main_process:
        content: Identity = {"model": start, "commit": commit}
        if (folder := Path(start)).exists():
            base = read_settings(folder).base if is_adapter_checkpoint(folder) else None
            content = content_of(folder, but=ABOUT) | ({"base": base.sha256} if base else {})
        found = run_identity(
            records=records_identity(recipe, name, records),
            start=content,
            launch=launch.describe(accelerator) | {"mixed_precision": accelerator.mixed_precision},
        )
    return dist.from_main(found)


ABOUT = ("README.md", RGE_JSON, "identity.json", "done.json", EYES)
"""Files about a checkpoint's origin, which have no influence on what starts from it."""


def records_identity(recipe: Recipe, name: str, records: Mapping[str, Records]) -> Identity:
    """Content of a stage's open sources and of its pool, for `rge.identity.run_identity`."""
    keys = [source.key for source in getattr(recipe, name).sources]
    found = {key: records[key].content for key in keys if key in records}
    if name == "rl" and recipe.rl.pool is not None:
        found[str(recipe.rl.pool)] = content_of(recipe.rl.pool)
    return found


def check_records(folder: Path, recipe: Recipe, name: str, records: Mapping[str, Records]) -> None:
    """Raise CheckpointError if the records have changed since the stage's newest state."""
    if (newest := newest_state(folder / "state")) is not None:
        path, done = newest
        _check_same_records(
            records_identity(recipe, name, records), (done.get("identity") or {}).get("records", {}), path
        )


def check_same_run(found: Identity, now: Identity, path: Path) -> list[str]:
    """Refuse (CheckpointError) to continue with other records or from another start; returns other changes as text."""
    then = {key: value for key, value in found.items() if key != "resumed_with"}
    _check_same_records(now.get("records", {}), then.get("records", {}), path)
    apart = differences(then, now)
    if start := in_words({key: pair for key, pair in apart.items() if key.startswith("start.")}):
        raise CheckpointError(
            f"the weights from which it started have changed (then and now): {'; '.join(start)}. Use another out=, or delete "
            f"{path.parent}",
            path,
            kind="start",
        )
    return in_words(apart)


def _check_same_records(now: Identity, then: Identity, path: Path) -> None:
    both = now.keys() & then.keys()
    if apart := differences(*({"records": {key: one[key] for key in both}} for one in (then, now))):
        raise CheckpointError(
            f"it was trained on other records (then and now): {'; '.join(in_words(apart))}. The order of records depends on all "
            f"of them: restore the files, use another out=, or delete {path.parent}",
            path,
            kind="records",
        )


def _files_now(records: Identity) -> Identity:
    """Content of those files of a finished stage's records that still exist."""
    contents = {}
    for key, then in records.items():
        path = find_shipped(key)
        if "bytes" in then and path.exists():
            now = content_of(path)
            contents[key] = then | (now if now["read"] == then["read"] else {"bytes": now["bytes"]})
    return contents


def check_state(folder: Path, recipe: Recipe, name: str, accelerator: Accelerator) -> None:
    """Raise CheckpointError or LaunchError if this recipe or launch cannot resume from the stage's newest state."""
    if (newest := newest_state(folder / "state")) is None:
        return
    path, done = newest
    check_same_recipe(done["recipe"], recipe, name, path)
    check_not_past(done["step"], getattr(recipe, name).steps, name, path)
    launch.check_resume(done["launch"], accelerator, path)


def check_start(recipe: Recipe) -> None:
    """Raise CheckpointError if a stage that is run alone, without `init`, would ignore a finished earlier stage."""
    out, stages = Path(recipe.out), list(NOT_OF)
    if recipe.stage == "all" or recipe.init is not None or complete_states(out / recipe.stage / "state"):
        return
    for before in reversed(stages[: stages.index(recipe.stage)]):
        final = out / before / "final"
        if (final / RGE_JSON).is_file():
            model = recipe.model.path
            raise CheckpointError(
                f"it exists, but stage={recipe.stage} without init= starts from {model}: set init={final}, or use another out= "
                f"to start from {model}",
                final,
            ).about("init")


def result_keys(recipe: RecipeJson, name: str) -> RecipeJson:
    """The keys of a recipe that a stage's result depends on, at least by rounding: ``loss.temperature`` -> value."""
    ignored = tuple(f"{key}." for key in (*_MAY_DIFFER, *NOT_OF[name]))
    return {
        key: value
        for key, value in flattened(without_unused(recipe)).items()
        if not f"{key}.".startswith(ignored) or (name == "cold_start" and key in _IN_COLD_START)
    }


def only_rounds(key: str) -> bool:
    """Whether a key affects memory and speed, and of the result only the rounding (with dropout, also the drawn numbers).

    A run that ran out of memory may be resumed with other values.
    """
    return key in _ROUNDING


def check_same_recipe(found: RecipeJson, recipe: Recipe, name: str, path: Path) -> list[str]:
    """Refuse to continue or reuse another recipe's result; CheckpointError names the differing keys.

    Returns those that affect only rounding (`only_rounds`), with both values.
    """
    own = to_dict(recipe)
    ours, theirs = result_keys(own, name), result_keys(found, name)
    if not own["stage"] == found["stage"] == "all":
        ours["init"], theirs["init"] = _start(own, name, recipe.out), _start(found, name, recipe.out)
    different = {
        key: f"{key} (there {theirs.get(key)!r}, now {ours.get(key)!r})"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    }
    rounding = [different.pop(key) for key in [*different] if only_rounds(key)]
    for key in recipe.resume_with:
        different.pop(key, None)
    if different:
        apart = "; ".join(different.values())
        raise CheckpointError(
            f"it was made with another recipe: {apart}. Use another out=, or delete {path.parent}", path
        ).about(*(Fault("value", key, (str(theirs.get(key)),)) for key in different))
    return rounding


def changed_with(found: RecipeJson, recipe: Recipe, name: str) -> dict[str, tuple[object, object]]:
    """Keys of a stage that `Recipe.resume_with` names and that another recipe had other values of: then and now."""
    then, now = (result_keys(one, name) for one in (found, to_dict(recipe)))
    return {key: (then.get(key), now.get(key)) for key in recipe.resume_with if then.get(key) != now.get(key)}


def check_not_past(step: int, steps: int | None, name: str, path: Path) -> None:
    """Raise CheckpointError if a state is of a later step than the stage's last one."""
    if steps is not None and step > steps:
        raise CheckpointError(
            f"it is of step {step}, and {name} is to have {steps}: give {name}.steps={step} or more, or delete the later states",
            path,
        ).about(f"{name}.steps")


def _start(recipe: RecipeJson, name: str, out: str) -> str | None:
    """A recipe's start of a stage: `init`, or the previous stage in its own folder, which is now `out`."""
    stages, init = list(NOT_OF), recipe["init"]
    if name == stages[0]:
        return init
    before = Path(stages[stages.index(name) - 1], "final")
    own = init is not None and Path(init).absolute() == Path(recipe["out"], before).absolute()
    return str(Path(out, before)) if own or recipe["stage"] == "all" else init
