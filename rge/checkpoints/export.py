"""Export finished checkpoints and recognise them; states to resume from are in `rge.checkpoints.training_state`.

A finished stage is exported to ``<stage>/final``: a plain Hugging Face directory plus ``rge.json``; or adapters alone, see
`rge.model.adapter_files`.
"""

import hashlib
import json
import shutil
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import rge
from rge.checkpoints.description import SENTENCE_TRANSFORMERS, model_card
from rge.checkpoints.manifest import DONE, flush, write_manifest
from rge.checkpoints.settings import RGE_JSON, CheckpointError, CheckpointSettings
from rge.common.files import same_mode
from rge.model.adapter_files import adapter_weights, write_adapters
from rge.model.backbone import tied_names, weight_names
from rge.model.embedding_model import EmbeddingModel
from rge.model.hub_model import HubModel

IDENTIFYING = (".safetensors", ".json", ".jinja", ".txt")
"""Endings of the files that define a checkpoint; others, such as the model card, may be edited."""

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""How Python, torch's serialiser and safetensors report a full disk."""


def export(
    embedder: EmbeddingModel, folder: Path, settings: dict[str, Any], state_dict: dict | None = None
) -> None:
    """Write a finished checkpoint: weights, config, processor, chat template, ``rge.json``, model card.

    It is flushed to the disk, its weights are read back and compared, and ``done.json`` lists its files with their checksums.

    Args:
        embedder: unwrapped.
        folder: the checkpoint; written under a temporary name and renamed.
        settings: content of ``rge.json``, see `settings_of`. Where they name a ``base``, no weights are written but
            `rge.model.adapter_files.adapter_weights`.
        state_dict: weights of ``embedder.model`` that are not its own: gathered, merged. They are written in the dtype
            that the model was loaded in; where that is bfloat16, float32 ones are trained.

    Raises:
        CheckpointError: the weights' names are not those that the model is loaded with, or writing failed, or what was
            written reads back otherwise; nothing partial is left.
    """
    temporary = folder.with_name(f"tmp_{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    model, loaded = embedder.model, _dtype_loaded(embedder.model)
    if loaded is not None and {parameter.dtype for parameter in model.parameters()} != {loaded}:
        state_dict = model.state_dict(keep_vars=True) if state_dict is None else state_dict
    if adapters_only := "base" in settings:
        weights = state_dict = adapter_weights(model, embedder.rows_of_base, state_dict)
    else:
        weights = dict(model.state_dict() if state_dict is None else state_dict)
        _check_names(model, weights, folder)
    if state_dict is not None and loaded is not None:
        state_dict = weights = _cast(state_dict, loaded)
    try:
        temporary.mkdir(parents=True)
        if adapters_only:
            write_adapters(model, temporary, settings["base"], weights)
            model.config.save_pretrained(temporary)
        else:
            model.save_pretrained(temporary, state_dict=state_dict)
        if _dtype_loaded(model) != loaded:
            # transformers has written down the dtype of the weights that are trained.
            model.config.dtype = loaded
            model.config.save_pretrained(temporary)
        embedder.processor.save_pretrained(temporary)
        parts = getattr(model.config, "origins", None)
        _describe(temporary, settings | ({"origins": parts} if parts else {}), _shown_name(folder))
        same_mode(temporary, temporary / RGE_JSON)
        files = [*temporary.iterdir()]
        for path in files:
            flush(path, evict=True)  # what is compared next comes from the disk
        _check_weights(weights, temporary)
        write_manifest(temporary, {}, files=[path for path in files if path.suffix in IDENTIFYING])
    except WRITE_ERRORS as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {folder} could not be written: {error}; free some space and start again"
        ) from error
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def _describe(folder: Path, settings: dict[str, Any], name: str) -> None:
    """``rge.json``, the model card, and what sentence-transformers reads."""
    (folder / RGE_JSON).write_text(json.dumps(settings, indent=2) + "\n")
    card = model_card(CheckpointSettings.model_validate(settings), name)
    (folder / "README.md").write_text(card, encoding="utf-8")
    for file, content in SENTENCE_TRANSFORMERS.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")


