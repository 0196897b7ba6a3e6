"""Adapters as a checkpoint of their own: PEFT's files, and the base that they belong to.

``export.adapters_only`` writes them: the adapters, modules that were trained whole beside them (``modules_to_save``), the rows of
``<emb>`` and think tokens, and in ``rge.json`` what the base is.
Whatever loads a checkpoint loads them merged into the base, which is found where ``rge.json`` says, or named (``base=``). PEFT loads
them too: ``PeftModel.from_pretrained(base, folder)``.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rge.common.files import read_json
from rge.distributed import collectives as dist
from rge.identity.run_identity import content_of
from rge.model.adapters import ADAPTER, AdapterError, modules_to_save, trained_rows
from rge.model.hub_model import HubModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's files."""
PREFIX = "base_model.model."
"""Of every name in `WEIGHTS`: where PEFT puts the model that it wraps."""
ROWS = "token_adapter.trainable_tokens_delta"
"""PEFT's name of rows that take the place of a matrix's own."""
BASE_FILES = "*.safetensors"
"""What counts of a base: configuration, tokenizer and processor stand beside the adapters."""
FORM = {
    "r": "rank",
    "lora_alpha": "alpha",
    "use_dora": "dora",
    "use_rslora": "rslora",
    "target_modules": "targets",
    "modules_to_save": "modules_to_save",
}
"""PEFT's keys that adapters must have in common to go on from one another, and ours for them."""


def is_adapter_checkpoint(path: str | Path) -> bool:
    """Whether a folder is a checkpoint of ours that holds adapters alone."""
    return (Path(path) / CONFIG).is_file() and (Path(path) / "rge.json").is_file()


