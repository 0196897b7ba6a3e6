"""Attention over flat runs of tokens: prompts among themselves, tails over prompts, one generated token over all.

The backbone's own layers compute everything but attention, on tokens without padding. At each layer they call
`attend`, registered with transformers under `NAMES`, with a plan instead of a mask. Any other mask goes to
transformers' own kernel, so that other callers see an unchanged model.

There are two forms. `rge.model.varlen`, on a GPU: the prompts, then one sequence per branch, which attends to its prompt, the
prompt's last token and itself, without padding or mask. Padded rows, faster on a CPU: the prompts causally, then each
row's whole tail under a mask.

Two unused computations are skipped. Prompts attend causally without a mask, so that kernels skip later tokens. And the last
layer computes queries, outputs and its MLP only for tokens whose state is read; others only need keys and values there.

Shape suffixes: B = rows, T = tokens of all rows, P = tokens of the longest prompt but its last, S = tokens of the
longest tail, U = tokens looked at, C = capacity of a cache, H = heads, K = key heads, G = heads a key head, d = head size.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rge.common.errors import Fault, UserError
from rge.distributed.transfer import moved
from rge.model.hub_model import HubModel
from rge.model.packing import PromptPart, TailPart, tail_mask
from rge.model.varlen import Runs, attend_last, attend_runs, make_runs, wanted

NAMES = {"sdpa": "rge_sdpa", "eager": "rge_eager"}
"""Names under which `attend` is registered, by transformers' kernel."""

KEY = "model.attn_implementation"


@dataclass(frozen=True)
class EncodedPrompts:
    """Keys and values of prompts in each layer, to continue them: padded rows (B, P, K, d) or flat (T, K, d)."""

    part: PromptPart
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def is_flat(self) -> bool:
        """Whether tokens are concatenated without padding."""
        return self.keys[0].dim() == 3

    def padded(self, states: Tensor, rows: Tensor, longest: int) -> Tensor:
        """A layer's keys or values of some rows, without gradient: (rows, longest, K, d)."""
        known = states.detach()
        return known[self.part.index_BP[rows, :longest]] if self.is_flat else known[rows, :longest]


Room = Callable[[str, tuple[int, ...], Tensor], Tensor]
"""Returns zeros of a shape, with the dtype and device of another tensor, in the memory of a name."""


