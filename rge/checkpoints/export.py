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
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import rge
from rge.checkpoints.description import model_card, sentence_transformers_files
from rge.checkpoints.manifest import DONE, discard, flush, write_manifest
from rge.checkpoints.settings import RGE_JSON, CheckpointError, CheckpointSettings
from rge.common.files import same_mode
from rge.model.adapter_files import adapter_weights, write_adapters
from rge.model.backbone import skeleton
from rge.model.embedding_model import EmbeddingModel
from rge.model.hub_model import HubModel

IDENTIFYING = (".safetensors", ".json", ".jinja", ".txt")
"""Endings of the files that define a checkpoint; others, such as the model card, may be edited."""

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""How Python, torch's serialiser and safetensors report a full disk."""


def export(
    embedder: EmbeddingModel, folder: Path, settings: CheckpointSettings, state_dict: dict | None = None
) -> None:
    """Write a finished checkpoint of an unwrapped `embedder`: weights, config, processor, chat template, ``rge.json``, model card.

    It is written under a temporary name, flushed to the disk and renamed; its weights are read back and compared, and ``done.json``
    lists its files with their checksums. `settings` are the content of ``rge.json``; with a ``base``, only adapters are written. `state_dict` are gathered or merged weights instead of ``embedder.model``'s own. They are written in the dtype that
    the model was loaded in; for bfloat16 the trained ones are float32.

    CheckpointError: the weights' names differ from those that the model is loaded with, writing failed, or the written weights
    differ; nothing partial is left.
    """
    temporary = folder.with_name(f"tmp_{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    model, loaded = embedder.model, _dtype_loaded(embedder.model)
    if loaded is not None and {parameter.dtype for parameter in model.parameters()} != {loaded}:
        state_dict = model.state_dict(keep_vars=True) if state_dict is None else state_dict
    base = settings.base
    if base is not None:
        weights = state_dict = adapter_weights(model, embedder.rows_of_base, state_dict)
    else:
        weights = dict(model.state_dict() if state_dict is None else state_dict)
        _check_names(model, weights, folder)
    if state_dict is not None and loaded is not None:
        state_dict = weights = _cast(state_dict, loaded)
    try:
        temporary.mkdir(parents=True)
        if base is not None:
            write_adapters(model, temporary, base.content(), weights)
            model.config.save_pretrained(temporary)
        else:
            model.save_pretrained(temporary, state_dict=state_dict)
        if _dtype_loaded(model) != loaded:
            # transformers has recorded the dtype of the trained weights.
            model.config.dtype = loaded
            model.config.save_pretrained(temporary)
        embedder.processor.save_pretrained(temporary)
        # In the card ``demo/joint/final`` for ``/home/me/runs/demo/joint/final``.
        name = "/".join(folder.resolve().parts[-3:]).lstrip("/")
        _describe(temporary, settings.but(origins=getattr(model.config, "origins", None)), name)
        same_mode(temporary, temporary / RGE_JSON)
        files = [*temporary.iterdir()]
        for path in files:
            flush(path, evict=True)  # so that the comparison reads from the disk
        _check_weights(weights, temporary)
        write_manifest(temporary, {}, files=[path for path in files if path.suffix in IDENTIFYING])
    except WRITE_ERRORS as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"it could not be written: {error}; free some space and start again", folder, kind="unwritten"
        ) from error
    discard(folder)
    temporary.rename(folder)
    flush(folder.parent)


def _describe(folder: Path, settings: CheckpointSettings, name: str) -> None:
    (folder / RGE_JSON).write_text(json.dumps(settings.content(), indent=2) + "\n")
    (folder / "README.md").write_text(model_card(settings, name), encoding="utf-8")
    for file, content in sentence_transformers_files(settings.instructions.default).items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")


def _check_names(model: HubModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Refuse weights with other names than the model is loaded with; a tied matrix may be named once."""
    names = skeleton(model.config).state_dict().keys()
    tied = getattr(model, "all_tied_weights_keys", {}).keys()
    unknown, missing = sorted(weights.keys() - names), sorted(names - weights.keys() - tied)
    if unknown or missing:
        raise CheckpointError(
            f"it is not written, since it could not be loaded: {len(unknown)} unknown names, {len(missing)} missing ones, such as "
            f"{[*unknown, *missing][0]}. Something in the launch wraps the model, such as torch.compile: remove it, "
            "and run the same command to continue from the last state",
            folder,
            kind="unknown" if unknown else "missing",
        )


def _check_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Compare the written tensors with `weights`, ignoring names, which transformers may change; OSError if they differ."""
    written: Counter = Counter()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            written.update(_fingerprint(file.get_tensor(name)) for name in file.keys())
    distinct = {(value.data_ptr(), value.shape): value for value in weights.values()}
    expected = Counter(map(_fingerprint, distinct.values()))
    if expected != written:
        raise OSError(
            f"{(expected - written).total()} of {len(distinct)} weights differ from what was written when read back"
        )


def _fingerprint(tensor: Tensor) -> tuple:
    flat = tensor.detach().cpu().contiguous().flatten()
    return str(tensor.dtype), tuple(tensor.shape), zlib.crc32(flat.view(torch.uint8).numpy().data)


def _dtype_loaded(model: HubModel) -> torch.dtype | None:
    # Saving a model turns its config's dtype into a name.
    dtype = model.config.dtype
    return None if dtype is None else getattr(torch, str(dtype).removeprefix("torch."))


def _cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    # By tensor, not by name, so that tied ones stay one.
    cast = {
        id(value): value.detach().to(dtype) if value.is_floating_point() else value
        for value in weights.values()
    }
    return {name: cast[id(value)] for name, value in weights.items()}


def checkpoint_hash(checkpoint: Path) -> str:
    """Sha256 over names and contents of weights, configs, tokenizer and ``rge.json``, except the run's ``identity`` in it."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.iterdir()):
        if path.suffix not in IDENTIFYING or path.name == DONE or path.name.startswith("."):
            continue
        with path.open("rb") as content:
            found = hashlib.file_digest(content, "sha256")
        if path.name == RGE_JSON and "identity" in (settings := json.loads(path.read_text())):
            settings.pop("identity")  # the machine and code that trained it
            found = hashlib.sha256(json.dumps(settings, indent=2).encode() + b"\n")
        digest.update(path.name.encode() + b"\0" + found.digest())
    return digest.hexdigest()


def git_commit() -> str | None:
    """Commit of this package's working tree, with ``+`` appended if it was changed; None outside git."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    root = Path(rge.__file__).resolve().parent.parent
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