def adapter_weights(
    model: HubModel, rows_of_base: int, weights: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """What a checkpoint of adapters alone holds, by PEFT's names.

    Args:
        model: with adapters.
        rows_of_base: rows of the base's embedding matrix.
        weights: the model's state dict where the back end had to gather it; None takes the model's own.
    """
    found = model.state_dict() if weights is None else weights
    whole = tuple(f"{name}." for name in modules_to_save(model))
    saved = {_in_peft(name): it for name, it in found.items() if ".lora_" in name or name.startswith(whole)}
    for matrix, rows in trained_rows(model).items():
        trained = torch.stack([found[f"{name}.weight"] for name in rows])
        others = found[matrix][_token_ids(model, rows_of_base)[len(rows) :]]
        saved[_rows_in_peft(matrix)] = torch.cat([trained, others.to(trained)])
    return saved


def write_adapters(model: HubModel, folder: Path, base: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write PEFT's two files."""
    ids = _token_ids(model, base["rows"])
    config = model.peft_config[ADAPTER].to_dict() | {
        "base_model_name_or_path": base["path"],
        "revision": base["revision"],
        "inference_mode": True,
        "target_modules": _targets(model),
        "trainable_token_indices": {matrix.removesuffix(".weight"): ids for matrix in trained_rows(model)},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    on_cpu = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(on_cpu, folder / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def load_trainable_adapters(model: HubModel, folder: Path) -> None:
    """Give adapters the weights of a checkpoint's.

    Args:
        model: the checkpoint's base, with adapters; changed in place.
        folder: of the checkpoint.

    Raises:
        AdapterError: its adapters have another form.
    """
    then = json.loads((folder / CONFIG).read_text())
    now = model.peft_config[ADAPTER].to_dict() | {"target_modules": _targets(model)}
    if apart := [ours for theirs, ours in FORM.items() if then.get(theirs) != now[theirs]]:
        raise AdapterError(
            f"with export.adapters_only=true training continues the adapters in {folder}, but model.lora asks for different "
            f"ones ({', '.join(apart)}): set model.lora as it was, or export.adapters_only=false, which merges those and "
            "starts new ones"
        )
    saved = load_file(folder / WEIGHTS)
    whole = tuple(f"{name}." for name in modules_to_save(model))
    for name, parameter in model.named_parameters():
        if ".lora_" in name or name.startswith(whole):
            with dist.whole([parameter]):
                parameter.copy_(saved[_in_peft(name)])
    for matrix, rows in trained_rows(model).items():
        ids = then["trainable_token_indices"][matrix.removesuffix(".weight")]
        row_of = dict(zip(ids, saved[_rows_in_peft(matrix)], strict=True))
        for row in rows.values():
            with dist.whole([row.weight]):
                row.weight.copy_(row_of.pop(row.token_id))
        weight = model.get_parameter(matrix)
        with dist.whole([weight]):
            for token_id, row_D in row_of.items():
                weight[token_id] = row_D.to(weight.dtype)


def merge_saved(model: HubModel, folder: Path, rename: Callable[[str], str] = lambda name: name) -> HubModel:
    """The base with adapters merged into it, ours or anyone's, as PEFT merges them.

    Args:
        model: the base; changed.
        folder: with PEFT's files.
        rename: gives a weight of theirs, `PREFIX` included, the name that it has in this model.

    Raises:
        AdapterError: a weight has no place, or a place no weight; or ZeRO-3 has shared out the base.
    """
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict  # seconds

    if hasattr(model.get_input_embeddings().weight, "ds_id"):
        raise AdapterError(
            f"{folder} holds only adapters, and ZeRO-3 shards the base before they can be merged into it: continue them "
            "with export.adapters_only=true, or use another back end"
        )
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = True
    config.base_model_name_or_path = model.name_or_path  # PEFT warns of any other
    adapted: Any = get_peft_model(model, config)
    renamed = {rename(name): weight for name, weight in load_file(folder / WEIGHTS).items()}
    outcome: Any = set_peft_model_state_dict(adapted, renamed)
    # Rows of a tied head count as missing too.
    lost = sorted(outcome.unexpected_keys) + sorted(name for name in outcome.missing_keys if "lora_" in name)
    if lost:
        raise AdapterError(
            f"{len(lost)} weights of the adapters in {folder} do not fit their base, e.g. {lost[0]}"
        )
    return adapted.merge_and_unload()


@dataclass(frozen=True)
class Base:
    """What adapters are trained on.

    Attributes:
        path: directory or hub id, as it was given.
        revision: commit of a model on the hub.
        sha256: of its weights.
        rows: of its embedding matrix.
    """

    path: str
    revision: str | None
    sha256: str
    rows: int

    @classmethod
    def of(cls, start: str, commit: str | None, rows: int) -> "Base":
        """The base of a stage that starts from a directory or a hub id; of a checkpoint of adapters, theirs.

        Raises:
            AdapterError: it has no weights.
        """
        if is_adapter_checkpoint(start):
            recorded = _recorded(Path(start))
            return cls(**{field.name: recorded[field.name] for field in fields(cls)})
        place = Path(start) if Path(start).is_dir() else _fetched(start, commit)
        return cls(start, commit, _hash_of(place), rows)

    def as_recorded_in(self, folder: Path) -> dict[str, Any]:
        """What ``rge.json`` in a folder says of it; where both are moved together, it is found by its relative path."""
        beside = os.path.relpath(self.path, folder) if Path(self.path).is_dir() else None
        return asdict(self) | {"beside": beside}


def find_base(checkpoint: Path, asked: str | Path | None = None, instead: str | None = None) -> Path:
    """The directory of the base that a checkpoint's adapters belong to.

    Args:
        checkpoint: of adapters.
        asked: directory or hub id of the base; None: where ``rge.json`` says.
        instead: directory or hub id that may be it too, where it is not there.

    Raises:
        AdapterError: it is not there, or has other weights.
    """
    wanted, others = _recorded(checkpoint), []
    for place in _places(checkpoint, wanted, asked, instead):
        if (found := _hash_of(place)) == wanted["sha256"]:
            return place
        others.append(f"{place} ({found[:12]})")
    belongs = f"the adapters in {checkpoint} belong to the base {wanted['path']} ({wanted['sha256'][:12]})"
    if others:
        raise AdapterError(
            f"{belongs}, and {', '.join(others)} has other weights: name the right one with base="
        )
    raise AdapterError(f"{belongs}, which is not here: name its directory with base=")


def rows_of_base(checkpoint: Path) -> int:
    """Rows of the embedding matrix of the base that a checkpoint's adapters belong to."""
    return _recorded(checkpoint)["rows"]


def _places(
    checkpoint: Path, wanted: dict[str, Any], asked: str | Path | None, instead: str | None
) -> Iterator[Path]:
    """Directories that may be the base."""
    given = [asked] if asked is not None else [wanted["path"], instead]
    for name in given:
        if name is not None and Path(name).is_dir():
            yield Path(name)
    if asked is None and wanted["beside"] is not None and (beside := checkpoint / wanted["beside"]).is_dir():
        yield beside
    for name in given:
        if name is not None and is_hub_id(str(name)):
            yield _fetched(str(name), wanted["revision"] if str(name) == wanted["path"] else None)


def is_hub_id(name: str) -> bool:
    """Whether a name that is no path here is one of the Hugging Face hub: ``owner/model``."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _fetched(name: str, revision: str | None) -> Path:
    """The directory of a model's files on the hub, fetched where they are not there.

    Raises:
        AdapterError: they cannot be fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[BASE_FILES, "*.json"]))
    except (OSError, ValueError) as error:  # the hub's own errors are these
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise AdapterError(
            f"the base {name} is not a directory here, and could not be fetched from the hub: {reason}"
        ) from error


def _recorded(checkpoint: Path) -> dict[str, Any]:
    base = (read_json(checkpoint / "rge.json") or {}).get("base")
    if not base:
        raise AdapterError(f"{checkpoint}/rge.json does not say which base its adapters belong to")
    return base


def _hash_of(base: Path) -> str:
    content = content_of(base, like=BASE_FILES)
    if not content["bytes"]:
        raise AdapterError(f"{base} cannot be the base of adapters: it has no weights ({BASE_FILES})")
    return content["sha256"]


def _targets(model: HubModel) -> list[str]:
    return sorted(model.peft_config[ADAPTER].target_modules)


def _in_peft(name: str) -> str:
    """The name of an adapter's weight in PEFT's file; a magnitude (DoRA) has no ``weight`` at its end there."""
    found = PREFIX + name.replace(f".{ADAPTER}", "")
    return found.removesuffix(".weight") if "lora_magnitude_vector" in name else found


def _rows_in_peft(matrix: str) -> str:
    return f"{PREFIX}{matrix.removesuffix('weight')}{ROWS}"


def _token_ids(model: HubModel, rows_of_base: int) -> list[int]:
    """Tokens whose rows stand beside the adapters: trained ones, then others that the matrix has grown by."""
    trained = [row.token_id for row in next(iter(trained_rows(model).values())).values()]
    grown = range(rows_of_base, model.get_input_embeddings().num_embeddings)
    return [*trained, *(each for each in grown if each not in trained)]
