"""Attention over flat runs of tokens: prompts among themselves, tails over prompts, one generated token over all.

The backbone's own layers compute everything but attention, on tokens without padding. At each layer they call
`attend`, registered with transformers under `NAMES`; it is given a plan in place of a mask. Any other mask goes to
transformers' own kernel, so a model behaves as before to everybody else.

Two things are left out because nobody reads them. Prompts attend causally without a mask, so a kernel skips what lies
ahead. And the last layer computes queries, outputs and its MLP only for tokens whose state is read; all others are
needed there for their keys and values alone.

Shape suffixes: B = rows, T = tokens of all rows, P = tokens of the longest prompt but its last, S = tokens of the
longest tail, U = tokens looked at, C = capacity of a cache, H = heads, K = key heads, G = heads a key head, d = head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rge.model.packing import PromptPart, TailPart, tail_mask

NAMES = {"sdpa": "rge_sdpa", "eager": "rge_eager"}
"""Names under which `attend` is registered, by the kernel asked for."""


@dataclass(frozen=True)
class EncodedPrompts:
    """What continuing prompts takes.

    Attributes:
        part: their layout.
        keys: (B, P, K, d) of each layer; with gradient where they were computed with it.
        values: the same.
    """

    part: PromptPart
    keys: list[Tensor]
    values: list[Tensor]


class Pass:
    """Plan of a forward over prompts, tails, or prompts and then tails.

    Args:
        prompts: rows to encode; None if `encoded` has them already.
        tails: their continuations; None to encode prompts alone.
        encoded: prompts' keys and values from an earlier pass.
        num_layers: of the text model.
    """

    def __init__(
        self,
        prompts: PromptPart | None,
        tails: TailPart | None,
        encoded: EncodedPrompts | None,
        num_layers: int,
    ):
        self.prompts, self.tails, self.encoded, self.num_layers = prompts, tails, encoded, num_layers
        self.num_prompt_tokens = 0 if prompts is None else prompts.input_ids_T.shape[0]
        self.num_tokens = self.num_prompt_tokens + (0 if tails is None else tails.input_ids_T.shape[0])
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._mask: Tensor | None = None
        if prompts is not None:
            self._prompt_rows = _Rows(prompts.index_BP, prompts.length_B, self.num_prompt_tokens)
        self.read_R = torch.empty(0, dtype=torch.long, device=(prompts or tails).input_ids_T.device)  # type: ignore[union-attr]
        if tails is not None:
            length_B = (tails.segment_BS >= 0).sum(dim=1)
            self._tail_rows = _Rows(tails.index_BS, length_B, tails.input_ids_T.shape[0])
            read = torch.cat([tails.state_index_N, tails.predict_index_M]).unique()
            self.read_R = read + self.num_prompt_tokens

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, kernel: "_Kernel") -> Tensor:
        """Outputs (T, H, d)."""
        outputs = []
        split = self.num_prompt_tokens
        if self.prompts is not None:
            rows = self._prompt_rows
            k_BPKd, v_BPKd = rows.side_by_side(k_TKd[:split]), rows.side_by_side(v_TKd[:split])
            if self.tails is None:
                # Checkpointing computes a layer once more in the backward pass; the first result is the one in use.
                self.kept.setdefault(layer, (k_BPKd, v_BPKd))
            if layer == self.num_layers - 1:
                outputs.append(torch.zeros_like(q_THd[:split]))
            else:
                q_BPHd = rows.side_by_side(q_THd[:split])
                outputs.append(rows.one_after_the_other(kernel(q_BPHd, k_BPKd, v_BPKd, None)))
        else:
            k_BPKd, v_BPKd = self.encoded.keys[layer], self.encoded.values[layer]  # type: ignore[union-attr]
        if self.tails is not None:
            rows = self._tail_rows
            q_BSHd, k_BSKd, v_BSKd = (rows.side_by_side(part[split:]) for part in (q_THd, k_TKd, v_TKd))
            k_BUKd = torch.cat([k_BPKd.to(k_BSKd.dtype), k_BSKd], dim=1)
            v_BUKd = torch.cat([v_BPKd.to(v_BSKd.dtype), v_BSKd], dim=1)
            outputs.append(rows.one_after_the_other(kernel(q_BSHd, k_BUKd, v_BUKd, self._bias(q_THd.dtype))))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _bias(self, dtype: torch.dtype) -> Tensor:
        """The tails' mask as a sum: made once, where a boolean one would be converted, and kept, in every layer."""
        if self._mask is None or self._mask.dtype != dtype:
            part = self.prompts if self.prompts is not None else self.encoded.part  # type: ignore[union-attr]
            seen = tail_mask(part.length_B, part.index_BP.shape[1], self.tails.segment_BS)  # type: ignore[union-attr]
            self._mask = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
        return self._mask


