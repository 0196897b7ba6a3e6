"""Pack prompts and their branches into one flat run of tokens, so that one forward pass serves them all.

    [ prompt of row 0 ][ prompt of row 1 ] ... [ tail of row 0 ][ tail of row 1 ] ...
    tail: [ the prompt's last token ][ branch: self rationale, <emb> ][ branch: oracle rationale, <emb> ][ ... ]

Every branch continues from the end of its prompt: it starts at the position after the prompt's last on all three
rotary axes, and attends to the prompt and itself, never to another branch. So the contrastive state of one branch cannot
depend on the oracle's tokens in the next. The result equals separate forwards of prompt + branch, at the cost of one prompt.

There is no padding: tokens are concatenated, and only attention (`rge.model.attention`) pads rows. A branch may bring pictures of its own (`Branch.pictured`). A prompt's last token opens
the tail because it is the first whose state is read, by the rollout and by the LM loss; of earlier tokens only keys and
values are used.

Shape suffixes: B = rows, T = tokens of all rows, P = tokens of the longest prompt but its last, S = tokens of the
longest tail, N = read-out states, M = predicted tokens, L = sampled tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rge.distributed.transfer import moved
from rge.model.prompts import Prompt

PROMPT, PADDING = 0, -1
"""Segments of a tail; branches are 1, 2, ..."""

NO_IDS = torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class Branch:
    """A continuation of a prompt."""

    ids: Sequence[int]  # ending with ``<emb>``
    read_state: bool = False  # the state at the last token, ``<emb>``, is an embedding
    predict: bool = False  # the ids are labels of the LM loss (the prompt's last state predicts the first)
    sampled: bool = False  # the ids were sampled, and their log probabilities are read
    pictured: Prompt | None = None  # a continuation with pictures, at positions of its own; its ids are `ids`


Read = Callable[[Callable[[int], list[Branch]]], Tensor]
"""From the branches of each row to their states (N, D), without gradient."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompts of a batch, each without its last token."""

    lengths: tuple[int, ...]  # on the host, like `start`: attention is laid out without synchronising
    start: int  # tokens before the first row: those of the masked picture, if no row has one
    spans: tuple[tuple[tuple[int, int], ...], ...]  # of each row's pictures: begins and ends
    input_ids_T: Tensor
    position_ids_3T: Tensor
    picture_index_F: Tensor  # places in T of the pictures' placeholders
    index_BP: Tensor  # places in T of each row's tokens, padded with 0
    length_B: Tensor
    last_id_B: Tensor  # of each prompt's last token, as the next
    last_position_3B: Tensor
    after_B: Tensor  # position of the first token after the prompt, the same on all axes
    pixels: Tensor  # patches or tiles of all pictures, rows in order, uint8
    image_grid: Tensor  # (number of pictures, 3), on the host, see `rge.model.vision_tower.sizes_of`


@dataclass(frozen=True, slots=True)
class TailPart:
    """Tails of a batch: each prompt's last token and the branches. An ``index`` has places in T."""

    branch_lengths: tuple[tuple[int, ...], ...]
    input_ids_T: Tensor
    position_ids_3T: Tensor
    index_BS: Tensor  # of each row's tokens, padded with 0
    segment_BS: Tensor  # `PROMPT` for the prompt's last token, the branch's number, or `PADDING`
    state_index_N: Tensor  # of the states to read, row by row, branch by branch
    predict_index_M: Tensor  # of the states that predict `label_M`
    label_M: Tensor
    label_lengths: tuple[int, ...]  # number of labels of each branch with labels
    sampled_index_L: Tensor  # of the states that predict `sampled_L`
    sampled_L: Tensor
    read_index_R: Tensor  # of all states that are read or predict, in order
    # Of the branches' own pictures, as in `PromptPart`; None without any.
    picture_index_F: Tensor | None = None
    pixels: Tensor | None = None
    image_grid: Tensor | None = None


def to_device(*parts: Any, device: torch.device | str) -> list[Any]:
    """Prompt and tail parts on a device, in one copy; pixels separately, unless `rge.data.loader.Loader` has copied them."""
    # The grid stays on the host, since reading sizes from a device would synchronise.
    pictured = [getattr(part, "pixels", None) is not None for part in parts]
    alone = [
        {"pixels": part.pixels, "image_grid": part.image_grid} if has_pictures else {}
        for part, has_pictures in zip(parts, pictured, strict=True)
    ]
    together = [replace(part, **dict.fromkeys(left)) for part, left in zip(parts, alone, strict=True)]
    on_device = moved(together, device)
    for left in filter(None, alone):
        pixels = left["pixels"]
        if torch.device(device).type == "cuda" and pixels.device.type == "cpu" and not pixels.is_pinned():
            pixels = pixels.pin_memory()
        left["pixels"] = pixels.to(device, non_blocking=True)
    return [replace(part, **left) for part, left in zip(on_device, alone, strict=True)]


