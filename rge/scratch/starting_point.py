"""Where a stage starts from: a given checkpoint, a model, or a backbone built from nothing (once per run)."""

import json
import shutil
from pathlib import Path
from typing import cast

from accelerate import Accelerator
from transformers import AutoModelForImageTextToText, AutoProcessor

from rge.config import Recipe, ScratchConfig
from rge.data.readers import read_texts
from rge.distributed.collectives import LaunchError
from rge.distributed.launch import back_end
from rge.model import vision_tower as vision
from rge.model.hub_model import HubModel
from rge.scratch import build as scratch
from rge.scratch import pretrain_vision as eyes


def starting_point(recipe: Recipe, accelerator: Accelerator) -> str:
    """Path or hub id that the first stage loads; builds the backbone of a ``model.scratch`` recipe if needed."""
    if recipe.init is not None:
        return recipe.init
    if recipe.model.scratch is None:
        assert recipe.model.path is not None
        return recipe.model.path
    folder = Path(recipe.out) / "backbone"
    if not folder.is_dir():
        accelerator.wait_for_everyone()
        _build(recipe, recipe.model.scratch, folder, accelerator)
    accelerator.wait_for_everyone()
    return str(folder)


def _build(recipe: Recipe, config: ScratchConfig, folder: Path, accelerator: Accelerator) -> None:
    if back_end(accelerator).name == "ZeRO-3":
        # transformers would share it out while it is made, which takes all processes.
        raise LaunchError(
            f"model.scratch is built by one process, which ZeRO-3 does not let it; start with one process or DDP until "
            f"{folder} is written, or begin from one that is there (init=...)"
        )
    if config.naming is not None and not back_end(accelerator).is_ddp:
        raise LaunchError(
            f"model.scratch.naming teaches the vision tower with Muon, which {back_end(accelerator).name} cannot run; start "
            f"with one process or DDP until {folder} is written, or set model.scratch.naming=null"
        )
    temporary = folder.with_name("tmp_backbone")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        sources = [source for stage in (recipe.cold_start, recipe.joint) for source in stage.sources]
        scratch.build(
            temporary,
            read_texts(sources, recipe.data.on_bad),
            seed=recipe.train.seed,
            vocab_size=config.vocab_size,
            text=config.text,
            vision=config.vision,
            min_pixels=recipe.model.min_pixels,
            max_pixels=recipe.model.max_pixels,
        )
    accelerator.wait_for_everyone()
    if config.naming is not None:
        model = cast(HubModel, AutoModelForImageTextToText.from_pretrained(temporary))
        vision.speed_up(model)
        processor = AutoProcessor.from_pretrained(temporary)
        pictures, labels, names = eyes.naming_pictures(config.naming, int(recipe.model.max_pixels**0.5))
        accuracy = eyes.teach(
            model,
            accelerator,
            processor,
            pictures,
            labels,
            names,
            steps=config.naming_steps,
            batch_size=config.naming_batch_size,
            lr=config.naming_lr,
            seed=recipe.train.seed,
            style=config.naming_style,
            say_from=config.naming_say_from,
            muon_kernels=recipe.optim.muon_kernels,
        )
        if accelerator.is_main_process:
            model.cpu().save_pretrained(temporary)
            found = {"pictures": len(pictures), "names": len(names), "train_accuracy": accuracy}
            (temporary / "eyes.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        temporary.rename(folder)