def fresh(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros in new memory."""
    return like.new_zeros(shape)


class EncodedParts:
    """Prompts encoded in one or several `parts`, each with its own backward, and continued by one rollout."""

    def __init__(self, parts: Sequence[EncodedPrompts]):
        self.parts, layouts = list(parts), [one.part for one in parts]
        # What it takes to continue them, see `PromptPart`.
        self.lengths = tuple(length for layout in layouts for length in layout.lengths)
        self.last_id_B = torch.cat([layout.last_id_B for layout in layouts])
        self.last_position_3B = torch.cat([layout.last_position_3B for layout in layouts], dim=1)
        self.after_B = torch.cat([layout.after_B for layout in layouts])
        self.values, self.is_flat = self.parts[0].values, self.parts[0].is_flat

    def buffers(
        self, places: Sequence[int], capacity: int, *, heads_first: bool, room_of: Room
    ) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values of some rows, without gradient, zero-padded to (rows, capacity, K, d).

        Places are counted through all parts. Under autocast keys are rotated in float32 and used in the dtype of values: cast
        once, not in every step. The padding is zeros, since the plain kernel multiplies it by a weight of zero.
        """
        device = self.values[0].device
        copies, start = [], 0
        for encoded in self.parts:
            end = start + len(encoded.part.lengths)
            targets = [number for number, place in enumerate(places) if start <= place < end]
            if targets:
                sources = [places[number] - start for number in targets]
                longest = max(encoded.part.lengths[place] for place in sources)
                rows, into = moved((torch.tensor(sources), torch.tensor(targets)), device)
                copies.append((encoded, rows, into, longest))
            start = end

        def buffer(layer: int, name: str) -> Tensor:
            heads = self.values[layer].shape[-2:]
            room = room_of(f"{name} {layer}", (len(places), capacity, *heads), self.values[0])
            for encoded, rows, into, longest in copies:
                states = getattr(encoded, name)[layer]
                room[into, :longest] = encoded.padded(states, rows, longest).to(room.dtype)
            return room.transpose(1, 2).contiguous() if heads_first else room

        return [(buffer(layer, "keys"), buffer(layer, "values")) for layer in range(len(self.values))]


@dataclass(eq=False)
class Pass:
    """Plan of a forward over prompts (None if already `encoded`), their tails, or both."""

    prompts: PromptPart | None
    tails: TailPart | None
    encoded: EncodedPrompts | None
    num_layers: int
    form: str = "sdpa"  # ``auto``, ``varlen``, or else padded rows, see `rge.model.varlen.wanted`
    whole_pictures: bool = False  # all tokens of a picture attend to each other

    def __post_init__(self) -> None:
        prompts, tails = self.prompts, self.tails
        self.num_prompt_tokens = 0 if prompts is None else prompts.input_ids_T.shape[0]
        self.num_tokens = self.num_prompt_tokens + (0 if tails is None else tails.input_ids_T.shape[0])
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._layout: _Flat | _Padded | None = None
        self.read_R = torch.empty(0, dtype=torch.long, device=(prompts or tails).input_ids_T.device)  # type: ignore[union-attr]
        if tails is not None:
            self.read_R = tails.read_index_R + self.num_prompt_tokens

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, kernel: "_Kernel") -> Tensor:
        """Outputs (T, H, d)."""
        # Decided here, since only the states have the computing dtype.
        layout = self._layout = self._layout or self._laid_out(v_TKd)
        split, outputs = self.num_prompt_tokens, []
        if self.encoded is None:
            known = layout.known(k_TKd[:split], v_TKd.dtype), layout.known(v_TKd[:split], v_TKd.dtype)
            if self.tails is None:
                # Checkpointing recomputes a layer in the backward pass; the first result is in use.
                self.kept.setdefault(layer, known)
            if layer == self.num_layers - 1:
                outputs.append(torch.zeros_like(q_THd[:split], dtype=v_TKd.dtype))
            else:
                outputs.append(layout.prompts(q_THd[:split], *known, kernel))
        else:
            known = self.encoded.keys[layer], self.encoded.values[layer]
        if self.tails is not None:
            outputs.append(layout.tails(q_THd[split:], k_TKd[split:], v_TKd[split:], *known, kernel))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _laid_out(self, like: Tensor) -> "_Flat | _Padded":
        if self.encoded is not None:
            part, flat = self.encoded.part, self.encoded.is_flat
        else:
            assert self.prompts is not None
            part, flat = self.prompts, wanted(self.form, like.device, like.dtype, KEY)
        tails, pictures = self.tails, self.whole_pictures
        return _Flat(part, tails, like.device, pictures) if flat else _Padded(part, tails)