class _Rows:
    """Moves tokens between a flat run and rows side by side."""

    def __init__(self, index_BT: Tensor, length_B: Tensor, num_tokens: int):
        self.shape, self.num_tokens = index_BT.shape, num_tokens
        self.exact = index_BT.numel() == num_tokens and bool((length_B == index_BT.shape[1]).all())
        if not self.exact:
            self.index = index_BT.flatten()
            real = (torch.arange(index_BT.shape[1], device=index_BT.device) < length_B[:, None]).flatten()
            # Tokens of no row (the masked picture) read some row's output; nothing depends on theirs.
            self.back = torch.zeros(num_tokens, dtype=torch.long, device=index_BT.device)
            self.back[self.index[real]] = real.nonzero().flatten()

    def side_by_side(self, flat: Tensor) -> Tensor:
        """(T, heads, d) as (B, longest, heads, d)."""
        return (flat if self.exact else flat[self.index]).unflatten(0, self.shape)

    def one_after_the_other(self, rows: Tensor) -> Tensor:
        """(B, longest, heads, d) as (T, heads, d)."""
        flat = rows.flatten(0, 1)
        return flat if self.exact else flat[self.back]


class Cache:
    """Plan of generation: keys and values of rows being written, in buffers made once; one new token a row and step.

    Args:
        encoded: of the prompts, read without gradient.
        rows: which of them, each as often as it is continued.
        num_new_tokens: greatest number of tokens put after a prompt.
        dtype: of the weights.
    """

    def __init__(self, encoded: EncodedPrompts, rows: Tensor, num_new_tokens: int, dtype: torch.dtype):
        length_B = encoded.part.length_B[rows]
        longest = int(length_B.max())
        self.length, self.read_R = longest, None
        self.buffers: list[tuple[Tensor, Tensor]] = []
        for pair in zip(encoded.keys, encoded.values, strict=True):
            buffers = []
            for states_BPKd in pair:
                known = states_BPKd.detach()[rows, :longest].transpose(1, 2)
                B, K, _, d = known.shape
                buffer = known.new_empty(B, K, longest + num_new_tokens, d, dtype=dtype)
                buffer[:, :, :longest] = known
                buffers.append(buffer)
            self.buffers.append((buffers[0], buffers[1]))
        self.bias: Tensor | None = None
        if bool((length_B < longest).any()):
            seen = torch.arange(longest + num_new_tokens, device=rows.device)[None] < length_B[:, None]
            seen[:, longest:] = True
            self.bias = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None, None]

    def attend(self, layer: int, q_BHd: Tensor, k_BKd: Tensor, v_BKd: Tensor, kernel: "_Kernel") -> Tensor:
        """Outputs (B, H, d) of one new token a row, whose key and value are kept."""
        k_BKCd, v_BKCd = self.buffers[layer]
        end = self.length + 1
        k_BKCd[:, :, self.length], v_BKCd[:, :, self.length] = k_BKd, v_BKd
        bias = None if self.bias is None else self.bias[..., :end]
        # The heads of one key head stand where a row's queries do, so that no key is repeated for them.
        q_BKGd = q_BHd.unflatten(1, (k_BKd.shape[1], -1))
        out = F.scaled_dot_product_attention(
            q_BKGd, k_BKCd[:, :, :end], v_BKCd[:, :, :end], attn_mask=bias, scale=kernel.scale
        )
        if layer == len(self.buffers) - 1:
            self.length = end
        return out.flatten(1, 2)

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        kept = []
        for pair in self.buffers:
            buffers = []
            for buffer in pair:
                fewer = buffer.new_empty(len(rows), *buffer.shape[1:])
                fewer[:, :, : self.length] = buffer[rows, :, : self.length]
                buffers.append(fewer)
            kept.append((buffers[0], buffers[1]))
        self.buffers = kept
        if self.bias is not None:
            self.bias = self.bias[rows]


