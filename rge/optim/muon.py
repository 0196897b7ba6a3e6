"""Muon (https://kellerjordan.github.io/posts/muon), batched by shape and sharded over processes.

Shape suffixes: K = matrices of one shape, M x N = their shape with M <= N.
"""

import torch
from torch import Tensor

from rge.distributed import collectives as dist

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd quintic that drives singular values to about one; from the page above."""
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update of a matrix is orthogonalised and scaled to AdamW's root mean square.

    The same rule as `torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"``, against which it is tested. That one
    processes single matrices, in bfloat16, on every process. Here matrices of one shape are one batched product, in float32
    without a GPU; every process computes a share of the matrices, and one gather distributes the results.
    Gradients must be equal on all processes, as under DDP, and unsharded, unlike under ZeRO-2, ZeRO-3 and FSDP. Kernels of
    convolutions are flattened; weight decay is decoupled and multiplied by the rate.
    """

    def __init__(self, params: list[dict], *, lr: float, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        moved = [
            (group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        # A kernel counts as the matrix (out channels, all the rest) that multiplies patches.
        matrices = [self._momentum(parameter, parameter.grad).flatten(1) for _, parameter in moved]
        for (group, parameter), update in zip(moved, orthogonal_on_all_ranks(matrices), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            scale = 0.2 * max(update.shape) ** 0.5
            parameter.add_(update.view_as(parameter), alpha=-group["lr"] * scale)

    def _momentum(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(state["momentum_buffer"], MOMENTUM)


def orthogonal_on_all_ranks(matrices: list[Tensor]) -> list[Tensor]:
    """`orthogonal` of every matrix, each computed by one process, with the result on all."""
    if not matrices:
        return []
    shares: list[list[int]] = [[] for _ in range(dist.world_size())]
    load = [0] * len(shares)
    # Most expensive first, each to the process with the least work.
    for index in sorted(range(len(matrices)), key=lambda index: -_cost(matrices[index])):
        least = load.index(min(load))
        shares[least].append(index)
        load[least] += _cost(matrices[index])
    mine = orthogonal([matrices[index] for index in shares[dist.rank()]])
    flat = torch.cat([matrix.flatten() for matrix in mine] or [matrices[0].new_empty(0)])
    sizes = [sum(matrices[index].numel() for index in share) for share in shares]
    values = dist.gather_rows(flat[:, None], sizes).flatten()
    results: list[Tensor] = [matrices[0]] * len(matrices)
    order = [index for share in shares for index in share]
    parts = values.split([matrices[index].numel() for index in order])
    for index, part in zip(order, parts, strict=True):
        results[index] = part.view_as(matrices[index])
    return results


def orthogonal(matrices: list[Tensor]) -> list[Tensor]:
    """Nearly orthogonal matrices with the same singular vectors, by Newton-Schulz iterations, in the given dtypes."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault((min(matrix.shape), max(matrix.shape)), []).append(index)
    results = list(matrices)
    for indices in by_shape.values():
        x_KMN = torch.stack(
            [m if m.shape[0] <= m.shape[1] else m.T for m in map(matrices.__getitem__, indices)]
        )
        x_KMN = x_KMN.bfloat16() if x_KMN.is_cuda else x_KMN.float()
        x_KMN = x_KMN / x_KMN.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
        on_gram = not x_KMN.is_cuda and _is_wide(matrices[indices[0]])
        x_KMN = _leveled_wide(x_KMN) if on_gram else _leveled(x_KMN)
        for index, x_MN in zip(indices, x_KMN, strict=True):
            matrix = matrices[index]
            results[index] = (x_MN if matrix.shape[0] <= matrix.shape[1] else x_MN.T).to(matrix.dtype)
    return results


def _leveled(x_KMN: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram_KMM = x_KMN @ x_KMN.mT
        poly_KMM = torch.baddbmm(gram_KMM, gram_KMM, gram_KMM, beta=b, alpha=c)
        x_KMN = torch.baddbmm(x_KMN, poly_KMM, x_KMN, beta=a)
    return x_KMN


def _leveled_wide(x_KMN: Tensor) -> Tensor:
    """The same iterations on the M x M Gram matrix alone: fewer products where N is much greater than M.

    The factors are polynomials in the Gram matrix, so they commute: with P = aI + bG + cG^2, the next Gram matrix is
    P G P = P^2 G, and their product is applied once. In bfloat16 the small singular values would be lost.
    """
    a, b, c = COEFFICIENTS
    gram_KMM = x_KMN @ x_KMN.mT
    product_KMM: Tensor | None = None
    for iteration in range(ITERATIONS):
        poly_KMM = torch.baddbmm(gram_KMM, gram_KMM, gram_KMM, beta=b, alpha=c)
        poly_KMM.diagonal(dim1=1, dim2=2).add_(a)
        product_KMM = poly_KMM if product_KMM is None else poly_KMM @ product_KMM
        if iteration < ITERATIONS - 1:
            gram_KMM = poly_KMM @ (poly_KMM @ gram_KMM)
    assert product_KMM is not None
    return product_KMM @ x_KMN


def _is_wide(matrix: Tensor) -> bool:
    return max(matrix.shape) >= 2 * min(matrix.shape)


def _cost(matrix: Tensor) -> int:
    """Multiplications and additions of one matrix, as counted on CPU."""
    small, large = sorted(matrix.shape)
    if _is_wide(matrix):
        return 2 * small * small * (2 * large + (4 * ITERATIONS - 3) * small)
    return 2 * ITERATIONS * small * small * (2 * large + small)
