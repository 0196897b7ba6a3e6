"""Low-rank adapters (LoRA, DoRA) from PEFT, the row of ``<emb>``, and merging them into plain weights.

Adapters are injected into the model without wrapping it: rollout, packing and step do not know about them.
The embedding matrix is frozen, but rows of new tokens must be trained. PEFT can train single rows, but copies the whole
matrix in every forward, and twice per generated token for tied matrices; here a row is a vector that replaces one row of
the lookup and one column of the logits. Files: `rge.model.adapter_files`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rge.common.errors import UserError
from rge.distributed import collectives as dist
from rge.model.config import LoraConfig
from rge.model.families import family_of
from rge.model.hub_model import HubModel

ADAPTER = "default"
Weights = dict[str, Tensor]
"""A state dict."""


class AdapterError(UserError):
    """Adapters cannot be applied; the message lists the alternatives."""


class EmbRow(nn.Module):
    """A trainable row (D,) of one token in the frozen embedding matrix or, transposed, in the output matrix."""

    def __init__(self, row: Tensor, token_id: int):
        super().__init__()
        self.token_id, self.enabled = token_id, True
        self.weight = nn.Parameter(row.detach().to(torch.promote_types(row.dtype, torch.float32)).clone())

    def forward(
        self, inputs: Tensor, outputs: Tensor, *, lookup: bool, scale: Tensor | float = 1.0
    ) -> Tensor:
        """The frozen module's output as if the row were in its matrix: embeddings (..., D) of ids, or logits (..., V) of states.

        `scale` is what the module multiplies rows by, as Gemma's does.
        """
        if not self.enabled:
            return outputs
        row = self.weight.to(outputs.dtype)
        if lookup:
            return torch.where((inputs == self.token_id)[..., None], row * scale, outputs)
        outputs[..., self.token_id] = inputs.to(row.dtype) @ row
        return outputs


def add_adapters(model: HubModel, settings: LoraConfig, emb_id: int) -> None:
    """Freeze a model in place, and add adapters and a trainable row of ``<emb>``.

    Raises:
        AdapterError: no layer, or no module, has a name in the settings; or `modules_to_save` includes the embeddings.
    """
    import peft  # a slow import that few runs need
    from peft.tuners.tuners_utils import cast_adapter_dtype

    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    chosen, whole = trained_parts(model, settings)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT says int and takes any number
        lora_dropout=settings.dropout,
        target_modules=chosen,
        use_dora=settings.dora,
        use_rslora=settings.rslora,
    )
    tied = words.weight is head.weight
    model.requires_grad_(False)
    peft.inject_adapter_in_model(config, model, ADAPTER)
    cast_adapter_dtype(model, ADAPTER)
    # Set only now, since PEFT would wrap these modules.
    config.modules_to_save = sorted(whole) or None
    for module in whole.values():
        module.requires_grad_(True)
    _train_row(model, "emb", emb_id, tied)


def trained_parts(model: HubModel, settings: LoraConfig) -> tuple[list[str], dict[str, nn.Module]]:
    """Names of the linear layers that get adapters, and modules that are trained whole by name; AdapterError as `add_adapters`."""
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    whole = _named_modules(model, settings.modules_to_save)
    excluded = {module for each in whole.values() for module in each.modules()}
    if excluded & {words, head}:
        raise AdapterError(
            "the embedding matrix is not trained with adapters",
            key="model.lora.modules_to_save",
            kind="whole",
        )
    excluded.add(head)
    if not settings.vision:
        excluded |= {module for part in family_of(model).vision(model) for module in part.modules()}
    return _linear_layers(model, settings.targets, excluded), whole


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _linear_layers(model: HubModel, targets: Sequence[str], excluded: set[nn.Module]) -> list[str]:
    """Names of linear layers whose last part is among `targets`, if any."""
    every = model.named_modules()
    linear = [name for name, it in every if isinstance(it, nn.Linear) and it not in excluded]
    known = set(map(_last, linear))
    if unknown := sorted(set(targets) - known):
        raise AdapterError(
            f"no linear layer is named {', '.join(unknown)}; there are: {', '.join(sorted(known))}",
            key="model.lora.targets",
            kind="unknown",
        )
    return [name for name in linear if not targets or _last(name) in targets]


def _named_modules(model: HubModel, last_parts: Sequence[str]) -> dict[str, nn.Module]:
    named = {name: module for name, module in model.named_modules() if _last(name) in last_parts}
    if unknown := sorted(set(last_parts) - set(map(_last, named))):
        tower = {name for part in family_of(model).vision(model) for name, _ in part.named_children()}
        raise AdapterError(
            f"no module is named {', '.join(unknown)}; the vision tower has {', '.join(sorted(tower))}",
            key="model.lora.modules_to_save",
            kind="unknown",
        )
    return named


def _train_row(model: HubModel, name: str, token_id: int, tied: bool) -> None:
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    with dist.whole([words.weight, head.weight]):
        lookup = EmbRow(words.weight[token_id], token_id)
        column = lookup if tied else EmbRow(head.weight[token_id], token_id)
    setattr(model, f"{name}_row", lookup)
    words.register_forward_hook(
        lambda words, inputs, outputs: lookup(
            inputs[0], outputs, lookup=True, scale=getattr(words, "embed_scale", 1.0)
        )
    )
    if not tied:
        setattr(model, f"{name}_column", column)
    head.register_forward_hook(lambda _, inputs, outputs: column(inputs[0], outputs, lookup=False))


@contextmanager
def without_adapters(model: HubModel) -> Iterator[None]:
    """Disable adapters and rows: the model computes what it did before `add_adapters`."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    frozen = [(parameter, parameter.requires_grad) for layer in layers for parameter in layer.parameters()]

    def enable(enabled: bool) -> None:
        for layer in layers:
            layer.enable_adapters(enabled)
        for module in model.modules():
            if isinstance(module, EmbRow):
                module.enabled = enabled

    try:
        enable(False)
        yield
    finally:
        enable(True)
        for parameter, trained in frozen:  # PEFT changes it
            parameter.requires_grad_(trained)


