"""Variable-length attention: sequences one after another, without padding or mask.

On a GPU this is one call of flash attention. In each process, values and gradients of the first call of each kind are compared
with ordinary attention, one sequence after the other; a difference is an error, without a fallback. Other devices use ordinary
attention.

Shape suffixes: T = query tokens of all sequences, U = key tokens, H = heads, K = key heads, d = head size, N = sequences.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rge.common.errors import UserError

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Relative difference (of norms) due to rounding: a few units of the dtype's last place."""

_log = logging.getLogger(__name__)
_verified: set[tuple] = set()


class KernelError(UserError):
    """A fast kernel's result differs from the plain one's; the message says by how much, and how to disable it."""


@dataclass(frozen=True)
class Runs:
    """Query and key tokens of sequences, on the host, and their (N + 1) int32 sums. Queries are aligned at the keys' end."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    q_start_N: Tensor
    k_start_N: Tensor


def make_runs(q_lengths: Sequence[int], k_lengths: Sequence[int]) -> Runs:
    """Runs of these lengths, on the host; empty sequences are left out."""
    pairs = [(q, k) for q, k in zip(q_lengths, k_lengths, strict=True) if q]
    starts = torch.tensor([(0, 0), *pairs], dtype=torch.int32).cumsum(dim=0, dtype=torch.int32)
    q_start_N, k_start_N = starts.T.contiguous().unbind()
    return Runs(tuple(q for q, _ in pairs), tuple(k for _, k in pairs), q_start_N, k_start_N)


def wanted(asked: str, device: torch.device, dtype: torch.dtype, key: str) -> bool:
    """Whether attention is computed in this form: ``auto``: where flash attention does; ``varlen``: always.

    `key` is that of the recipe, for messages.

    Raises:
        KernelError: ``varlen`` on a GPU in a dtype that flash attention does not support.
    """
    if device.type != "cuda" or asked not in ("auto", "varlen"):
        return asked == "varlen"
    if asked == "varlen" and dtype not in TOLERANCE:
        raise KernelError(
            f"{key}=varlen computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}: "
            f"train with mixed precision, or set {key}=sdpa"
        ).about(key)
    return dtype in TOLERANCE


def attend_runs(
    q_THd: Tensor,
    k_UKd: Tensor,
    v_UKd: Tensor,
    runs: Runs,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    key: str,
) -> Tensor:
    """Attention outputs (T, H, d) of separate sequences; each key head may serve several heads.

    With `causal`, a token attends only to itself and earlier ones, counted from the sequences' ends; with `window`, only to that
    many of them. `key` is the recipe's, for messages.

    Raises:
        KernelError: the GPU's kernel differs from ordinary attention.
    """
    settings: dict[str, Any] = {"scale": scale, "causal": causal, "window": window}
    if not q_THd.is_cuda:
        return one_by_one(q_THd, k_UKd, v_UKd, runs, **settings)
    flat = (q_THd.to(v_UKd.dtype), k_UKd.to(v_UKd.dtype), v_UKd)
    kind = (key, v_UKd.dtype, causal, window is None, runs.q_lengths == runs.k_lengths)
    if kind not in _verified:
        verify(_flash, flat, runs, settings, key)
        _verified.add(kind)
    return _flash(*flat, runs, **settings)


def attend_last(
    q_BHd: Tensor,
    k_BCKd: Tensor,
    v_BCKd: Tensor,
    seen_B: Tensor,
    *,
    starts: tuple[Tensor, Tensor],
    scale: float,
    window: int | None = None,
    key: str,
) -> Tensor:
    """Outputs (B, H, d) of one token per row over the first `seen_B` tokens of its buffer, itself the last; no gradient.

    `seen_B` is int32 on the device, where captured steps increment it; `starts` are int32 (B + 1): 0, 1, 2 ... and 0, C, 2C ... The
    rest is as in `attend_runs`.

    Raises:
        KernelError: the GPU's kernel differs from ordinary attention.
    """
    if not q_BHd.is_cuda:
        return _attend_last_reference(q_BHd, k_BCKd, v_BCKd, seen_B, scale, window)
    # Without a window a single token attends to everything, so causality does not matter.
    window_size = (-1, -1) if window is None else (window - 1, 0)
    flat, sizes = (q_BHd.contiguous(), k_BCKd.flatten(0, 1), v_BCKd.flatten(0, 1)), (1, k_BCKd.shape[1])
    out = _varlen(*flat, *starts, *sizes, scale=scale, window_size=window_size, seen_N=seen_B)
    kind = (key, "last", q_BHd.dtype, window is None)
    if kind not in _verified:
        plain = _attend_last_reference(q_BHd.float(), k_BCKd.float(), v_BCKd.float(), seen_B, scale, window)
        apart = float((out.float() - plain).norm() / plain.norm().clamp(min=1e-12))
        allowed = TOLERANCE.get(q_BHd.dtype, 1e-5)
        found = f"output of one new token per row {apart:.1e}"
        _judge(apart <= allowed, found, f"{key}: flash attention", "ordinary attention", f"{key}=sdpa")
        _verified.add(kind)
    return out


def _attend_last_reference(
    q_BHd: Tensor, k_BCKd: Tensor, v_BCKd: Tensor, seen_B: Tensor, scale: float, window: int | None
) -> Tensor:
    place_C = torch.arange(k_BCKd.shape[1], device=q_BHd.device)
    seen_BC = place_C < seen_B[:, None]
    if window is not None:
        seen_BC &= place_C >= seen_B[:, None] - window
    # Heads of one key head become its queries, so that no key is repeated.
    q_BKGd = q_BHd.unflatten(1, (k_BCKd.shape[2], -1))
    k_BKCd, v_BKCd = k_BCKd.transpose(1, 2), v_BCKd.transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q_BKGd, k_BKCd, v_BKCd, attn_mask=seen_BC[:, None, None], scale=scale
    )
    return out.flatten(1, 2)


def _flash(
    q_THd: Tensor, k_UKd: Tensor, v_UKd: Tensor, runs: Runs, *, scale: float, causal: bool, window: int | None
) -> Tensor:
    q_THd, k_UKd, v_UKd = (part.contiguous() for part in (q_THd, k_UKd, v_UKd))
    longest_q, longest_k = max(runs.q_lengths), max(runs.k_lengths)
    window_size = (-1 if window is None else window - 1, 0 if causal else -1)
    starts = runs.q_start_N, runs.k_start_N
    return _varlen(q_THd, k_UKd, v_UKd, *starts, longest_q, longest_k, scale=scale, window_size=window_size)


def _varlen(
    q_THd: Tensor,
    k_UKd: Tensor,
    v_UKd: Tensor,
    q_start_N: Tensor,
    k_start_N: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    seen_N: Tensor | None = None,
) -> Tensor:
    """Torch's flash attention; ``seen_N``: how many of each sequence's keys count, without gradient."""
    takes, settings = _parameters(), {"scale": scale, "window_size": window_size}
    sequences = q_THd, k_UKd, v_UKd, q_start_N, k_start_N, max_q, max_k
    if "enable_gqa" in takes:  # before torch 2.13, key heads may be fewer unasked
        settings["enable_gqa"] = q_THd.shape[1] != k_UKd.shape[1]
    if seen_N is not None and "seqused_k" not in takes:  # the operator has it, its wrapper does not
        window = {"window_size_left": window_size[0], "window_size_right": window_size[1]}
        options: dict[str, Any] = {"scale": scale, "seqused_k": seen_N, **window}
        return torch.ops.aten._flash_attention_forward(*sequences, 0.0, False, False, **options)[0]
    if seen_N is not None:
        settings["seqused_k"] = seen_N
    return _varlen_module().varlen_attn(*sequences, **settings)


def _varlen_module() -> Any:
    from torch.nn.attention import varlen  # needed only with a GPU

    return varlen


@cache
def _parameters() -> frozenset[str]:
    """Parameters of torch's `varlen_attn`, of which older versions lack some."""
    return frozenset(inspect.signature(_varlen_module().varlen_attn).parameters)