@dataclass(frozen=True)
class _Kernel:
    """Scaled dot-product attention of several tokens a row, without repeating keys for the heads that share them."""

    scale: float
    dropout: float
    plain: bool

    def __call__(self, q_BTHd: Tensor, k_BUKd: Tensor, v_BUKd: Tensor, bias: Tensor | None) -> Tensor:
        """(B, T, H, d); causal without a bias."""
        k, v = k_BUKd.transpose(1, 2), v_BUKd.transpose(1, 2)
        settings = {"dropout_p": self.dropout, "scale": self.scale, "is_causal": bias is None}
        groups = q_BTHd.shape[2] // k_BUKd.shape[2]
        if groups == 1 or (bias is None and q_BTHd.is_cuda):
            out = self._run(q_BTHd.transpose(1, 2), k, v, bias, {**settings, "enable_gqa": groups > 1})
            return out.transpose(1, 2)
        q_BTKGd = q_BTHd.unflatten(2, (-1, groups))
        parts = [
            self._run(q_BTKGd[:, :, :, group].transpose(1, 2), k, v, bias, settings)
            for group in range(groups)
        ]
        return torch.stack([part.transpose(1, 2) for part in parts], dim=3).flatten(2, 3)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, settings: dict) -> Tensor:
        if self.plain:
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **settings)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **settings)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "Pass | Cache | Tensor | None",
    *,
    plain: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it: (1, heads, T, d) in, (1, T, heads, d) out."""
    if not isinstance(attention_mask, (Pass, Cache)):
        settings = {"scaling": scaling, "dropout": dropout, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # type: ignore[arg-type]
    kernel = _Kernel(scaling if scaling is not None else query.shape[-1] ** -0.5, dropout, plain)
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]
    return attention_mask.attend(module.layer_idx, *flat, kernel)[None], None  # type: ignore[arg-type]


for _asked, _name in NAMES.items():
    ALL_ATTENTION_FUNCTIONS.register(_name, partial(attend, plain=_asked == "eager"))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def install(text: nn.Module) -> None:
    """Let a text model's layers call `attend`, and its last layer compute only what is read. Twice is once.

    Args:
        text: a decoder of transformers with ``config`` and ``layers``, each with ``self_attn`` and ``mlp``.
    """
    asked = text.config._attn_implementation
    if asked in NAMES.values():
        return
    text.config._attn_implementation = NAMES[asked]
    last, noted = text.layers[-1], _Noted()
    last.self_attn.register_forward_pre_hook(noted.note, with_kwargs=True)
    for module in (last.self_attn.q_proj, last.self_attn.o_proj, last.mlp):
        module.register_forward_pre_hook(noted.select)
        module.register_forward_hook(noted.spread)


class _Noted:
    """Hooks that run modules of the last layer on the tokens that are read, and leave the others zero.

    Hooks, since they hold for every family, under every wrapper of the modules and in the recomputation of
    checkpointing, where only the attention module is told the plan.
    """

    def __init__(self) -> None:
        self.read_R: Tensor | None = None
        self.num_tokens = 0

    def note(self, module: nn.Module, args: Sequence, kwargs: dict) -> None:
        """Before attention: learn which tokens are read."""
        plan = kwargs.get("attention_mask")
        self.read_R = plan.read_R if isinstance(plan, (Pass, Cache)) else None
        self.num_tokens = plan.num_tokens if isinstance(plan, Pass) else 0

    def select(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        """Before a module: keep the read tokens."""
        return None if self.read_R is None else (args[0][:, self.read_R],)

    def spread(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor | None:
        """After a module: put them back in their places."""
        if self.read_R is None:
            return None
        return output.new_zeros(1, self.num_tokens, output.shape[-1]).index_copy(1, self.read_R, output)