def has_adapters(model: HubModel) -> bool:
    """Whether `add_adapters` was applied."""
    return hasattr(model, "emb_row")


@torch.no_grad()
def merge(model: HubModel, weights: Weights | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights of the plain model, with adapters and rows merged in; unadapted weights are not copied.

    The model is unchanged: merging in place and reverting it would change last bits. `weights`: its state dict, if gathered.
    """
    from peft.tuners.lora import LoraLayer

    found = dict(model.state_dict() if weights is None else weights)
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        parts = [key for key in found if key.startswith(f"{name}.")]
        part = {key.removeprefix(f"{name}."): found.pop(key) for key in parts}
        base = part["base_layer.weight"]
        wide = torch.promote_types(base.dtype, torch.float32)
        a_RI, b_OR = part[f"lora_A.{ADAPTER}.weight"].to(wide), part[f"lora_B.{ADAPTER}.weight"].to(wide)
        weight_OI = base.to(wide) + module.scaling[ADAPTER] * (b_OR @ a_RI)
        if (magnitude := part.get(f"lora_magnitude_vector.{ADAPTER}.weight")) is not None:
            weight_OI *= (magnitude.to(wide) / weight_OI.norm(dim=1))[:, None]
        yield f"{name}.weight", weight_OI.to(base.dtype)
        if "base_layer.bias" in part:
            yield f"{name}.bias", part["base_layer.bias"]
    (embedding, head), replaced = matrix_names(model), trained_rows(model)
    for name, rows in replaced.items():
        matrix = found[name] = found[name].clone()
        for row_name, row in rows.items():
            matrix[row.token_id] = found.pop(f"{row_name}.weight").to(matrix.dtype)
    if head not in replaced and head in found:  # tied
        found[head] = found[embedding]
    yield from found.items()


def matrix_names(model: HubModel) -> tuple[str, str]:
    """Names of the embedding matrix and of the output matrix."""
    names = {id(module): name for name, module in model.named_modules()}
    words, head = (names[id(each)] for each in (model.get_input_embeddings(), model.get_output_embeddings()))
    return f"{words}.weight", f"{head}.weight"


def trained_rows(model: HubModel) -> dict[str, dict[str, EmbRow]]:
    """The rows of new tokens, by the name of their matrix and their own; for tied matrices only the embedding's."""
    embedding, head = matrix_names(model)
    found: dict[str, dict[str, EmbRow]] = {}
    for name, row in model.named_children():
        if isinstance(row, EmbRow):
            found.setdefault(head if name.endswith("_column") else embedding, {})[name] = row
    return found
