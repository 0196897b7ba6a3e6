"""The start of a stage: a checkpoint, a model, or a backbone that is built once per run."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from transformers import AutoModelForImageTextToText, AutoProcessor

from rge.checkpoints.settings import EYES, CheckpointError
from rge.checkpoints.training_state import newest_state
from rge.common.files import checkpoint_folder, find_shipped, read_json, same_mode, write_json
from rge.common.prompt_profiles import EMB_TOKEN
from rge.config import Recipe
from rge.data.config import RecordsConfig
from rge.data.sources import Records
from rge.distributed.collectives import LaunchError
from rge.distributed.launch import back_end
from rge.distributed.stop_signals import stop_after_this_step_at_signals
from rge.identity.run_identity import IDENTITY, content_of, differences, in_words, run_identity
from rge.model import vision_tower as vision
from rge.model.backbone import check_end_of_turn, load_processor, name_tokens, read_config
from rge.model.families import family_of
from rge.model.hub_model import HubModel
from rge.scratch import build as scratch
from rge.scratch import pretrain_vision
from rge.scratch.config import ScratchConfig


@dataclass(frozen=True)
class Blueprint:
    """All inputs of a backbone, so that its identity is complete.

    `records` are the sources of the vocabulary's texts, by key; None for one that was deleted since.
    """

    recipe: Recipe
    scratch: ScratchConfig
    records: Mapping[str, Records | None]

    def texts(self) -> list[str]:
        """Training texts of the tokenizer."""
        opened = filter(None, self.records.values())
        return list(dict.fromkeys(text for records in opened for text in records.texts()))

    def identity(self) -> dict[str, Any]:
        """The inputs for `rge.identity.run_identity`."""
        recipe = self.recipe
        given = asdict(self.scratch) | {"seed": recipe.train.seed} | recipe.model.pixels
        read = {key: records and records.content for key, records in self.records.items()}
        if self.scratch.naming is not None:
            file = find_shipped(self.scratch.naming)
            read[self.scratch.naming] = content_of(file) if file.is_file() else None
        return {"backbone": json.loads(json.dumps(given)), "records": read}


def blueprint(recipe: Recipe, records: Mapping[str, Records]) -> Blueprint | None:
    """Inputs of the recipe's backbone; None if training starts from a checkpoint or model."""
    if recipe.init is not None or recipe.model.scratch is None:
        return None
    keys = (source.key for source in tokenizer_sources(recipe) if source.key)
    return Blueprint(recipe, recipe.model.scratch, {key: records.get(key) for key in keys})


def tokenizer_sources(recipe: Recipe) -> list[RecordsConfig]:
    """Sources of the texts that a built backbone's tokenizer is trained on."""
    return [source for stage in (recipe.cold_start, recipe.joint) for source in stage.sources]


def check_backbone(recipe: Recipe, records: Mapping[str, Records]) -> str | None:
    """Check that the backbone in the run's folder, finished or not, has this run's inputs; CheckpointError lists differences.

    Returns:
        A warning if deleted files could not be compared.
    """
    plan, folder = blueprint(recipe, records), Path(recipe.out) / "backbone"
    if plan is None:
        return None
    delete = Path(recipe.out)
    if folder.is_dir():
        found = read_json(folder / IDENTITY)
    else:
        delete /= "naming"
        newest = newest_state(delete / "state")
        if newest is None:
            return None
        folder, found = newest[0], newest[1]["identity"]
    if found is None:
        raise CheckpointError(f"{folder} does not record what it was made from: delete {delete}")
    now = plan.identity()
    gone = [key for key, content in now["records"].items() if content is None]
    then = {key: content for key, content in found["records"].items() if key not in gone}
    if apart := differences({"backbone": found["backbone"], "records": then}, now):
        raise CheckpointError(
            f"{folder} was made from other inputs than this run's (then and now): {'; '.join(in_words(apart))}. Use "
            f"another out=, or delete {delete}"
        )
    if gone:
        return (
            f"{folder} was made from files that no longer exist and could not be compared: {', '.join(gone)}"
        )
    return None


def starting_point(recipe: Recipe, records: Mapping[str, Records], accelerator: Accelerator) -> str:
    """Path or hub id that the first stage loads; builds the backbone of a ``model.scratch`` recipe if needed.

    `records` are opened, by `RecordsConfig.key`; at least those of `tokenizer_sources` to build a backbone.

    Raises:
        CheckpointError: see `check_backbone`.
        LaunchError: the back end cannot build a backbone.
    """
    plan = blueprint(recipe, records)
    if plan is None:
        if recipe.init is not None:
            return str(checkpoint_folder(Path(recipe.init)))
        assert recipe.model.path is not None
        return recipe.model.path
    folder = Path(recipe.out) / "backbone"
    if warning := check_backbone(recipe, records):
        accelerator.print(f"warning: {warning}")
    accelerator.wait_for_everyone()  # before the main process begins to write it
    if not folder.is_dir():
        _build(plan, folder, accelerator)
    if accelerator.is_main_process:
        shutil.rmtree(folder.with_name("naming") / "state", ignore_errors=True)
    accelerator.wait_for_everyone()
    return str(folder)


