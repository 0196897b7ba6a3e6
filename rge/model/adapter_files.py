"""Checkpoints of adapters alone: PEFT's files, and their base.

``export.adapters_only`` writes the adapters, modules that were trained whole (``modules_to_save``), the row of ``<emb>``,
and in ``rge.json`` the identity of the base. Loading merges them into the base, found by ``rge.json`` or given
as ``base=``. PEFT loads them too: ``PeftModel.from_pretrained(base, folder)``.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rge.common.errors import UserError
from rge.common.files import read_json, relative
from rge.distributed import collectives as dist
from rge.identity.run_identity import content_of
from rge.model.adapters import ADAPTER, AdapterError, Weights, trained_rows
from rge.model.hub_model import HubModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's files."""
PREFIX = "base_model.model."
"""Of every name in `WEIGHTS`: PEFT's attributes around the model that it wraps."""
ROWS = "token_adapter.trainable_tokens_delta"
"""PEFT's name of rows that replace those of a matrix."""
BASE_FILES = "*.safetensors"
"""Identify a base; configuration, tokenizer and processor are stored with the adapters."""
FETCHED = [BASE_FILES, "*.json"]
FORM = {
    "r": "rank",
    "lora_alpha": "alpha",
    "use_dora": "dora",
    "use_rslora": "rslora",
    "target_modules": "targets",
    "modules_to_save": "modules_to_save",
}
"""PEFT's keys that must be equal to continue training adapters, and our names for them."""


def is_adapter_checkpoint(path: str | Path) -> bool:
    """Whether a folder is one of our checkpoints of adapters alone."""
    return (Path(path) / CONFIG).is_file() and (Path(path) / "rge.json").is_file()


def adapter_weights(model: HubModel, rows_of_base: int, weights: Weights | None = None) -> Weights:
    """Weights of a checkpoint of adapters alone, by PEFT's names; `weights` is the model's state dict, if gathered."""
    state = model.state_dict() if weights is None else weights
    saved = {_in_peft(name): state[name] for name in state if _is_adapter(model, name)}
    for matrix, rows in trained_rows(model).items():
        trained = torch.stack([state[f"{name}.weight"] for name in rows])
        others = state[matrix][_token_ids(model, rows_of_base)[len(rows) :]]
        saved[_rows_in_peft(matrix)] = torch.cat([trained, others.to(trained)])
    return saved


def write_adapters(model: HubModel, folder: Path, base: dict[str, Any], weights: Weights) -> None:
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


def check_form(model: HubModel, folder: Path) -> None:
    """Raise AdapterError if a checkpoint's adapters have another form than those of `model`, which may be on `meta`."""
    then = json.loads((folder / CONFIG).read_text())
    now = model.peft_config[ADAPTER].to_dict() | {"target_modules": _targets(model)}
    if apart := [ours for theirs, ours in FORM.items() if then.get(theirs) != now[theirs]]:
        raise AdapterError(
            "with export.adapters_only=true training continues these adapters, but model.lora asks for different ones "
            f"({', '.join(apart)}): set model.lora as it was, or export.adapters_only=false, which merges those and starts "
            "new ones",
            folder,
        ).about(*(f"model.lora.{key}" for key in apart))


@torch.no_grad()
def load_trainable_adapters(model: HubModel, folder: Path) -> None:
    """Load a checkpoint's adapters into those of its base `model`, in place; AdapterError if they have another form."""
    check_form(model, folder)
    ids_of = json.loads((folder / CONFIG).read_text())["trainable_token_indices"]
    saved = load_file(folder / WEIGHTS)
    for name, parameter in model.named_parameters():
        if _is_adapter(model, name):
            with dist.whole([parameter]):
                parameter.copy_(saved[_in_peft(name)])
    for matrix, rows in trained_rows(model).items():
        ids = ids_of[matrix.removesuffix(".weight")]
        row_of = dict(zip(ids, saved[_rows_in_peft(matrix)], strict=True))
        for row in rows.values():
            if row.token_id in row_of:
                with dist.whole([row.weight]):
                    row.weight.copy_(row_of.pop(row.token_id))
        weight = model.get_parameter(matrix)
        with dist.whole([weight]):
            for token_id, row_D in row_of.items():
                weight[token_id] = row_D.to(weight.dtype)


def merge_saved(
    model: HubModel,
    folder: Path,
    rename: Callable[[str], str] = lambda name: name,
    *,
    merge: bool = True,
) -> HubModel:
    """The base with the PEFT adapters in a folder merged into it, or put beside it, in place.

    `rename` maps names of the adapters' weights, `PREFIX` included, to this model's.

    Raises:
        AdapterError: weights and model do not match, or ZeRO-3 has sharded the base.
    """
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict  # a slow import

    if hasattr(model.get_input_embeddings().weight, "ds_id"):
        raise AdapterError(
            "it contains only adapters, and ZeRO-3 shards the base before they can be merged into it: continue them with "
            "export.adapters_only=true, or use another back end",
            folder,
        ).about("export.adapters_only")
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
            f"{len(lost)} weights of the adapters do not fit their base, and this is the first",
            folder,
            key=lost[0],
        )
    whole: HubModel = adapted.merge_and_unload() if merge else adapted.base_model.model
    return whole.requires_grad_(True)  # PEFT froze it


