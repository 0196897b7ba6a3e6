"""Low-rank adapters (LoRA, DoRA) from PEFT, the rows of ``<emb>`` and think tokens beside them, and all merged into plain weights.

Adapters are injected into the model, which stays the model it was: rollout, packing and step do not know about them.
The embedding matrix is frozen, but these are new tokens: their rows must learn. PEFT can train single rows, at the
price of a copy of the whole matrix in every forward, twice a generated token where the matrices are tied; here a
row is a vector that takes the place of one row of the lookup and of one column of the logits. As files: `rge.model.adapter_files`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rge.common.errors import UserError
from rge.distributed import collectives as dist
from rge.model.families import family_of
from rge.model.hub_model import HubModel

ADAPTER = "default"


class AdapterError(UserError):
    """Adapters cannot be put where they were asked for; the message lists the alternatives."""


class EmbRow(nn.Module):
    """The row of one token in the embedding matrix or, transposed, in the output matrix, trained alone.

    Args:
        row: (D,) where it starts.
        token_id: the token's.
    """

    def __init__(self, row: Tensor, token_id: int):
        super().__init__()
        self.token_id, self.enabled = token_id, True
        self.weight = nn.Parameter(row.detach().to(torch.promote_types(row.dtype, torch.float32)).clone())

    def forward(
        self, inputs: Tensor, outputs: Tensor, *, lookup: bool, scale: Tensor | float = 1.0
    ) -> Tensor:
        """What the frozen module would give if the row were in its matrix.

        Args:
            inputs: token ids for a lookup, states (..., D) for logits.
            outputs: what the frozen module gave: embeddings (..., D) or logits (..., V).
            lookup: whether that was a lookup.
            scale: what it multiplies rows by, as Gemma's does.
        """
        if not self.enabled:
            return outputs
        row = self.weight.to(outputs.dtype)
        if lookup:
            return torch.where((inputs == self.token_id)[..., None], row * scale, outputs)
        outputs[..., self.token_id] = inputs.to(row.dtype) @ row
        return outputs


def add_adapters(
    model: HubModel,
    emb_id: int,
    *,
    think_ids: Sequence[int] = (),
    rank: int,
    alpha: float,
    dropout: float,
    targets: Sequence[str],
    dora: bool,
    rslora: bool,
    vision: bool,
    modules_to_save: Sequence[str] = (),
) -> None:
    """Freeze a model and put adapters and trainable rows of its new tokens into it.

    Args:
        model: the Hugging Face model; changed in place.
        emb_id: id of ``<emb>``.
        think_ids: ids of the think tokens.
        rank: inner size of the adapters.
        alpha: adapters are scaled by alpha / rank (by alpha / sqrt(rank) with `rslora`).
        dropout: share of an adapter's inputs that is dropped while training.
        targets: last parts of the names of the linear layers that get one, e.g. ``q_proj``; empty: all of them.
        dora: learn magnitude and direction apart (DoRA).
        rslora: the other scaling, for large ranks.
        vision: whether layers of the vision tower get one too; otherwise it stays as it is.
        modules_to_save: last parts of the names of modules that are trained whole; their layers get no adapter.

    Raises:
        AdapterError: no layer, or no module, has such a name; or one to train whole has the embeddings.
    """
    from peft import LoraConfig, inject_adapter_in_model  # here, since few runs need it and it takes seconds
    from peft.tuners.tuners_utils import cast_adapter_dtype

    tower = {module for part in family_of(model).vision(model) for module in part.modules()}
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    whole = _named_modules(model, modules_to_save)
    inside = {module for each in whole.values() for module in each.modules()}
    if inside & {words, head}:
        raise AdapterError("model.lora.modules_to_save: the embedding matrix is not trained beside adapters")
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and module not in inside
        and (vision or module not in tower)
    }
    chosen = [name for name in linear if not targets or name.rsplit(".", 1)[-1] in targets]
    known = sorted({name.rsplit(".", 1)[-1] for name in linear})
    if unknown := sorted(set(targets) - set(known)):
        raise AdapterError(
            f"model.lora.targets: no linear layer is named {', '.join(unknown)}; there are: {', '.join(known)}"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT says int and takes any number
        lora_dropout=dropout,
        target_modules=chosen,
        use_dora=dora,
        use_rslora=rslora,
    )
    tied = words.weight is head.weight
    model.requires_grad_(False)
    inject_adapter_in_model(config, model, ADAPTER)
    cast_adapter_dtype(model, ADAPTER)
    # Not before: PEFT would wrap them, and the model should stay the model that it was.
    config.modules_to_save = sorted(whole) or None
    for module in whole.values():
        module.requires_grad_(True)
    for number, token_id in enumerate([emb_id, *think_ids]):
        _train_row(model, f"think_{number}" if number else "emb", token_id, tied)


def _named_modules(model: HubModel, last_parts: Sequence[str]) -> dict[str, nn.Module]:
    found = {name: module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in last_parts}
    if unknown := sorted(set(last_parts) - {name.rsplit(".", 1)[-1] for name in found}):
        above = sorted(
            {
                name.rsplit(".", 1)[-1]
                for part in family_of(model).vision(model)
                for name, _ in part.named_children()
            }
        )
        raise AdapterError(
            f"model.lora.modules_to_save: no module is named {', '.join(unknown)}; the vision tower has {', '.join(above)}"
        )
    return found


def modules_to_save(model: HubModel) -> list[str]:
    """Names of the modules that are trained whole beside adapters."""
    return model.peft_config[ADAPTER].modules_to_save or []


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
    """Inside, the model computes what it did before `add_adapters`, the rows included."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    rows = [module for module in model.modules() if isinstance(module, EmbRow)]
    frozen = [(parameter, parameter.requires_grad) for layer in layers for parameter in layer.parameters()]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        for row in rows:
            row.enabled = False
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for row in rows:
            row.enabled = True
        for parameter, trained in frozen:  # PEFT sets it as it goes
            parameter.requires_grad_(trained)