class _Flat:
    """Concatenated sequences: the prompts, and for each branch its prompt, the prompt's last token and itself.

    The prompt's last token is a query only in its row's first branch: the causal mask is aligned at the sequences' ends, so
    other branches do not need it, and queries keep the tails' order.
    """

    def __init__(self, part: PromptPart, tails: TailPart | None, device: torch.device, whole_pictures: bool):
        # The masked picture before the first row is a separate sequence.
        lengths = (part.start, *part.lengths)
        segments = _segments(part) if whole_pictures and any(part.spans) else []
        on_host = make_runs(lengths, lengths), segments, *self._tails(part, tails)
        self.prompt_runs, self.segments, self.tail_runs, self.index_U = moved(on_host, device)

    def _tails(self, part: PromptPart, tails: TailPart | None) -> tuple[Runs, Tensor] | tuple[None, None]:
        if tails is None:
            return None, None
        q_lengths, k_lengths, places = [], [], []
        prompt, tail = part.start, part.start + sum(part.lengths)
        for length, branches in zip(part.lengths, tails.branch_lengths, strict=True):
            own = tail + 1
            for number, branch in enumerate(branches or (0,)):
                q_lengths.append(branch + (number == 0))
                k_lengths.append(length + 1 + branch)
                spans = (prompt, prompt + length), (tail, tail + 1), (own, own + branch)
                places += [torch.arange(*span) for span in spans]
                own += branch
            prompt, tail = prompt + length, own
        return make_runs(q_lengths, k_lengths), torch.cat(places)

    def known(self, states_TKd: Tensor, dtype: torch.dtype) -> Tensor:
        # Under autocast keys are rotated in float32, but used in another dtype.
        return states_TKd.to(dtype)

    def prompts(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, kernel: "_Kernel") -> Tensor:
        if not self.segments:
            return kernel.runs(q_THd, k_TKd, v_TKd, self.prompt_runs)
        out_THd = torch.zeros_like(q_THd, dtype=v_TKd.dtype)
        for segment in self.segments:
            k, v = k_TKd[segment.seen_U], v_TKd[segment.seen_U]
            out = kernel.runs(q_THd[segment.look_T], k, v, segment.runs, causal=segment.causal)
            out_THd = out_THd.index_copy(0, segment.look_T, out)
        return out_THd

    def tails(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, keys: Tensor, values: Tensor, kernel: "_Kernel"
    ) -> Tensor:
        pairs = (keys, k_TKd), (values, v_TKd)
        joined = (torch.cat([before, own.to(before.dtype)]) for before, own in pairs)
        k_UKd, v_UKd = (states.index_select(0, self.index_U) for states in joined)
        return kernel.runs(q_THd, k_UKd, v_UKd, self.tail_runs)


@dataclass(frozen=True)
class _Segment:
    """Pieces of prompts of one kind, texts or whole pictures: places of their tokens, and of those that they attend to."""

    causal: bool
    look_T: Tensor
    seen_U: Tensor
    runs: Runs


def _segments(part: PromptPart) -> list[_Segment]:
    pieces: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
    row = part.start
    for length, spans in zip(part.lengths, part.spans, strict=True):
        edges = [0, *(edge for span in spans for edge in span), length]
        for number, (begin, end) in enumerate(zip(edges, edges[1:], strict=False)):
            if begin < end:
                pieces[number % 2 == 0].append((row, row + begin, row + end))
        row += length
    found = []
    for causal, places in pieces.items():
        look, seen = (
            torch.cat([torch.arange(piece[first], piece[2]) for piece in places]) for first in (1, 0)
        )
        runs = make_runs([end - begin for _, begin, end in places], [end - row for row, _, end in places])
        found.append(_Segment(causal, look, seen, runs))
    return found


