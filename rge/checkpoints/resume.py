"""Whether a stage is finished already, and whether what is on disk belongs to the recipe at hand."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from rge.checkpoints.export import RGE_JSON, CheckpointError, read_settings
from rge.checkpoints.training_state import complete_states, read_done
from rge.config import Recipe, flat, to_dict
from rge.distributed import launch

MAY_DIFFER = ("out", "stage", "recipe", "log.", "train.save_every", "train.keep_last", "train.log_every", "data.num_workers",
              "data.prefetch_mb", "data.on_bad", "data.max_bad_share",
              "train.num_processes", "train.back_end", "train.background_save", "validation.")  # fmt: skip
"""Keys that do not change the result, so that a run may be resumed with other values."""

NOT_OF = {
    "cold_start": ("joint.", "loss.", "rollout.", "rl."),
    "joint": ("rl.",),
    "rl": ("cold_start.", "joint."),
}
"""Keys that a stage does not depend on; `rl` begins with a checkpoint, which has its own recipe."""


def finished(folder: Path, recipe: Recipe, name: str) -> bool:
    """Whether the stage's checkpoint is there, made with this recipe.

    Raises:
        CheckpointError: it was made with another recipe; the differing keys are named.
    """
    if not (folder / "final" / RGE_JSON).is_file():
        return False
    settings = read_settings(folder / "final")
    check_same_recipe(settings["recipe"], recipe, name, folder / "final")
    return True


def check_state(folder: Path, recipe: Recipe, name: str, accelerator: Accelerator) -> None:
    """Whether the stage's newest state, if there is one, can be resumed from by this recipe and launch.

    Raises:
        CheckpointError: another recipe made it.
        LaunchError: see `rge.distributed.launch.check_resume`.
    """
    for path in complete_states(folder / "state")[-1:]:
        if (done := read_done(path)) is not None:
            check_same_recipe(done["recipe"], recipe, name, path)
            launch.check_resume(done.get("launch"), accelerator, path)
            _check_streams(done, recipe, name, accelerator, path)


def _check_streams(
    done: dict[str, Any], recipe: Recipe, name: str, accelerator: Accelerator, path: Path
) -> None:
    """What each reader of a stream reads depends on how many there are: data workers of all processes."""
    streams = [source.label for source in getattr(recipe, name).sources if source.streaming]
    if not streams or done.get("launch") is None:
        return
    then = done["launch"]["num_processes"], done["recipe"]["data"]["num_workers"]
    now = accelerator.num_processes, recipe.data.num_workers
    if (then[0], max(then[1], 1)) != (now[0], max(now[1], 1)):
        raise CheckpointError(
            f"{path} was saved by {then[0]} processes with data.num_workers={then[1]}, and now there are {now[0]} with "
            f"{now[1]}: the stream {streams[0]} is dealt out over all of them, so go on with as many as before"
        )


def check_same_recipe(found: dict[str, Any], recipe: Recipe, name: str, path: Path) -> None:
    """Refuse to continue or reuse what another recipe made.

    Only keys that matter to the stage are compared: see `NOT_OF`.

    Raises:
        CheckpointError: names the differing keys.
    """
    ignored = MAY_DIFFER + NOT_OF[name]
    ours, theirs = flat(to_dict(recipe)), flat(found)
    if name == "cold_start":
        # The one loss setting that the cold start uses.
        ours["cold_start loss.lm_on_candidates"] = ours["loss.lm_on_candidates"]
        theirs["cold_start loss.lm_on_candidates"] = theirs.get("loss.lm_on_candidates")
    different = [
        f"{key} (there {theirs.get(key)!r}, now {ours.get(key)!r})"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key) and not key.startswith(ignored)
    ]
    if different:
        raise CheckpointError(
            f"{path} was made with another recipe: {'; '.join(different)}. Use another out=, or delete {path.parent}"
        )