def has_adapters(model: HubModel) -> bool:
    """Whether `add_adapters` has been here."""
    return hasattr(model, "emb_row")


def merged_weights(model: HubModel, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """All of `merge` at once: a state dict that the plain model loads."""
    return dict(merge(model, weights))


@torch.no_grad()
def merge(model: HubModel, weights: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The model's weights with adapters and rows merged in, under the names that it had without them, one by one.

    The model itself is left as it is: merging in place and taking it back would change its last bits.

    Args:
        model: with adapters.
        weights: its state dict where the back end had to gather it; None takes the model's own.

    Yields:
        Names and weights; what was not adapted is the model's own tensor.
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
    embedding, head = matrix_names(model)
    tied = not hasattr(model, "emb_column")
    for name in [embedding] if tied else [embedding, head]:
        found[name] = found[name].clone()
    for name, row in model.named_children():
        if isinstance(row, EmbRow):
            matrix = found[head if name.endswith("_column") else embedding]
            matrix[row.token_id] = found.pop(f"{name}.weight").to(matrix.dtype)
    if tied and head in found:
        found[head] = found[embedding]
    yield from found.items()


def matrix_names(model: HubModel) -> tuple[str, str]:
    """Names of the embedding matrix and of the output matrix."""
    names = {id(module): name for name, module in model.named_modules()}
    words, head = (names[id(each)] for each in (model.get_input_embeddings(), model.get_output_embeddings()))
    return f"{words}.weight", f"{head}.weight"


def trained_rows(model: HubModel) -> dict[str, dict[str, EmbRow]]:
    """The rows of new tokens, by the name of their matrix and then by their own; of tied matrices the embedding's alone."""
    embedding, head = matrix_names(model)
    found: dict[str, dict[str, EmbRow]] = {}
    for name, row in model.named_children():
        if isinstance(row, EmbRow):
            found.setdefault(head if name.endswith("_column") else embedding, {})[name] = row
    return found