class _Padded:
    """Padded rows: prompts causally, tails under a mask."""

    def __init__(self, part: PromptPart, tails: TailPart | None):
        self.part, self.tail_part = part, tails
        self.prompt_rows = _Rows(part.index_BP, part.lengths, part.start, part.input_ids_T.shape[0])
        if tails is not None:
            lengths = [1 + sum(branches) for branches in tails.branch_lengths]
            self.tail_rows = _Rows(tails.index_BS, lengths, 0, tails.input_ids_T.shape[0])
        self._mask: Tensor | None = None

    def known(self, states_TKd: Tensor, dtype: torch.dtype) -> Tensor:
        return self.prompt_rows.padded(states_TKd)

    def prompts(self, q_THd: Tensor, k_BPKd: Tensor, v_BPKd: Tensor, kernel: "_Kernel") -> Tensor:
        rows = self.prompt_rows
        return rows.concatenated(kernel(rows.padded(q_THd), k_BPKd, v_BPKd, None))

    def tails(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, keys: Tensor, values: Tensor, kernel: "_Kernel"
    ) -> Tensor:
        rows = self.tail_rows
        q_BSHd, k_BSKd, v_BSKd = (rows.padded(part) for part in (q_THd, k_TKd, v_TKd))
        k_BUKd = torch.cat([keys.to(k_BSKd.dtype), k_BSKd], dim=1)
        v_BUKd = torch.cat([values.to(v_BSKd.dtype), v_BSKd], dim=1)
        return rows.concatenated(kernel(q_BSHd, k_BUKd, v_BUKd, self._bias(q_THd.dtype)))

    def _bias(self, dtype: torch.dtype) -> Tensor:
        """The tails' additive mask, made once; a boolean one would be converted, and kept, in every layer."""
        if self._mask is None or self._mask.dtype != dtype:
            longest = self.part.index_BP.shape[1]
            seen = tail_mask(self.part.length_B, longest, self.tail_part.segment_BS)  # type: ignore[union-attr]
            self._mask = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
        return self._mask


class _Rows:
    """Converts between concatenated tokens, whose first row begins at `start`, and padded rows."""

    def __init__(self, index_BT: Tensor, lengths: Sequence[int], start: int, num_tokens: int):
        self.shape = index_BT.shape
        longest = index_BT.shape[1]
        self.exact = index_BT.numel() == num_tokens and min(lengths) == longest
        if not self.exact:
            self.index = index_BT.flatten()
            # Tokens of no row (the masked picture) read any row's output, since theirs is unused.
            back = [torch.zeros(start, dtype=torch.long)]
            back += [row * longest + torch.arange(length) for row, length in enumerate(lengths)]
            self.back = moved(torch.cat(back), index_BT.device)

    def padded(self, flat: Tensor) -> Tensor:
        """(T, heads, d) as (B, longest, heads, d)."""
        return (flat if self.exact else flat[self.index]).unflatten(0, self.shape)

    def concatenated(self, rows: Tensor) -> Tensor:
        """(B, longest, heads, d) as (T, heads, d)."""
        flat = rows.flatten(0, 1)
        return flat if self.exact else flat[self.back]


class Cache:
    """Plan of generation: preallocated keys and values of padded rows; one new token per row and step, after the longest prompt.

    `places` are indices of prompts, repeated for several continuations; `num_new_tokens` is the maximum per prompt.
    """

    def __init__(self, encoded: EncodedParts, places: Sequence[int], num_new_tokens: int):
        lengths = [encoded.lengths[place] for place in places]
        self.length = longest = max(lengths)
        # Heads before tokens, as the kernel reads them.
        self.buffers = encoded.buffers(places, longest + num_new_tokens, heads_first=True, room_of=fresh)
        dtype, device = encoded.values[0].dtype, encoded.values[0].device
        self.bias: Tensor | None = None
        if min(lengths) < longest:
            seen = torch.arange(longest + num_new_tokens) < torch.tensor(lengths)[:, None]
            seen[:, longest:] = True
            bias = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
            self.bias = moved(bias[:, None, None], device)

    def attend(self, layer: int, q_BHd: Tensor, k_BKd: Tensor, v_BKd: Tensor, kernel: "_Kernel") -> Tensor:
        """Outputs (B, H, d) of one new token per row, whose key and value are kept."""
        kernel.refuse_window()
        k_BKCd, v_BKCd = self.buffers[layer]
        q_BHd = q_BHd.to(k_BKCd.dtype)
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
        self.buffers = [(keys[rows], values[rows]) for keys, values in self.buffers]
        if self.bias is not None:
            self.bias = self.bias[rows]