def pack_prompts(
    prompts: Sequence[Prompt], *, picture_ids: Sequence[int], empty_picture: tuple[Tensor, Tensor]
) -> PromptPart:
    """Lay out prompts, one per row, each without its last token.

    If no prompt has a picture, `empty_picture` (pixels and grid, of the tokens `picture_ids`) is put before the first row. Its tokens
    belong to no row, so no row attends to them.

    Raises:
        ValueError: no rows, or a prompt that ends in a picture.
    """
    if not prompts:
        raise ValueError("cannot pack a batch without rows")
    pixels = [prompt.pixels for prompt in prompts if prompt.pixels is not None]
    grids = [prompt.image_grid for prompt in prompts if prompt.image_grid is not None]
    ids = [prompt.input_ids[:-1] for prompt in prompts]
    places = [prompt.position_3T[:, :-1] for prompt in prompts]
    types = [prompt.type_ids[:-1] for prompt in prompts]
    lengths, start = tuple(map(len, ids)), 0
    for prompt in prompts:
        if bool(prompt.type_ids[-1]):
            raise ValueError(f"the prompt of {prompt.id} ends in a picture; a token must follow it")
    if not pixels:
        pixels, grids, start = [empty_picture[0]], [empty_picture[1]], len(picture_ids)
        ids.insert(0, torch.tensor(picture_ids))
        places.insert(0, torch.zeros(3, start, dtype=torch.long))
        types.insert(0, torch.tensor([0, *[1] * (start - 2), 0]))
    return PromptPart(
        lengths=lengths,
        start=start,
        spans=tuple(_spans(prompt.type_ids[:-1]) for prompt in prompts),
        input_ids_T=torch.cat(ids),
        position_ids_3T=torch.cat(places, dim=1),
        picture_index_F=torch.cat(types).nonzero().flatten(),
        index_BP=_index(lengths, start),
        length_B=torch.tensor(lengths),
        last_id_B=torch.stack([prompt.input_ids[-1] for prompt in prompts]),
        last_position_3B=torch.stack([prompt.position_3T[:, -1] for prompt in prompts], dim=1),
        # As in a forward of the whole row: the times of a clip may reach further than the text after it.
        after_B=torch.stack([prompt.position_3T[:, -1].max() + 1 for prompt in prompts]),
        pixels=_joined(pixels),
        image_grid=torch.cat(grids),
    )


def _joined(pixels: Sequence[Tensor]) -> Tensor:
    """Pixels of all pictures; copied at once to where a GPU fetches them from, if they are not there yet."""
    if len(pixels) == 1:
        return pixels[0]
    shape = (sum(map(len, pixels)), *pixels[0].shape[1:])
    pinned = torch.cuda.is_available() and pixels[0].device.type == "cpu"
    return torch.cat(
        [*pixels], out=torch.empty(shape, dtype=torch.uint8, device=pixels[0].device, pin_memory=pinned)
    )


