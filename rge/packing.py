"""Lay a prompt and its continuations out in one row, so that one forward serves them all.

    [ prompt: pictures and text ][ branch: self rationale, <emb> ][ branch: oracle rationale, <emb> ][ ... ]

Every branch continues from the end of the prompt: it starts at the position after the prompt's last on all three
rotary axes, sees the prompt and itself, and never another branch. The mask is what makes it impossible for the
contrastive state of one branch to see the oracle's tokens in the next. The result equals separate forwards of
prompt + branch, at the price of one prompt.

Shape suffixes: B = rows, T = tokens of the longest row, N = read-out states, M = predicted tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rge.prompts import Prompt

PROMPT, PADDING = 0, -1
"""Segments of a row; branches are 1, 2, ..."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A continuation of a prompt.

    Attributes:
        ids: token ids, ending with ``<emb>``.
        read_state: whether the state at the last token, ``<emb>``, is read out as an embedding.
        predict: whether the ids are labels of the LM loss (the prompt's last state predicts the first).
    """

    ids: Sequence[int]
    read_state: bool = False
    predict: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch of rows, ready for one forward.

    Attributes:
        input_ids_BT: token ids.
        position_ids_3BT: rotary positions.
        segment_BT: `PADDING`, `PROMPT` or the branch's number.
        pixel_values: patches of all pictures, rows in order.
        image_grid: (number of pictures, 3).
        state_index_N: flat positions (row * T + column) of the states to read, row by row, branch by branch.
        predict_index_M: flat positions of the states that predict `label_M`.
        label_M: token ids.
    """

    input_ids_BT: Tensor
    position_ids_3BT: Tensor
    segment_BT: Tensor
    pixel_values: Tensor
    image_grid: Tensor
    state_index_N: Tensor
    predict_index_M: Tensor
    label_M: Tensor

    def to(self, device: torch.device | str) -> "Packed":
        """The same batch on another device."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in self.__slots__}
        return replace(self, **moved)


def attention_mask(segment_BT: Tensor) -> Tensor:
    """Which token may look at which: (B, 1, T, T) bool, True where row looks at column.

    A token sees earlier tokens of the prompt and of its own branch. Padding sees itself only, since a softmax over
    nothing is NaN, and nobody sees padding.
    """
    T = segment_BT.shape[1]
    order = torch.arange(T, device=segment_BT.device)
    look, seen = segment_BT[:, :, None], segment_BT[:, None, :]
    allowed = (seen == look) | (seen == PROMPT)
    allowed &= order[None, :, None] >= order[None, None, :]
    allowed &= (seen != PADDING) & (look != PADDING)
    return (allowed | torch.eye(T, dtype=torch.bool, device=segment_BT.device))[:, None]


def pack(
    prompts: Sequence[Prompt],
    positions: Sequence[Tensor],
    branches: Sequence[Sequence[Branch]],
    *,
    pad_id: int,
    picture_ids: Sequence[int],
    empty_picture: tuple[Tensor, Tensor],
    padding_side: str = "right",
) -> Packed:
    """Build the rows of one forward.

    Args:
        prompts: one a row.
        positions: (3, T) rotary positions of each prompt.
        branches: continuations of each prompt, any number and any lengths.
        pad_id: id that fills rows up.
        picture_ids: ids of the smallest picture's tokens (start, one placeholder, end), see `empty_picture`.
        empty_picture: pixel values and grid put, masked, into the first row where no prompt has a picture.
        padding_side: ``right`` or ``left``; the result does not depend on it.

    Raises:
        ValueError: no rows, a branch without tokens, or an unknown padding side.
    """
    if not prompts:
        raise ValueError("cannot pack a batch without rows")
    if padding_side not in ("right", "left"):
        raise ValueError(f"padding_side must be right or left, got {padding_side!r}")
    ids, segments, places, states, predicts, labels = [], [], [], [], [], []
    pixels = [prompt.pixel_values for prompt in prompts if prompt.pixel_values is not None]
    grids = [prompt.image_grid for prompt in prompts if prompt.image_grid is not None]
    for row, (prompt, position, continuations) in enumerate(zip(prompts, positions, branches, strict=True)):
        row_ids, row_segments, row_places = (
            [prompt.input_ids],
            [torch.zeros_like(prompt.input_ids)],
            [position],
        )
        offset = len(prompt)
        if not pixels and row == 0:
            dummy = torch.tensor(picture_ids)
            row_ids.insert(0, dummy)
            row_segments.insert(0, torch.full_like(dummy, PADDING))
            row_places.insert(0, dummy.new_zeros(3, len(dummy)))
            offset += len(dummy)
        last_of_prompt = offset - 1
        after_prompt = int(position.max()) + 1
        for number, branch in enumerate(continuations, start=1):
            length = len(branch.ids)
            if length == 0:
                raise ValueError(f"row {row} ({prompt.id}): a branch needs at least one token")
            branch_ids = torch.as_tensor(branch.ids, dtype=torch.long)
            row_ids.append(branch_ids)
            row_segments.append(torch.full_like(branch_ids, number))
            row_places.append((after_prompt + torch.arange(length)).expand(3, -1))
            if branch.read_state:
                states.append((row, offset + length - 1))
            if branch.predict:
                columns = [last_of_prompt, *range(offset, offset + length - 1)]
                predicts += [(row, column) for column in columns]
                labels.append(branch_ids)
            offset += length
        ids.append(torch.cat(row_ids))
        segments.append(torch.cat(row_segments))
        places.append(torch.cat(row_places, dim=1))
    B, T = len(prompts), max(len(row) for row in ids)
    input_ids_BT = torch.full((B, T), pad_id)
    segment_BT = torch.full((B, T), PADDING)
    position_ids_3BT = torch.zeros(3, B, T, dtype=torch.long)
    shift = []
    for row in range(B):
        length = len(ids[row])
        start = 0 if padding_side == "right" else T - length
        shift.append(start)
        input_ids_BT[row, start : start + length] = ids[row]
        segment_BT[row, start : start + length] = segments[row]
        position_ids_3BT[:, row, start : start + length] = places[row]
    if not pixels:
        pixels, grids = [empty_picture[0]], [empty_picture[1]]

    def flat(pairs: list[tuple[int, int]]) -> Tensor:
        return torch.tensor([row * T + column + shift[row] for row, column in pairs], dtype=torch.long)

    return Packed(
        input_ids_BT=input_ids_BT,
        position_ids_3BT=position_ids_3BT,
        segment_BT=segment_BT,
        pixel_values=torch.cat(pixels),
        image_grid=torch.cat(grids),
        state_index_N=flat(states),
        predict_index_M=flat(predicts),
        label_M=torch.cat(labels) if labels else torch.empty(0, dtype=torch.long),
    )