def processor_of(recipe: Recipe, records: Mapping[str, Records]) -> Any:
    """The processor used in training, including ``<emb>``, without loading weights.

    If the backbone of a ``model.scratch`` is not built yet, its tokenizer is trained here, with the same result.

    Raises:
        BackboneError: there is no model.
        OSError: it has no processor.
    """
    model, plan = recipe.model, blueprint(recipe, records)
    folder = Path(recipe.out) / "backbone"
    if plan is not None and not folder.is_dir():
        config = plan.scratch
        tokenizer = scratch.make_tokenizer(plan.texts(), config.vocab_size, config.text)
        processor = scratch.make_processor(
            tokenizer, **recipe.model.pixels, vision=config.vision, text=config.text
        )
    else:
        start = recipe.init and str(checkpoint_folder(Path(recipe.init)))
        path = start or (model.path if plan is None else folder)
        assert path is not None
        revision = model.revision if path == model.path else None
        processor = load_processor(
            path, read_config(path, revision), revision=revision, **recipe.model.pixels
        )
        check_end_of_turn(path, processor.tokenizer)
    name_tokens(processor.tokenizer, [EMB_TOKEN])
    return processor


def _build(plan: Blueprint, folder: Path, accelerator: Accelerator) -> None:
    recipe, config = plan.recipe, plan.scratch
    launched, start = back_end(accelerator), f"start with one process or DDP until {folder} is written"
    if launched.name == "ZeRO-3":
        # transformers would shard it on creation, which needs all processes.
        raise LaunchError(
            f"model.scratch is built by one process, which ZeRO-3 does not allow; {start}, or start from an existing one "
            "(init=...)"
        )
    if config.naming is not None and not launched.is_ddp:
        raise LaunchError(
            f"model.scratch.naming teaches the vision tower with Muon, which {launched.name} cannot run; {start}, or set "
            "model.scratch.naming=null"
        )
    temporary = folder.with_name("tmp_backbone")
    for part in scratch.origins(config.text, config.vision):
        accelerator.print(
            f"{part['part']}: {part['name']}, {part['licence']}, {part['bytes'] / 1e6:.1f} MB ({part['file']}, sha256 "
            f"{part['sha256']})"
        )
    identity = run_identity(**plan.identity())  # with the packages that `origins` has loaded
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        scratch.build(
            temporary, plan.texts(), seed=recipe.train.seed, vocab_size=config.vocab_size, text=config.text,
            vision=config.vision, **recipe.model.pixels,
        )  # fmt: skip
    accelerator.wait_for_everyone()
    if config.naming is not None:
        _teach_naming(plan, config.naming, temporary, identity, accelerator)
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(temporary / IDENTITY, identity)
        same_mode(temporary, temporary / IDENTITY)
        temporary.rename(folder)
        size = sum(path.stat().st_size for path in folder.iterdir())
        accelerator.print(f"{folder}: {size / 1e6:,.1f} MB")


def _teach_naming(
    plan: Blueprint, records: str, backbone: Path, identity: Mapping[str, Any], accelerator: Accelerator
) -> None:
    """Train the backbone in place, see `pretrain_vision.teach`."""
    recipe = plan.recipe
    model = cast(HubModel, AutoModelForImageTextToText.from_pretrained(backbone))
    vision.speed_up(model)
    processor = AutoProcessor.from_pretrained(backbone)
    side_px = math.isqrt(recipe.model.max_pixels)
    # As a square picture of the later stages is scaled: in whole placeholders.
    side_px, _ = family_of(model).scaled_size((side_px, side_px), processor.image_processor)
    pictures, labels, names = pretrain_vision.naming_pictures(records, side_px, recipe.data.on_bad)
    stop_after_this_step_at_signals()
    accuracy = pretrain_vision.teach(
        model, accelerator, processor, pictures, labels, names, backbone.with_name("naming"), plan.scratch,
        recipe.train, identity=identity,
    )  # fmt: skip
    if accelerator.is_main_process:
        model.cpu().save_pretrained(backbone)
        found = {
            "records": records, "pictures": len(pictures), "names": len(names), "train_accuracy": accuracy,
        }  # fmt: skip
        (backbone / EYES).write_text(json.dumps(found))
