"""Load a vision-language model and its processor; add the row of ``<emb>``.

What differs between families is in `rge.model.families`.
"""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, PretrainedConfig
from transformers.modeling_utils import set_zero3_state
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from rge.common.errors import Fault, UserError
from rge.common.files import pointer_note
from rge.common.prompt_profiles import EMB_TOKEN
from rge.distributed import collectives as dist
from rge.model import fused
from rge.model import vision_tower as vision
from rge.model.adapter_files import CONFIG as ADAPTERS
from rge.model.adapter_files import find_base, is_adapter_checkpoint, is_hub_id, merge_saved, rows_of_base
from rge.model.config import ModelConfig
from rge.model.families import FAMILIES, family_of
from rge.model.hub_model import HubModel

_STOCK = {"auto": "sdpa", "varlen": "sdpa"}
"""transformers' kernels behind our forms of attention."""


class BackboneError(UserError):
    """A backbone cannot be used; `file` is its path, and `kind` or the faults say why."""


@dataclass
class Backbone:
    """A model with its processor, whose tokenizer knows ``<emb>``."""

    model: HubModel
    processor: Any
    emb_id: int
    # Never in a rationale: every special token but ``<emb>``, and the unused padding rows of the embedding matrix.
    suppressed_ids: list[int]
    attention: str = "auto"  # form of the text model's, see `rge.model.varlen.wanted`
    rows_of_base: int = 0  # of the saved embedding matrix, before any token was added


def read_config(path: str | Path, revision: str | None = None) -> PretrainedConfig:
    """Config of a model of a supported family, from a hub id or a directory.

    Raises:
        BackboneError: nothing to load there, or an unsupported family.
    """
    place = Path(path)
    if not place.exists() and not is_hub_id(str(path)):
        makes = f" (rge small-model recipe={place.name} makes it)" if "small_models" in place.parts else ""
        raise BackboneError(f"there is no such directory{makes}", path, kind="missing")
    if place.exists() and not (place / "config.json").is_file():
        if (place / ADAPTERS).is_file():
            raise BackboneError(
                "it contains PEFT adapters and no model: give the model that they were trained on, or merge them into it "
                "(PeftModel.merge_and_unload, save_pretrained)",
                path,
                kind="adapters",
            )
        raise BackboneError(
            "it has no config.json; checkpoints of finished stages are in <out>/<stage>/final",
            path,
            kind="config",
        )
    families = list(FAMILIES)  # first, since loading the families registers configs that transformers lacks
    try:
        config = AutoConfig.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise BackboneError(f"no model can be loaded: {error}", path, kind="unreadable") from error
    if config.model_type not in families:
        raise BackboneError(
            f"it is a {config.model_type}; supported families: {', '.join(families)}", path
        ).about(Fault("choice", "model_type", tuple(families)))
    return config


