"""Make a small model: build it, and teach its vision tower to name pictures; interrupted and started again, it resumes."""

import json
import math
import shutil
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from transformers import AutoModelForImageTextToText, AutoProcessor

from rge.checkpoints.settings import EYES, CheckpointError
from rge.checkpoints.training_state import newest_state
from rge.common.errors import UserError
from rge.common.files import find_shipped, held, read_json, same_mode, write_json
from rge.common.options import MAY_DIFFER, marked
from rge.data.sources import RecordFile
from rge.distributed import collectives as dist
from rge.distributed import launch
from rge.distributed.config import TrainConfig
from rge.distributed.failure_detection import watch_other_ranks
from rge.distributed.stop_signals import restoring_handlers, stop_after_this_step_at_signals
from rge.identity.run_identity import (
    IDENTITY,
    Identity,
    content_of,
    differences,
    flattened,
    in_words,
    run_identity,
)
from rge.model import vision_tower
from rge.model.families import family_of
from rge.model.hub_model import HubModel
from rge.small_models import build, naming
from rge.small_models.config import SmallModel
from rge.small_models.smollm2 import is_smollm2


def run(options: SmallModel) -> None:
    """Make the model in a process of its own, or in one of several that a launcher has started."""
    torch.set_float32_matmul_precision("highest")
    train = TrainConfig()
    with restoring_handlers():
        accelerator = launch.make_accelerator(train)
        with watch_other_ranks(train.silence_s), ExitStack() as lock:
            launch.check_launch(accelerator, train)
            if accelerator.is_main_process:
                lock.enter_context(held(log_folder(options)))
            make(options, accelerator)
    dist.close()


def log_folder(options: SmallModel) -> Path:
    """Folder of the naming stage's log and states, and of the unfinished model."""
    return Path(f"{options.out}_naming")


def make(options: SmallModel, accelerator: Accelerator) -> None:
    """Write the model's folder, unless it is finished; all processes call it.

    Raises:
        CheckpointError: an earlier one, finished or not, was made from other inputs.
        LaunchError: weights would be sharded, which neither the builder nor the naming stage supports.
        UserError: sizes that make no model, a package that is missing, or fewer pictures a step than processes.
    """
    out, log = Path(options.out), log_folder(options)
    launched = launch.back_end(accelerator)
    if not launched.is_ddp:
        raise launch.LaunchError(
            f"a small model is built by one process or under DDP, not {launched.name}", kind=launched.key
        )
    if options.naming is not None and options.naming.batch_size < launched.num_processes:
        raise UserError(
            f"naming.batch_size={options.naming.batch_size} leaves some of the {launched.num_processes} processes without a picture: "
            "raise it, or launch fewer"
        ).about("naming.batch_size")
    is_finished = check_same_inputs(options)
    accelerator.wait_for_everyone()  # before the main process begins to write it
    if is_finished:
        accelerator.print(f"{out} is finished: give another out=, or delete it to build it again")
        return
    for part in build.origins(options.text, options.vision):
        accelerator.print(
            f"{part.part}: {part.name}, {part.licence}, {part.bytes / 1e6:.1f} MB ({part.file}, sha256 {part.sha256})"
        )
    identity, unfinished = (
        run_identity(**inputs(options)),
        log / "model",
    )  # with the packages that `origins` has loaded
    if accelerator.is_main_process:
        shutil.rmtree(unfinished, ignore_errors=True)
        texts = [text for path in options.texts for text in RecordFile(path).texts()]
        build.build(
            unfinished, list(dict.fromkeys(texts)), seed=options.seed, vocab_size=options.vocab_size, text=options.text,
            vision=options.vision, min_pixels=options.min_pixels, max_pixels=options.max_pixels,
        )  # fmt: skip
    accelerator.wait_for_everyone()
    if options.naming is not None:
        teach(options, options.naming, unfinished, identity, accelerator)
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(unfinished / IDENTITY, identity)
        same_mode(unfinished, unfinished / IDENTITY)
        unfinished.rename(out)
        shutil.rmtree(log / "state", ignore_errors=True)
        size = sum(path.stat().st_size for path in out.iterdir())
        accelerator.print(f"{out}: {size / 1e6:,.1f} MB")
    accelerator.wait_for_everyone()


def inputs(options: SmallModel) -> Identity:
    """All inputs of the model, for `rge.identity.run_identity`."""
    paths = [*options.texts, *([options.naming.records] if options.naming else [])]
    may_differ = {*marked(SmallModel, MAY_DIFFER)}
    given = {key: value for key, value in flattened(asdict(options)).items() if key not in may_differ}
    return {"model": given, "records": {str(path): content_of(find_shipped(path)) for path in paths}}


def check_same_inputs(options: SmallModel) -> bool:
    """Whether the model is finished; CheckpointError if it, or the unfinished one's state, was made from other inputs."""
    folder, newest = Path(options.out), newest_state(log_folder(options) / "state")
    if is_finished := folder.exists():
        found = read_json(folder / IDENTITY)
    elif newest is None:
        return False
    else:
        folder, found = newest[0], newest[1]["identity"]
    if found is None:
        raise CheckpointError(
            "it does not record what it was made from: delete it, or give another out=",
            folder,
            kind="unknown",
        )
    now = inputs(options)
    if apart := differences({key: found[key] for key in now}, now):
        raise CheckpointError(
            f"it was made from other inputs (then and now): {'; '.join(in_words(apart))}. Use another out=, or delete it",
            folder,
        ).about(*apart)
    return is_finished


def teach(
    options: SmallModel,
    config: naming.Naming,
    folder: Path,
    identity: Identity,
    accelerator: Accelerator,
) -> None:
    """Train the model in a folder in place, see `rge.small_models.naming.teach`."""
    model = cast(HubModel, AutoModelForImageTextToText.from_pretrained(folder))
    vision_tower.speed_up(model)
    processor = AutoProcessor.from_pretrained(folder)
    side_px = math.isqrt(options.max_pixels)
    # As a square picture of the later stages is scaled: in whole placeholders.
    side_px, _ = family_of(model).scaled_size((side_px, side_px), processor.image_processor)
    pictures, labels, names = naming.naming_pictures(config.records, side_px)
    stop_after_this_step_at_signals()
    accuracy = naming.teach(
        model, accelerator, processor, pictures, labels, names, log_folder(options), config, seed=options.seed,
        train_text=not is_smollm2(options.text), identity=identity,
    )  # fmt: skip
    if accelerator.is_main_process:
        model.cpu().save_pretrained(folder)
        learned = {
            "records": str(config.records), "pictures": len(pictures), "names": len(names), "train_accuracy": accuracy,
        }  # fmt: skip
        (folder / EYES).write_text(json.dumps(learned))
