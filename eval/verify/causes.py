"""Why a route gives other embeddings: a closed set of causes, each of which is tried.

A cause is a departure from the recipe of `eval.verify.plain`. The one whose embeddings are nearest to the route's explains it, if it
takes away nearly all of the distance.

Shape suffixes: N = items, D = embedding size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from eval.verify.plain import Departure, PlainModel, with_instruction
from rge.common.parts import content_of, is_short
from rge.common.schema import Item
from rge.inference import Side

MOST_ROWS = 4
"""Rows that causes are tried on: those that differ most."""
TAKES_AWAY = 0.1
"""A cause leaves at most this share of the distance (one minus cosine)."""
ROUNDING = 1e-6
"""A distance of unit vectors that rounding explains."""
SIZES = (0.25, 0.5, 2.0, 4.0, 16.0)
"""Factors of the pictures' limits that are tried."""
LENGTHS = (4096, 2048, 1024, 512, 256, 128, 64, 32)
"""Lengths in tokens at which a route may cut a prompt."""
OTHER_WEIGHTS = "other weights"


@dataclass(frozen=True)
class Cause:
    """What explains a route's embeddings, in words, with how near the explanation comes."""

    name: str
    detail: str = ""
    cosine: float | None = None  # smallest, of the explanation with the route

    def __str__(self) -> str:
        return f"{self.name}{f': {self.detail}' if self.detail else ''}"


def departures(
    plain: PlainModel, items: Sequence[Item], side: Side, longest: int
) -> Iterator[tuple[str, str, Departure]]:
    """Every known departure that changes something of these items: its name, a detail, and what is done.

    ``longest``: tokens of the longest prompt in the route's batch.
    """
    tokenizer = plain.embedder.builder.tokenizer
    yield "state before the final norm", "", Departure(before_norm=True)
    tail = _assistant_header(plain)
    yield "assistant header missing", repr(tokenizer.decode(tail)), Departure(ids=_without_tail(tail))
    newline = tokenizer("\n", add_special_tokens=False).input_ids
    if tail[-len(newline) :] == newline:
        yield "newline after the assistant header missing", "", Departure(ids=_without_tail(newline))
    yield "<emb> missing", "state at the token before it", Departure(ids=lambda ids, _: ids[:-1])
    yield (
        "<emb> not at the end",
        "the state is read one token later",
        Departure(ids=lambda ids, encode: [*ids, *_end_of_turn(plain, encode)]),
    )
    if side == "query":
        yield from _of_queries(plain, items)
    else:
        default = plain.embedder.default_instruction
        yield (
            "candidate worded as a query",
            repr(default) if default else "",
            Departure(item=lambda item, _: (replace(item, instruction=default), "query")),
        )
    if any(item.pictures for item in items):
        for factor in SIZES:
            detail = _tokens(plain, items, side, factor)
            if detail:
                yield "resolution limits", detail, Departure(pixels=factor)
        yield "channel order", "blue, green, red", Departure(picture=_swapped)
        yield "text before the pictures", "", Departure(item=_text_first)
    for length in LENGTHS:
        if length < longest:
            yield "truncation", f"to {length} tokens", Departure(ids=_cut(length))
    full = longest + 1  # and <emb>
    yield "padding side", "padding on the left is attended to", Departure(pads=(full, "left"))
    yield "padding side", "the state is that of padding on the right", Departure(pads=(full, "right"))
    for dtype in (torch.bfloat16, torch.float16):
        yield "dtype", str(dtype).removeprefix("torch."), Departure(dtype=dtype)