def _check_names(model: HubModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Whether the weights have the names that the model is loaded with; a tied matrix may be named once."""
    wanted = weight_names(model)
    unknown, missing = weights.keys() - wanted, wanted - weights.keys() - set(tied_names(model))
    if unknown or missing:
        found = (
            f"{sorted(unknown)[0]} is not one of its weights"
            if unknown
            else f"{sorted(missing)[0]} is missing"
        )
        raise CheckpointError(
            f"checkpoint {folder} is not written, since it could not be loaded: {found} ({len(unknown)} unknown names, "
            f"{len(missing)} missing ones). Something in the launch wraps the model, such as torch.compile: leave that out, "
            "and the same command continues from the last state"
        )


def _check_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Compare what is on the disk with what was to be written, tensor by tensor; names on the disk are transformers' own.

    Raises:
        OSError: they differ.
    """
    found: Counter = Counter()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update(_fingerprints(file.get_tensor(name) for name in file.keys()))  # noqa: SIM118
    distinct = {(value.data_ptr(), value.shape): value for value in weights.values()}
    written = list(distinct.values())
    if (wanted := Counter(_fingerprints(written))) != found:
        raise OSError(
            f"{(wanted - found).total()} of {len(written)} weights read back otherwise than they were written"
        )


def _fingerprints(tensors: Iterable[Tensor]) -> list[tuple]:
    return [
        (
            str(each.dtype),
            tuple(each.shape),
            zlib.crc32(each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data),
        )
        for each in tensors
    ]


def _shown_name(folder: Path) -> str:
    """``runs/demo/joint/final`` as its card calls it: ``demo/joint/final``, without the machine's folders."""
    return "/".join(folder.resolve().parts[-3:]).lstrip("/")


def _dtype_loaded(model: HubModel) -> torch.dtype | None:
    # Saving a model once turns its config's dtype into a name.
    found = model.config.dtype
    return None if found is None else getattr(torch, str(found).removeprefix("torch."))


def _cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    # By tensor, not by name: tied ones stay one.
    cast = {
        id(value): value.detach().to(dtype) if value.is_floating_point() else value
        for value in weights.values()
    }
    return {name: cast[id(value)] for name, value in weights.items()}


def settings_of(
    *, emb_id: int, profile: str, max_prompt_tokens: int, min_pixels: int, max_pixels: int, max_new_tokens: int,
    reasons: str, recipe: dict[str, Any], stage: str, step: int,
) -> dict[str, Any]:  # fmt: skip
    """Content of ``rge.json``: what an embedder needs and a model config does not hold.

    `reasons` is the side that writes a rationale: ``query``, or ``none`` for a model trained without.
    """
    return {
        "format": 1,
        "emb_id": emb_id,
        "profile": profile,
        "max_prompt_tokens": max_prompt_tokens,
        "pixels": {"min": min_pixels, "max": max_pixels},
        "generation": {"max_new_tokens": max_new_tokens, "temperature": 0.0, "stop": "<emb>"},
        "reasons": reasons,
        "stage": stage,
        "step": step,
        "recipe": recipe,
        "rge_version": rge.__version__,
        "git_commit": git_commit(),
    }


def checkpoint_hash(checkpoint: Path) -> str:
    """Sha256 over names and contents of weights, configs, tokenizer and ``rge.json``: equal only for equal checkpoints.

    What ``rge.json`` says of the run (``identity``) does not count.
    """
    digest = hashlib.sha256()
    for path in sorted(checkpoint.iterdir()):
        if path.suffix in IDENTIFYING and path.name != DONE:
            digest.update(path.name.encode() + b"\0")
            if path.name == RGE_JSON and "identity" in (settings := json.loads(path.read_text())):
                # The machine and the code that trained it are no part of what it is.
                settings.pop("identity")
                digest.update(hashlib.sha256(json.dumps(settings, indent=2).encode() + b"\n").digest())
                continue
            with path.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def git_commit() -> str | None:
    """Commit of the working tree that this package stands in, with ``+`` appended if it was changed; None outside git."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    root = Path(rge.__file__).resolve().parent.parent
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