def pack_tails(prompts: Sequence[Prompt], branches: Sequence[Sequence[Branch]]) -> TailPart:
    """Lay out the continuations of prompts, any number per prompt and of any lengths; ValueError for one without tokens."""
    ids, segments, places, states, predicts, labels, lengths = [], [], [], [], [], [], []
    samples, sampled, pictured = [], [], []
    offset = 0
    for row, (prompt, continuations) in enumerate(zip(prompts, branches, strict=True)):
        first = offset
        ids.append(prompt.input_ids[-1:])
        segments.append(torch.tensor([PROMPT]))
        places.append(prompt.position_3T[:, -1:])
        after_prompt = int(prompt.position_3T[:, -1].max()) + 1
        offset += 1
        for number, branch in enumerate(continuations, start=1):
            length = len(branch.ids)
            if length == 0:
                raise ValueError(f"row {row} ({prompt.id}): a branch needs at least one token")
            branch_ids = torch.as_tensor(branch.ids, dtype=torch.long)
            ids.append(branch_ids)
            segments.append(torch.full_like(branch_ids, number))
            if branch.pictured is None:
                places.append((after_prompt + torch.arange(length)).expand(3, -1))
            else:
                places.append(branch.pictured.position_3T)
                pictured.append((offset, branch.pictured))
            if branch.read_state:
                states.append(offset + length - 1)
            before = [first, *range(offset, offset + length - 1)]
            if branch.predict:
                predicts += before
                labels.append(branch_ids)
            if branch.sampled:
                samples += before
                sampled.append(branch_ids)
            offset += length
        lengths.append(offset - first)
    return TailPart(
        branch_lengths=tuple(tuple(len(branch.ids) for branch in row) for row in branches),
        input_ids_T=torch.cat(ids),
        position_ids_3T=torch.cat(places, dim=1),
        index_BS=_index(lengths, 0),
        segment_BS=pad_sequence(torch.cat(segments).split(lengths), batch_first=True, padding_value=PADDING),
        state_index_N=torch.tensor(states, dtype=torch.long),
        predict_index_M=torch.tensor(predicts, dtype=torch.long),
        label_M=torch.cat([NO_IDS, *labels]),
        label_lengths=tuple(map(len, labels)),
        sampled_index_L=torch.tensor(samples, dtype=torch.long),
        sampled_L=torch.cat([NO_IDS, *sampled]),
        read_index_R=torch.tensor(sorted({*states, *predicts, *samples}), dtype=torch.long),
        **_pictures_of(pictured),
    )


def _pictures_of(pictured: Sequence[tuple[int, Prompt]]) -> dict[str, Tensor]:
    """The fields of `TailPart` for continuations with pictures, each with the place of its first token."""
    shown = [(start, part) for start, part in pictured if part.pixels is not None]
    if not shown:
        return {}
    return {
        "picture_index_F": torch.cat([start + part.type_ids.nonzero().flatten() for start, part in shown]),
        "pixels": _joined([part.pixels for _, part in shown if part.pixels is not None]),
        "image_grid": torch.cat([part.image_grid for _, part in shown if part.image_grid is not None]),
    }


def _spans(type_ids_T: Tensor) -> tuple[tuple[int, int], ...]:
    """Begins and ends of runs of ones."""
    type_ids_T = type_ids_T.clamp(max=1)
    edges = torch.diff(type_ids_T, prepend=type_ids_T.new_zeros(1), append=type_ids_T.new_zeros(1))
    begins, ends = ((edges == step).nonzero().flatten().tolist() for step in (1, -1))
    return tuple(zip(begins, ends, strict=True))


def _index(lengths: Sequence[int], start: int) -> Tensor:
    """Places of concatenated rows of these lengths, as a rectangle padded with 0."""
    return pad_sequence(torch.arange(start, start + sum(lengths)).split([*lengths]), batch_first=True)


def tail_mask(length_B: Tensor, longest_prompt: int, segment_BS: Tensor) -> Tensor:
    """Attention mask of tails: (B, 1, S, P + S) bool, True where a row's token attends to a column.

    Columns are the row's prompt without its last token (`length_B`, at most P = `longest_prompt`), then the tail. A token
    attends to the prompt and to earlier tokens of its own branch. Padding attends only to itself, since a softmax over nothing
    is NaN, and no other token attends to padding.
    """
    S, device = segment_BS.shape[1], segment_BS.device
    order = torch.arange(S, device=device)
    look, seen = segment_BS[:, :, None], segment_BS[:, None, :]
    within = (seen == look) | (seen == PROMPT)
    within &= order[None, :, None] >= order[None, None, :]
    within &= (seen != PADDING) & (look != PADDING)
    within |= torch.eye(S, dtype=torch.bool, device=device)
    before = torch.arange(longest_prompt, device=device) < length_B[:, None]
    before_BSP = before[:, None, :] & (look != PADDING)
    return torch.cat([before_BSP, within], dim=2)[:, None]


def by_length(
    lengths: Sequence[int], batch_size: int, batch_tokens: int | None = None
) -> Iterator[list[int]]:
    """Batches of rows of similar length, the shortest first, so that little is padded.

    With `batch_tokens`, a batch has no more, padded to its longest row; a row that is longer is alone.
    """
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and not has_room(len(batch), lengths[row], batch_size, batch_tokens):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def has_room(num_rows: int, longest: int, batch_size: int, batch_tokens: int | None) -> bool:
    """Whether a batch of so many rows takes one more, if the longest of all then has `longest` tokens."""
    return num_rows < batch_size and (batch_tokens is None or (num_rows + 1) * longest <= batch_tokens)