def explain(
    plain: PlainModel,
    items: Sequence[Item],
    side: Side,
    after: Sequence[Sequence[int]],
    reference_ND: np.ndarray,
    found_ND: np.ndarray,
) -> Cause:
    """The cause that explains best why a route's embeddings (N, D) are not the reference's.

    ``after``: ids of the rationales, as for `PlainModel.embed`. Without an explanation: `OTHER_WEIGHTS`.
    """
    norm_N = np.linalg.norm(found_ND, axis=1, keepdims=True)
    found_ND = found_ND / norm_N
    distance_N = 1 - (reference_ND * found_ND).sum(axis=1)
    if distance_N.max() < ROUNDING:
        return Cause("not normalised", f"lengths from {norm_N.min():.3g} to {norm_N.max():.3g}")
    rows = [
        row
        for row in np.argsort(-distance_N, kind="stable")[:MOST_ROWS].tolist()
        if distance_N[row] >= ROUNDING
    ]
    chosen, after_chosen = [items[row] for row in rows], [after[row] for row in rows]
    longest = max(len(plain.prompt(item, side)) + len(ids) for item, ids in zip(items, after, strict=True))
    tried: list[Cause] = []
    for name, detail, how in departures(plain, chosen, side, longest):
        try:
            by_cause_ND = plain.embed(chosen, side, after_chosen, how)
        except (ValueError, RuntimeError):  # pictures that do not fit, or placeholders that were cut
            continue
        cosine_N = (by_cause_ND * found_ND[rows]).sum(axis=1)
        left = float(((1 - cosine_N) / distance_N[rows]).max())
        if left <= TAKES_AWAY:
            tried.append(Cause(name, detail, float(cosine_N.min())))
    if not tried:
        return Cause(OTHER_WEIGHTS, "no other known cause explains it")
    return max(tried, key=lambda cause: cause.cosine or -1.0)


def _of_queries(plain: PlainModel, items: Sequence[Item]) -> Iterator[tuple[str, str, Departure]]:
    if any(item.instruction for item in items):
        yield "instruction missing", "", Departure(item=lambda item, side: with_instruction(item, side, None))
        yield (
            "instruction doubled",
            "",
            Departure(
                item=lambda item, side: with_instruction(item, side, f"{item.instruction} {item.instruction}")
            ),
        )
    elif default := plain.embedder.default_instruction:
        yield (
            "instruction added",
            repr(default),
            Departure(item=lambda item, side: with_instruction(item, side, default)),
        )
    yield "query worded as a candidate", "", Departure(item=lambda item, _: (item, "candidate"))


def _assistant_header(plain: PlainModel) -> list[int]:
    """The ids that the chat template adds for the answer."""
    processor: Any = plain.embedder.builder.processor
    turn = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    without = processor.apply_chat_template(turn, add_generation_prompt=False)
    whole = processor.apply_chat_template(turn, add_generation_prompt=True)
    return list(processor.tokenizer(whole[len(without) :], add_special_tokens=False).input_ids)


def _without_tail(tail: Sequence[int]) -> Callable[[list[int], Any], list[int]]:
    """Leave out the last occurrence of these ids, which a rationale may follow."""

    def left_out(ids: list[int], _: Any) -> list[int]:
        for start in range(len(ids) - len(tail), -1, -1):
            if ids[start : start + len(tail)] == list(tail):
                return ids[:start] + ids[start + len(tail) :]
        return ids

    return left_out


def _end_of_turn(plain: PlainModel, encode: Callable[[str], list[int]]) -> list[int]:
    end = plain.embedder.builder.tokenizer.eos_token
    return encode(end) if end else encode("\n")


def _swapped(picture: Image.Image) -> Image.Image:
    red, green, blue = picture.convert("RGB").split()
    return Image.merge("RGB", (blue, green, red))


def _text_first(item: Item, side: Side) -> tuple[Item, Side]:
    if not (item.text or "").strip() or not item.pictures or not is_short(item.content):
        return item, side
    return replace(item, content=(*content_of(item.text), *content_of(None, item.pictures))), side


def _cut(length: int) -> Callable[[list[int], Any], list[int]]:
    """The first ids of a row, and its ``<emb>``."""
    return lambda ids, _: ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]


def _tokens(plain: PlainModel, items: Sequence[Item], side: Side, factor: float) -> str:
    """How many tokens a picture takes with these limits, if that differs."""
    item = next(item for item in items if item.pictures)
    image = plain.embedder.builder
    ours, theirs = (
        int((plain.prompt(item, side, Departure(pixels=one)).input_ids == image._image_id).sum())
        for one in (1.0, factor)
    )
    if ours == theirs:
        return ""
    return f"{theirs / len(item.pictures):g} tokens a picture instead of {ours / len(item.pictures):g}"