def one_by_one(
    q_THd: Tensor, k_UKd: Tensor, v_UKd: Tensor, runs: Runs, *, scale: float, causal: bool, window: int | None
) -> Tensor:
    """Reference for `attend_runs`: ordinary attention, one sequence after the other."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plainly_causal = causal and window is None and q.shape[1] == k.shape[1]
        seen = None if plainly_causal else _seen(q.shape[1], k.shape[1], causal, window, q.device)
        return F.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=seen,
            is_causal=plainly_causal,
            scale=scale,
            enable_gqa=len(q) != len(k),
        )[0]

    return _each(attend, q_THd, k_UKd, v_UKd, runs)


def rounded(
    q_THd: Tensor, k_UKd: Tensor, v_UKd: Tensor, runs: Runs, *, scale: float, causal: bool, window: int | None
) -> Tensor:
    """The same by its formula, with weights rounded to the states' dtype, as in any kernel of that dtype."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
        score = scale * (q.float() @ k.float().mT)
        if (seen := _seen(q.shape[1], k.shape[1], causal, window, q.device)) is not None:
            score = score.masked_fill(~seen, float("-inf"))
        return score.softmax(dim=-1).to(v.dtype) @ v

    return _each(attend, q_THd, k_UKd, v_UKd, runs)


def _each(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q_THd: Tensor,
    k_UKd: Tensor,
    v_UKd: Tensor,
    runs: Runs,
) -> Tensor:
    """`attend` of each sequence's states (H, T, d)."""
    parts = zip(
        q_THd.split(list(runs.q_lengths)),
        k_UKd.split(list(runs.k_lengths)),
        v_UKd.split(list(runs.k_lengths)),
        strict=True,
    )
    outputs = [attend(*(part.transpose(0, 1) for part in states)).transpose(0, 1) for states in parts]
    return torch.cat(outputs) if outputs else torch.zeros_like(q_THd)