@dataclass(frozen=True)
class Base:
    """The model that adapters are trained on: directory or hub id, commit, hash of its weights, rows of its embedding matrix."""

    path: str
    revision: str | None
    sha256: str
    rows: int

    @classmethod
    def of(cls, start: str, commit: str | None, rows: int, instead: str | None = None) -> "Base":
        """The base of a stage that starts from a directory or a hub id, or from a checkpoint of adapters, see `find_base`."""
        if is_adapter_checkpoint(start):
            recorded = _recorded(Path(start))
            if recorded["revision"] is None:
                found = find_base(Path(start), instead=instead)
                if found != Path(recorded["path"]):  # moved, or replaced by another
                    recorded["path"] = str(found.resolve())
            return cls(*(recorded[key] for key in ("path", "revision", "sha256", "rows")))
        place = Path(start) if Path(start).is_dir() else fetched(start, commit, FETCHED)
        return cls(start, commit, _hash_of(place), rows)

    def as_recorded_in(self, folder: Path) -> dict[str, Any]:
        """Its entry in the ``rge.json`` of a folder; the relative path finds it if both are moved together."""
        beside = relative(self.path, folder) if Path(self.path).is_dir() else None
        return asdict(self) | {"beside": beside}


def base_of(checkpoint: Path, asked: str | Path | None) -> Path | None:
    """`find_base` of a checkpoint of adapters; None if the checkpoint has all its weights."""
    if is_adapter_checkpoint(checkpoint):
        return find_base(checkpoint, asked)
    if asked is not None:
        raise UserError(
            f"it has all its weights; base={asked} is for checkpoints of adapters", checkpoint
        ).about("base")
    return None


def find_base(
    checkpoint: Path, asked: str | Path | None = None, instead: str | None = None, *, key: str = "base"
) -> Path:
    """The directory of the base of a checkpoint's adapters: `asked`, else as in ``rge.json``, or `instead`.

    `key` is the user's key for another directory.

    Raises:
        AdapterError: it is missing, or has other weights.
    """
    wanted, others, reason = _recorded(checkpoint), [], ""
    try:
        for place in _places(checkpoint, wanted, asked, instead):
            if (found := _hash_of(place)) == wanted["sha256"]:
                return place
            others.append(f"{place} ({found[:12]})")
    except AdapterError as error:  # a relative path of two parts looks like an id on the hub
        reason = f" ({error})"
    problem = f"which is not here{reason}: name its directory"
    if others:
        problem = f"and {', '.join(others)} has other weights{reason}: name the right one"
    raise AdapterError(
        f"these adapters belong to the base {wanted['path']} ({wanted['sha256'][:12]}), {problem} with {key}=",
        checkpoint,
        kind="other" if others else "missing",
    ).about(key)


def rows_of_base(checkpoint: Path) -> int:
    """Rows of the embedding matrix of a checkpoint's base."""
    return _recorded(checkpoint)["rows"]


def _places(checkpoint: Path, wanted: dict, asked: str | Path | None, instead: str | None) -> Iterator[Path]:
    named = [asked] if asked is not None else [wanted["path"], instead]
    names = [str(name) for name in named if name is not None]
    yield from (Path(name) for name in names if Path(name).is_dir())
    if asked is None and wanted["beside"] is not None and (beside := checkpoint / wanted["beside"]).is_dir():
        yield beside
    for name in filter(is_hub_id, names):
        yield fetched(name, wanted["revision"] if name == wanted["path"] else None, FETCHED)


def is_hub_id(name: str) -> bool:
    """Whether a name is ``owner/model`` on the Hugging Face hub, and not a local path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def fetched(name: str, revision: str | None, patterns: list[str] | None = None) -> Path:
    """The directory of a repository on the hub, or of its files that match the patterns; AdapterError without a connection."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors are these
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise AdapterError(
            f"it is not a directory here, and could not be fetched from the Hugging Face hub: {reason}", name
        ) from error


def _recorded(checkpoint: Path) -> dict[str, Any]:
    base = (read_json(checkpoint / "rge.json") or {}).get("base")
    if not base:
        raise AdapterError("it does not say which base its adapters belong to", checkpoint / "rge.json")
    return base


def _hash_of(base: Path) -> str:
    content = content_of(base, like=BASE_FILES)
    if not content["bytes"]:
        raise AdapterError(f"it cannot be the base of adapters: it has no weights ({BASE_FILES})", base)
    return content["sha256"]


def _is_adapter(model: HubModel, name: str) -> bool:
    """Whether a weight is one of an adapter, or of a module that is trained whole."""
    whole = model.peft_config[ADAPTER].modules_to_save or []
    return ".lora_" in name or name.startswith(tuple(f"{each}." for each in whole))


def _targets(model: HubModel) -> list[str]:
    return sorted(model.peft_config[ADAPTER].target_modules)


def _in_peft(name: str) -> str:
    """The name of an adapter's weight in PEFT's file, where a magnitude (DoRA) has no suffix ``weight``."""
    renamed = PREFIX + name.replace(f".{ADAPTER}", "")
    return renamed.removesuffix(".weight") if "lora_magnitude_vector" in name else renamed


def _rows_in_peft(matrix: str) -> str:
    return f"{PREFIX}{matrix.removesuffix('weight')}{ROWS}"


def _token_ids(model: HubModel, rows_of_base: int) -> list[int]:
    """Tokens whose rows are stored with the adapters: trained ones, then others that the matrix has grown by."""
    trained = [row.token_id for row in next(iter(trained_rows(model).values())).values()]
    grown = range(rows_of_base, model.get_input_embeddings().num_embeddings)
    return [*trained, *(each for each in grown if each not in trained)]