def load_backbone(
    path: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    attn_implementation: str = "auto",
    vision_attn_implementation: str = "auto",
    fused_kernels: str = "none",
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    add_emb: bool = False,
    emb_token: str = EMB_TOKEN,
    quantization: str | None = None,
    device: str = "cpu",
    base: Path | None = None,
    merge: bool = True,
    needs_head: bool = True,
) -> Backbone:
    """Load a model and its processor from a hub id or a directory; one that holds adapters alone is merged into its base.

    Arguments with the name of a key in `rge.config.ModelConfig` mean the same; without sizes, pictures keep the processor's. With
    `add_emb`, missing tokens are added (training from a plain model); otherwise their absence is an error. `emb_token` is the name
    of ``<emb>`` in another project's checkpoint. `quantization` is that of `quantized`, whose weights are created on `device`.
    `base` is that of adapters (None: see `find_base`); without `merge` they are left out, for
    `rge.model.adapter_files.load_trainable_adapters`. Without `needs_head`, a checkpoint may lack its output matrix, as published
    embedders do; the input matrix then takes its place (``tie_word_embeddings``).

    Raises:
        BackboneError: nothing to load there, an unsupported family, or no ``<emb>``.
        AdapterError: the base of the adapters is missing or different.
    """
    transformers_logging.disable_progress_bar()  # we show our own
    config, adapted = read_config(path, revision), is_adapter_checkpoint(path)
    if adapted and quantization is not None:
        raise BackboneError(
            f"it contains adapters, which would be merged into weights that quantization={quantization} has rounded before: "
            "export it with export.adapters_only=false",
            path,
        ).about("quantization")
    weights, own, num_rows = path, {}, config.get_text_config().vocab_size
    if adapted:
        weights, own = base or find_base(Path(path)), {"config": config}
        config.get_text_config().vocab_size = rows_of_base(Path(path))
    attention = {"": attn_implementation, "text_config": attn_implementation}
    attention["vision_config"] = vision_attn_implementation
    rounding = quantized(quantization, config, dtype, device)
    try:
        processor = load_processor(
            path, config, revision=revision, min_pixels=min_pixels, max_pixels=max_pixels
        )
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            weights,
            revision=revision,
            dtype=getattr(torch, dtype),
            attn_implementation={part: _STOCK.get(asked, asked) for part, asked in attention.items()},
            output_loading_info=True,
            **own,
            **rounding,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise BackboneError(
            f"it cannot be loaded: {error}{pointer_note(path)}", path, kind="unreadable"
        ) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing and all(name.endswith(HEAD) for name in missing):
        if needs_head:
            raise without_head(path)
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = True
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    elif missing:
        # transformers fills them with random numbers and a warning.
        raise BackboneError(
            f"it is incomplete: {len(missing)} weights are missing, and this is the first",
            path,
            key=missing[0],
        )
    _drop_unused_renamings(model)
    before = model.get_input_embeddings().num_embeddings
    if num_rows > before and adapted:
        model.resize_token_embeddings(num_rows, mean_resizing=False)
    if adapted and merge:
        model = merge_saved(model, Path(path))
    vision.speed_up(model, vision_attn_implementation, fused.wanted(fused_kernels))
    tokenizer = processor.tokenizer
    if add_emb:
        check_end_of_turn(path, tokenizer)
        # The end of turn: a token that the model already writes after a complete answer.
        add_tokens(model, tokenizer, [EMB_TOKEN], tokenizer.eos_token_id)
    _check_emb(path, tokenizer, emb_token)
    emb_id = tokenizer.convert_tokens_to_ids(emb_token)
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused = range(len(tokenizer), model.get_input_embeddings().num_embeddings)
    barred = sorted(special.union(tokenizer.all_special_ids, unused) - {emb_id})
    return Backbone(model, processor, emb_id, barred, attn_implementation, before)


HEAD = "lm_head.weight"


def without_head(path: str | Path) -> BackboneError:
    """The error of a checkpoint without an output matrix where one is needed."""
    return BackboneError(
        "it has no such output matrix, although its config says tie_word_embeddings: false, as embedders are published: "
        "without it there is no LM loss and no rationale. Train the contrastive loss alone (stage=joint loss.ratio=none "
        "loss.anchor=none), or start from the model that it was made of",
        path,
        key=HEAD,
    )


def lacks_head(names: set[str], config: PretrainedConfig) -> bool:
    """Whether weights of these names (`stored_names`) need an output matrix and have none."""
    tied = getattr(config, "tie_word_embeddings", True)
    return not tied and bool(names) and not any(name.endswith(HEAD) for name in names)


def stored_names(path: str | Path, revision: str | None = None) -> set[str]:
    """Names of the weights on this machine; those still on the hub are not looked at.

    Raises:
        BackboneError: a file of weights is missing from a folder, or is not whole.
    """

    def local(file: str) -> str | None:
        found: str | None = cached_file(
            path, file, revision=revision, local_files_only=True, _raise_exceptions_for_missing_entries=False
        )
        return found

    names, files = set[str](), {"model.safetensors"}
    if local("model.safetensors") is None and (index := local("model.safetensors.index.json")) is not None:
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        names, files = set(shards), set(shards.values())
        if Path(path).is_dir() and (lacking := [file for file in sorted(files) if local(file) is None]):
            raise BackboneError(
                f"it lacks {len(lacking)} of {len(files)} files of weights", path, key=lacking[0]
            )
    for found in filter(None, map(local, sorted(files))):
        try:
            with safe_open(found, "pt") as weights:
                names |= set(weights.keys())
        except SafetensorError as error:
            note = pointer_note(found) or "; the file is cut off or damaged: copy or download it again"
            raise BackboneError(f"it cannot be read: {error}{note}", found, kind="unreadable") from error
    return names