def _seen(num_q: int, num_k: int, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys each query attends to, counted from the ends; None: all."""
    if not causal and window is None:
        return None
    seen = torch.ones(num_q, num_k, dtype=torch.bool, device=device)
    if causal:
        seen = seen.tril(num_k - num_q)
    if window is not None:
        seen = seen.triu(num_k - num_q - window + 1)
    return seen


def verify(
    kernel: Callable[..., Tensor], states: Sequence[Tensor], runs: Runs, settings: dict, key: str
) -> float:
    """Hold an attention kernel against ordinary attention on given queries, keys and values; see `hold_against`."""
    words = f"{key}: flash attention", "ordinary attention", f"{key}=sdpa"
    tested, plain, usual = (partial(form, runs=runs, **settings) for form in (kernel, one_by_one, rounded))
    return hold_against(tested, plain, usual, states, ("queries", "keys", "values"), words)


def hold_against(
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    rounded: Callable[..., Any],
    inputs: Sequence[Tensor],
    names: Sequence[str],
    words: tuple[str, str, str],
) -> float:
    """Compare a kernel's outputs and gradients with those of plain code in higher precision.

    Where terms cancel, every kernel of the inputs' dtype is far off in relative terms: the gradient of values under nearly uniform
    attention, for instance. So a difference is an error if it exceeds both `TOLERANCE` and three times that of plain
    code in the inputs' dtypes. The latter is the criterion of flash attention's own tests.

    All three return a tensor or several for all inputs; `rounded` is called in the inputs' dtypes. The first inputs, as many as there
    are `names`, get gradients. `words` are what is compared, with what, and the setting that avoids it, for messages.

    Returns:
        The greatest relative difference.

    Raises:
        KernelError: a difference is an error.
    """
    dtype, count = inputs[0].dtype, len(names)
    wide = torch.float64 if dtype == torch.float32 else torch.promote_types(dtype, torch.float32)
    exact = _with_gradients(plain, [part.to(wide) for part in inputs], count)
    found = _with_gradients(kernel, inputs, count)
    labels = [*["output"] * (len(exact) - count), *(f"gradient of {name}" for name in names)]
    apart, allowed = _apart(found, exact), TOLERANCE.get(dtype, 1e-5)
    over = [place for place, value in enumerate(apart) if not value <= allowed]
    if over:
        usual = _apart(_with_gradients(rounded, inputs, count), exact)
        over = [place for place in over if not apart[place] <= 3 * usual[place]]
    said = ", ".join(f"{label} {value:.1e}" for label, value in zip(labels, apart, strict=True))
    _judge(not over, said, *words)
    return max(apart)


def _with_gradients(function: Callable[..., Any], inputs: Sequence[Tensor], count: int) -> list[Tensor]:
    """Outputs, and gradients of the first `count` inputs; of copies, since some kernels write gradients over what they saved."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(inputs[0].device.type, enabled=False),
    ):
        given = [part.clone().detach().requires_grad_(place < count) for place, part in enumerate(inputs)]
        found = function(*given)
        outputs = list(found) if isinstance(found, tuple) else [found]
        cotangents = [_irregular(out) for out in outputs]
        return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, given[:count], cotangents)]


def _irregular(like: Tensor) -> Tensor:
    """A cotangent of few digits that reveals kernels that mix up rows or columns."""
    numbers = torch.arange(like.numel(), device=like.device).double().cos()
    return numbers.bfloat16().view(like.shape).to(like.dtype)


def _apart(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Relative differences."""
    pairs = zip(
        (part.detach().double() for part in found), (part.detach().double() for part in exact), strict=True
    )
    return [float((ours - plain).norm() / plain.norm().clamp(min=1e-12)) for ours, plain in pairs]


def _judge(equal: bool, found: str, what: str, other: str, avoid: str) -> None:
    if not equal:
        raise KernelError(
            f"it differs from {other} (relative differences on this GPU: {found}); set {avoid}, and please report it with the "
            "output of scripts/gpu_check.py",
            what,
        ).about(avoid.partition("=")[0])
    _log.warning("%s checked against %s (relative): %s", what, other, found)