def bucket(number: int) -> int:
    """Round up a number of rows, or of tokens per row, to one of few sizes, so that few steps are captured."""
    size = 4
    while number > 2:
        for rounded in (size, size * 3 // 2):
            if rounded >= number:
                return rounded
        size *= 2
    return number


class RunningCache:
    """Plan of generation independent of the host: every step runs the same kernels on the same memory.

    So a step can be captured as a CUDA graph and replayed. Each row's tokens start at the beginning of its own buffer of
    `capacity` tokens, and their number is a tensor on the device, `length_B`. `room_of` allocates everything that a step reads or
    writes; `places` as in `Cache`.
    """

    def __init__(self, encoded: EncodedParts, places: Sequence[int], capacity: int, room_of: Room):
        self.whole = encoded.buffers(places, capacity, heads_first=False, room_of=room_of)
        lengths, rows = [encoded.lengths[place] for place in places], torch.arange(len(places) + 1)
        numbers = [torch.tensor(lengths).int(), rows[:-1], rows.int(), rows.int() * capacity]
        self.numbers = [
            room_of(f"cache {place}", tuple(number.shape), number).copy_(number)
            for place, number in enumerate(moved(numbers, encoded.values[0].device))
        ]
        self._take(len(places))

    def _take(self, num_rows: int) -> None:
        self.buffers = [(keys[:num_rows], values[:num_rows]) for keys, values in self.whole]
        length, row, q_start, k_start = self.numbers
        self.length_B, self.row_B = length[:num_rows], row[:num_rows]
        self.q_start_N, self.k_start_N = q_start[: num_rows + 1], k_start[: num_rows + 1]

    def attend(self, layer: int, q_BHd: Tensor, k_BKd: Tensor, v_BKd: Tensor, kernel: "_Kernel") -> Tensor:
        """Outputs (B, H, d) of one new token per row, whose key and value are kept."""
        k_BCKd, v_BCKd = self.buffers[layer]
        dtype = k_BCKd.dtype
        if layer == 0:
            self.seen_B, self.at = self.length_B + 1, (self.row_B, self.length_B.long())
        k_BCKd.index_put_(self.at, k_BKd.to(dtype))
        v_BCKd.index_put_(self.at, v_BKd.to(dtype))
        out = attend_last(
            q_BHd.to(dtype),
            k_BCKd,
            v_BCKd,
            self.seen_B,
            starts=(self.q_start_N, self.k_start_N),
            scale=kernel.scale,
            window=kernel.window,
            key=KEY,
        )
        if layer == len(self.buffers) - 1:
            self.length_B += 1
        return out

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these, in place."""
        for buffer in (*(buffer for pair in self.buffers for buffer in pair), self.length_B):
            buffer[: len(rows)] = buffer[rows]
        self._take(len(rows))


@dataclass(frozen=True)
class _Kernel:
    """Scaled dot-product attention of several tokens per row, without repeating keys for heads that share them."""

    scale: float
    dropout: float
    plain: bool
    window: int | None = None

    def refuse_window(self) -> None:
        """Raise UserError in a layer with sliding-window attention."""
        if self.window is not None:
            why = f"this model has layers with a window of {self.window} tokens; set {KEY}=varlen"
            raise UserError(why).about(Fault("choice", KEY, ("varlen",)))

    def runs(self, q_THd: Tensor, k_UKd: Tensor, v_UKd: Tensor, runs: Runs, causal: bool = True) -> Tensor:
        """Attention of sequences one after the other: (T, H, d)."""
        if self.dropout:
            raise UserError(f"{KEY}=varlen has no attention dropout; set {KEY}=sdpa")
        return attend_runs(
            q_THd, k_UKd, v_UKd, runs, scale=self.scale, causal=causal, window=self.window, key=KEY
        )

    def __call__(self, q_BTHd: Tensor, k_BUKd: Tensor, v_BUKd: Tensor, bias: Tensor | None) -> Tensor:
        """(B, T, H, d); causal without a bias."""
        self.refuse_window()
        k, v = k_BUKd.transpose(1, 2), v_BUKd.transpose(1, 2)
        settings = {"dropout_p": self.dropout, "scale": self.scale, "is_causal": bias is None}
        groups = q_BTHd.shape[2] // k_BUKd.shape[2]
        if groups == 1 or (bias is None and q_BTHd.is_cuda):
            out = self._run(q_BTHd.transpose(1, 2), k, v, bias, {**settings, "enable_gqa": groups > 1})
            return out.transpose(1, 2)
        q_BTKGd = q_BTHd.unflatten(2, (-1, groups))
        parts = [self._run(q.transpose(1, 2), k, v, bias, settings) for q in q_BTKGd.unbind(3)]
        return torch.stack([part.transpose(1, 2) for part in parts], dim=3).flatten(2, 3)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, settings: dict) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH) if self.plain else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **settings)


def attend(
    module: HubModel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "Pass | Cache | RunningCache | Tensor | None",
    *,
    plain: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it: (1, heads, T, d) in, (1, T, heads, d) out."""
    if not isinstance(attention_mask, (Pass, Cache, RunningCache)):
        settings = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kernel = _Kernel(scale, dropout, plain, sliding_window)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attention_mask.attend(module.layer_idx, q, k, v, kernel)[None], None


for _asked, _name in NAMES.items():
    ALL_ATTENTION_FUNCTIONS.register(_name, partial(attend, plain=_asked == "eager"))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def install(text: HubModel, form: str = "auto", whole_pictures: bool = False) -> str:
    """Let the layers of a decoder of transformers call `attend`, and its last layer compute only what is read; idempotent.

    `form` and `whole_pictures` as in `Pass`.

    Returns:
        The form to plan with: ``varlen`` instead of ``auto`` for layers with a window, or `whole_pictures`, which padded rows
        do not support.

    Raises:
        UserError: padded rows were asked for, which do not support this model.
    """
    has_windows = "sliding_attention" in (getattr(text.config, "layer_types", None) or ())
    if form == "auto" and (whole_pictures or has_windows):
        form = "varlen"
    if form != "varlen" and (whole_pictures or has_windows):
        why = (
            "a picture's tokens attend to each other" if whole_pictures else "some layers attend to a window"
        )
        raise UserError(f"{KEY}={form}: {why} in this model; set {KEY}=varlen").about(
            Fault("choice", KEY, ("varlen",))
        )
    asked = text.config._attn_implementation
    if asked in NAMES.values():
        return form
    text.config._attn_implementation = NAMES[asked]
    last = text.layers[-1]
    last.self_attn.register_forward_pre_hook(_note, with_kwargs=True)
    for module in (last.self_attn.q_proj, last.self_attn.o_proj, last.mlp):
        module.register_forward_pre_hook(_select)
        module.register_forward_hook(_spread)
    return form


# These hooks run modules of the last layer only on tokens that are read, and leave the others zero. Hooks work for every family,
# under every wrapper of the modules and in the recomputation of checkpointing, where only the attention module gets the plan. A
# context variable is per thread: several threads may use one model.

_read: ContextVar[tuple[Tensor, int] | None] = ContextVar("rge_read", default=None)
"""The last layer's tokens that are read, and the number of all tokens, in this thread's forward."""


def _note(module: nn.Module, args: Sequence, kwargs: dict) -> None:
    """Before attention: remember which tokens are read."""
    plan = kwargs.get("attention_mask")
    _read.set((plan.read_R, plan.num_tokens) if isinstance(plan, Pass) else None)


def _select(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
    """Before a module: keep the tokens that are read."""
    read = _read.get()
    return None if read is None else (args[0][:, read[0]],)


def _spread(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor | None:
    """After a module: put them back in place."""
    read = _read.get()
    if read is None:
        return None
    read_R, num_tokens = read
    return output.new_zeros(1, num_tokens, output.shape[-1]).index_copy(1, read_R, output)