def check_end_of_turn(path: str | Path, tokenizer: Any) -> None:
    """Refuse a tokenizer without an end of turn, which tells a model that its answer is complete."""
    if tokenizer.eos_token_id is None:
        raise BackboneError(
            "its tokenizer has no end of turn (eos_token in its tokenizer_config.json, such as <|im_end|>), or its vocabulary "
            "lacks that token: <emb> starts as a copy of it",
            path,
            kind="eos_token",
        )


def _check_emb(path: str | Path, tokenizer: Any, emb_token: str) -> None:
    if emb_token not in tokenizer.get_vocab():
        raise BackboneError(
            "it has no such token, so it is not a reasoning-guided embedder; train one from it with rge/train.py",
            path,
            key=emb_token,
        )


def load_processor(
    path: str | Path,
    config: PretrainedConfig,
    *,
    revision: str | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> Any:
    """A model's processor, with these picture sizes; arguments as of `load_backbone`.

    OSError if there is none, BackboneError if its files are broken.
    """
    try:
        processor = AutoProcessor.from_pretrained(path, revision=revision)
    except ValueError as error:  # such as a tokenizer.json that is no JSON
        raise BackboneError(
            f"its processor cannot be loaded: {error}{pointer_note(path)}", path, kind="unreadable"
        ) from error
    if processor.chat_template is None:  # older files keep it with the tokenizer alone
        processor.chat_template = processor.tokenizer.chat_template
    processor.rge_family = FAMILIES[config.model_type]
    processor.rge_family.limit_pixels(processor, min_pixels, max_pixels)
    # Of the model's config, which data workers do not have.
    per_second = getattr(getattr(config, "vision_config", None), "tokens_per_second", 1)
    processor.rge_tokens_per_second = per_second
    return processor


QUANTIZATIONS = ("8bit", "4bit")


def processor_to_train(start: str, config: ModelConfig) -> Any:
    """The processor with which a recipe trains from `start`, including ``<emb>``, without loading weights; errors of `load_processor`."""
    revision = config.revision if start == config.path else None
    processor = load_processor(start, read_config(start, revision), revision=revision, **config.pixels)
    check_end_of_turn(start, processor.tokenizer)
    name_tokens(processor.tokenizer, [EMB_TOKEN])
    return processor


def quantized(kind: str | None, config: PretrainedConfig, dtype: str, device: str) -> dict[str, Any]:
    """Options of transformers that quantize the text model's matrices with bitsandbytes.

    The vision tower and the output matrix are not quantized: they are small, and their errors affect everything. `kind` is
    ``8bit`` (LLM.int8) or ``4bit`` (NF4, only on a GPU); `dtype` is that of everything else, and of the products.

    Raises:
        BackboneError: an unknown kind, not possible on that device, or bitsandbytes is missing.
    """
    if kind is None:
        return {}
    if kind not in QUANTIZATIONS:
        raise BackboneError.choice("quantization", kind, QUANTIZATIONS)
    if kind == "4bit" and not device.startswith("cuda"):
        raise BackboneError(
            f"quantization=4bit needs a GPU, device is {device}; there, quantization=8bit works (smaller and slower than "
            "without), and dtype=bfloat16 halves the memory"
        ).about("quantization", "device")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise BackboneError(
            f"quantization={kind} needs bitsandbytes: pip install -e '.[quantization]'", kind="package"
        )
    skipped = [*(name.rstrip(".") for name in vision_prefixes(skeleton(config))), "lm_head"]
    four_bits = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": getattr(torch, dtype)}
    settings = transformers.BitsAndBytesConfig(
        llm_int8_skip_modules=skipped, **{f"load_in_{kind}": True}, **(four_bits if kind == "4bit" else {})
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def _drop_unused_renamings(model: HubModel) -> None:
    """Under ZeRO-3 transformers also keeps renamings that loading did not use; saving would apply them backwards."""
    if not hasattr(model.get_input_embeddings().weight, "ds_id"):
        return
    renamings = getattr(model, "_weight_conversions", None) or []
    model.__dict__["_weight_conversions"] = [change for change in renamings if change.was_used()]


def load_plain(path: str | Path, base: Path | None = None, *, merged: bool = True) -> HubModel:
    """The model as plain transformers loads it, float32, for comparison; adapters beside their `base` or merged by PEFT."""
    model: Any = AutoModelForImageTextToText.from_pretrained(base or path, dtype=torch.float32)
    if base is not None:
        model.resize_token_embeddings(read_config(path).get_text_config().vocab_size, mean_resizing=False)
        model = merge_saved(model, Path(path), merge=merged)
    return model.eval()


def add_tokens(model: HubModel, tokenizer, names: Sequence[str], source: int) -> list[int]:
    """Add tokens to model and tokenizer in place, except those that exist, and return their ids.

    They get the first free ids, and their rows start as copies of the token `source`'s, in the input and, if untied, the
    output matrix. The matrix is never shrunk to the tokenizer's length: Qwen's has padding rows, and grows only if
    they are used up.
    """
    new = [name for name in names if name not in tokenizer.get_vocab()]
    name_tokens(tokenizer, new)
    new_ids = tokenizer.convert_tokens_to_ids(new)
    if max(new_ids, default=0) >= model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(max(new_ids) + 1, pad_to_multiple_of=64, mean_resizing=False)
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    if new:
        with torch.no_grad(), dist.whole([module.weight for module in modules]):
            for module in modules:
                module.weight[new_ids] = module.weight[source].clone()
    return tokenizer.convert_tokens_to_ids(list(names))


def name_tokens(tokenizer, names: Sequence[str]) -> None:
    """Add missing tokens to a tokenizer."""
    tokens = [AddedToken(name, special=True, normalized=False) for name in names]
    tokenizer.add_tokens(tokens, special_tokens=True)


def check_sizes(sizes: Sequence[int], model: HubModel) -> None:
    """Refuse sizes to which the model's embeddings cannot be truncated."""
    full = model.config.get_text_config().hidden_size
    if any(size >= full for size in sizes) or len(set(sizes)) < len(sizes):
        raise BackboneError(
            f"loss.matryoshka_dims={list(sizes)}: this model's embeddings have {full} components, which always count; "
            "name smaller sizes, each once"
        ).about("loss.matryoshka_dims")


def skeleton(config: PretrainedConfig) -> HubModel:
    """A model of a config on `meta`: shapes without numbers, whole under every back end."""
    with set_zero3_state(), torch.device("meta"):  # otherwise ZeRO-3 would shard it
        return AutoModelForImageTextToText.from_config(config).eval()


def vision_parameters(model: HubModel) -> list[nn.Parameter]:
    """Parameters of the vision tower and its projection."""
    return [parameter for part in family_of(model).vision(model) for parameter in part.parameters()]


def parts_of(model: HubModel) -> dict[str, list[nn.Parameter]]:
    """Every parameter by part of the model.

    ``merger``: the projection of features to the text model's width; ``vision``: the rest of the tower; ``emb``: the tokens' rows, of
    input and output; ``text``: the rest. Adapters belong to what they adapt.
    """
    family = family_of(model)
    words = (model.get_input_embeddings(), model.get_output_embeddings())
    modules = {"merger": family.merger(model), "vision": family.vision(model), "emb": filter(None, words)}
    owner: dict[int, str] = {}
    for part, own in modules.items():
        for module in own:
            for parameter in module.parameters():
                owner.setdefault(id(parameter), part)
    found: dict[str, list[nn.Parameter]] = {part: [] for part in (*modules, "text")}
    for parameter in model.parameters():
        found[owner.get(id(parameter), "text")].append(parameter)
    return found


def vision_prefixes(model: HubModel) -> tuple[str, ...]:
    """Prefixes of the names of the vision tower and its projection."""
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(f"{names[id(part)]}." for part in family_of(model).vision(model))


def collapsed_ids(model: HubModel, ids: Sequence[int]) -> list[int]:
    """A prompt's ids with one placeholder per picture, as vLLM takes them; BackboneError for unsupported families."""
    collapsed = family_of(model).collapsed(model.config, ids)
    if collapsed is None:
        raise BackboneError(
            f"rge does not know how to pass pictures of a {model.config.model_type} to vLLM; use our own engine (in training "
            "rollout.backend=own, else engine=own)",
            kind="pictures",
        )
    return collapsed
