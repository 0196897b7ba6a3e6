"""Choose settings of a recipe's first stage without the test: name drawings of families that this training left out.

    python scripts/validate_eyes.py families=emojione,openmoji [recipe=demo] [seeds=1] [key=value ...]

For each family and seed the backbone of the recipe (``model.scratch``) is built and taught from the naming records without
that family's drawings, by one process, and then names them: those things, that is, that another family draws too. Any
other ``key=value`` goes to the recipe, such as ``model.scratch.naming_steps=500``. A line of JSON says how many per cent
were chosen right among all names and how many were written right, with 95 % intervals by thing; each drawing counts as
it is and slightly moved four times, which halves the noise. With all five families of the demo that is 1,233 drawings.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rge.common.commands import start  # noqa: E402
from rge.common.errors import UserError  # noqa: E402
from rge.common.options import names_of, offer_help, parse_options, split_word  # noqa: E402
from rge.config import Recipe, load_recipe  # noqa: E402
from rge.data.readers import open_records  # noqa: E402
from rge.data.sources import RecordFile  # noqa: E402
from rge.model import vision_tower  # noqa: E402
from rge.scratch import pretrain_vision as eyes  # noqa: E402
from rge.scratch.starting_point import starting_point, tokenizer_sources  # noqa: E402
from rge.stats import intervals  # noqa: E402

MOVES = ((1.1, 0.04, 0.04), (1.1, -0.04, 0.04), (1.2, 0.04, -0.04), (1.05, -0.04, -0.04))
"""Zoom out, and shift to the right and down as a share of half the side."""


@dataclass(frozen=True)
class Options:
    """Which families are left out, one after the other; any other key goes to the recipe."""

    families: tuple[str, ...]
    """Beginnings of the pictures' ids, up to the slash."""
    recipe: str = "demo"
    """With ``model.scratch.naming``: a name, or a YAML file."""
    seeds: int = 1
    """Runs a family, with train.seed 0, 1, ..."""


def main(words: list[str]) -> None:
    """Train and name; one line of JSON a run, and one over all."""
    offer_help(Options, words, "python scripts/validate_eyes.py")
    own = [word for word in words if split_word(word)[0] in names_of(Options)]
    options = parse_options(Options, own, "python scripts/validate_eyes.py")
    os.chdir(ROOT)
    rows: dict[str, list[np.ndarray]] = {"things": [], "named": []}
    for family in options.families:
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                given = (f"recipe={options.recipe}", f"train.seed={seed}", f"out={folder}/run")
                recipe = load_recipe([*given, *(word for word in words if word not in own)])
                began = time.process_time()
                labels, named = left_out(recipe, family, Path(folder))
                seconds = time.process_time() - began
            print(
                json.dumps(
                    {"family": family, "seed": seed, **figures(labels, named), "cpu_s": round(seconds)}
                )
            )
            rows["things"].append(labels)
            rows["named"].append(named)
    if len(rows["named"]) > 1:
        every = figures(np.concatenate(rows["things"]), np.concatenate(rows["named"]))
        print(json.dumps({"family": "all", **every}))


def left_out(recipe: Recipe, family: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Teach a backbone without a family and let it name that family's drawings.

    Args:
        recipe: whose first stage is run, with its seed.
        family: whose drawings are left out.
        folder: an empty one to work in.

    Returns:
        (N,) the thing that each drawing shows, and (N, 2) share of its views that were chosen and written right.

    Raises:
        UserError: the recipe has no such stage, or the records no such family, or none beside it.
    """
    scratch = recipe.model.scratch
    if scratch is None or scratch.naming is None:
        raise UserError("the recipe teaches no eyes: model.scratch.naming is not set")
    given = Path(scratch.naming).resolve()  # and so are the pictures' places
    records = list(RecordFile(given, need_rationale=True))
    drawings = [str(image) for record in records for image in record.query.images]
    unseen = np.array([drawing.partition("#")[2].partition("/")[0] == family for drawing in drawings])
    pictures, labels, names = eyes.naming_pictures(given, int(recipe.model.max_pixels**0.5))
    if not unseen.any() or unseen.all():
        raise UserError(f"{given} must have drawings of {family} and of others; ids begin with FAMILY/")
    if len(drawings) != len(pictures):
        raise UserError(f"{given} has a drawing twice, or several in a query")
    scratch.naming = str(folder / "naming.jsonl")
    with Path(scratch.naming).open("w", encoding="utf-8") as out:
        for record, is_unseen in zip(records, unseen, strict=True):
            if not is_unseen:
                out.write(json.dumps(record.model_dump(exclude_none=True, exclude_defaults=True)) + "\n")
    texts = {
        source.key: open_records(source, on_bad=recipe.data.on_bad) for source in tokenizer_sources(recipe)
    }
    backbone = starting_point(recipe, texts, Accelerator(cpu=True))
    model, processor = (
        AutoModelForImageTextToText.from_pretrained(backbone),
        AutoProcessor.from_pretrained(backbone),
    )
    vision_tower.speed_up(model)
    asked = torch.from_numpy(unseen) & torch.isin(labels, labels[torch.from_numpy(~unseen)])
    views = [pictures[asked], *(moved(pictures[asked], *move) for move in MOVES)]
    named = [
        torch.stack(eyes.named(model.eval(), processor, view, labels[asked], names), dim=1) for view in views
    ]
    return labels[asked].numpy(), torch.stack(named).float().mean(dim=0).numpy()


def moved(picture_B3HW: Tensor, zoom: float, right: float, down: float) -> Tensor:
    """Drawings on white, a little smaller and shifted."""
    theta = torch.tensor([[zoom, 0.0, right], [0.0, zoom, down]]).expand(len(picture_B3HW), 2, 3)
    grid = F.affine_grid(theta, list(picture_B3HW.shape), align_corners=False)
    return (1 - F.grid_sample(1 - picture_B3HW, grid, align_corners=False)).clamp(0, 1)


def figures(things: np.ndarray, named: np.ndarray) -> dict[str, object]:
    """Per cent chosen and written right, each with its 95 % interval over things."""
    bootstrap = intervals.cluster_bootstrap(named, intervals.index_of([str(thing) for thing in things]))
    each = intervals.figures(bootstrap, (0.0, 1.0))
    found: dict[str, object] = {"drawings": len(things)}
    for number, name in enumerate(("chosen", "written")):
        found[name] = [None if x is None else round(100 * x, 1) for x in each[number].values()]
    return found


if __name__ == "__main__":
    start(main)
