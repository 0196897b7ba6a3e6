"""Turn an item into token ids and resized pixels; the only place where prompts are built.

A prompt shows an item's content in its order, inside one user turn. Of pictures and then a text, the default profile makes the prompts
of the released RGE checkpoint: pictures, a newline, the text and a newline. The chat template, the expansion of picture placeholders and all token ids come from
the backbone's own processor.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Self, TypeVar

import torch
from jinja2 import TemplateError
from PIL import Image
from torch import Tensor

from rge.common.errors import UserError, shortened
from rge.common.images import ImageError, load_image, picture_size
from rge.common.parts import ImageRef, Part, PdfPart, VideoPart, with_text
from rge.common.prompt_profiles import EMB_TOKEN, PROFILES, Profile
from rge.common.schema import Item
from rge.content import visuals
from rge.content.config import VideoConfig
from rge.content.visuals import ClipSize, FittedRule, Size
from rge.model.families import family_of_processor

_TEXT = "\ufffc"
"""Placeholder of the text in a wording: Unicode's object replacement character."""

MAKE_ROOM = (
    "raise max_prompt_tokens or lower max_pixels (in a recipe: data.max_prompt_tokens, model.max_pixels)"
)

_MARK = re.compile(r"<\|[^|]+\|>")
"""What control tokens look like in most vocabularies."""

KNOWN_PROMPTS = 16_384
"""Texts whose token ids a builder caches; some 10 MB."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the backbone reads it, without padding."""

    id: str  # of the item
    input_ids: Tensor  # (T,) int64, ending with the assistant header: generation or ``<emb>`` comes next
    type_ids: Tensor  # (T,) int64, 1 on placeholders of pictures, 2 on those of clips, else 0
    position_3T: Tensor  # int64 rotary positions on the time, height and width axes
    # (P, channels, height, width) uint8 patches or tiles and (pictures, clips or tiles, 3) int64, see
    # `rge.model.families.Family.pictures_of`; None without pictures.
    pixels: Tensor | None
    image_grid: Tensor | None
    num_cut_tokens: int = 0  # of the user's text, cut to fit
    interval_G: Tensor | None = (
        None  # of clips, see `rge.model.families.Family.positions`; only where the prompt was made
    )

    def __len__(self) -> int:
        return self.input_ids.shape[0]


@dataclass(frozen=True, slots=True)
class Measured:
    """A prompt's size: all tokens, picture placeholders among them, and tokens of the user's text that were cut to fit."""

    num_tokens: int
    num_picture_tokens: int
    num_cut_tokens: int = 0
    num_pictures: int = 0  # pages and a clip's frames included
    # Squares of the picture tokens that one pass of a vision tower compares, added up: of a picture, and of frames that share patches.
    num_compared: int = 0

    def __len__(self) -> int:
        return self.num_tokens


def intervals_of(prompts: Sequence[Prompt]) -> Tensor | None:
    """The intervals of several prompts' pictures and clips together; None without clips."""
    if all(one.interval_G is None for one in prompts):
        return None
    shown = [(one.image_grid, one.interval_G) for one in prompts if one.image_grid is not None]
    return torch.cat([torch.zeros(len(grid)) if each is None else each for grid, each in shown])


@dataclass(frozen=True, slots=True)
class Cut:
    """A picture or clip as patches, see `Prompt.pixels`; without pixels, if these were handed over."""

    size: Size | ClipSize
    pixels: Sequence[Tensor]
    grid: Tensor  # (1, 3)

    @property
    def interval(self) -> float:
        """Seconds from one frame of a clip to the next."""
        if not isinstance(self.size, ClipSize):
            return 0.0
        seconds = self.size.seconds
        return (seconds[-1] - seconds[0]) / max(len(seconds) - 1, 1)


Shown = Image.Image | Cut
"""A scaled picture or clip: as patches, unless the family's processor needs a prompt's pictures together."""

P = TypeVar("P", Prompt, Measured)
V = TypeVar("V")

Pieces = list[str | V]
"""An item's content in order: texts, and its pictures and clips as pixels or as sizes."""

Layout = tuple[str | ClipSize | None, ...]
"""The texts of a prompt with their wording, and in their places None for a picture and a clip's size."""


def user_text(item: Item, side: str, profile: Profile) -> str:
    """The worded text of the user turn, without surrounding newlines; several texts as one."""
    text = (item.text or "").strip()
    if side == "query":
        if item.instruction:
            return profile.query.format(instruction=item.instruction.strip(), text=text).strip()
        return profile.query_without_instruction.format(text=text).strip()
    if side != "candidate":
        raise ValueError(f"side must be query or candidate, got {side!r}")
    if not item.is_visual:
        return profile.candidate_text.format(text=text).strip()
    if not text:
        return profile.candidate_image.strip()
    return profile.candidate_both.format(text=text).strip()


def wording(item: Item, side: str, profile: Profile) -> tuple[str, str]:
    """What a profile writes before an item's texts and after them; all of it is after, if there is none."""
    if not (item.text or "").strip():
        return "", user_text(item, side, profile)
    marked = replace(item, content=with_text(item.content, _TEXT))
    before, _, after = user_text(marked, side, profile).rpartition(_TEXT)
    return before, after


class PromptBuilder:
    """Turns items into prompts with one processor and one profile (or its name in `PROFILES`).

    `video` says which frames of a clip are shown, unless its part does. `emb_token` is the token whose state is the embedding; None for models that embed at their last token. Oracle rationales have at
    most `max_rationale_tokens`.

    Raises:
        UserError: unknown profile.
        ValueError: a tokenizer without ``<emb>``.
    """

    def __init__(
        self,
        processor,
        profile: str | Profile = "rge",
        max_tokens: int = 2048,
        emb_token: str | None = EMB_TOKEN,
        max_rationale_tokens: int | None = None,
        video: VideoConfig | None = None,
    ):
        self.processor = processor
        self.tokenizer, self.family = processor.tokenizer, family_of_processor(processor)
        self.profile = PROFILES[profile] if isinstance(profile, str) else profile
        self.max_tokens, self.max_rationale_tokens = max_tokens, max_rationale_tokens
        if emb_token is not None:
            self.emb_id = self.tokenizer.convert_tokens_to_ids(emb_token)
            if self.emb_id is None or self.emb_id == self.tokenizer.unk_token_id:
                raise ValueError(
                    f"the tokenizer has no {emb_token} token; rge.model.backbone.load_backbone(add_emb=True) adds it"
                )
        # `all_special_tokens` has only named ones: neither <emb> nor, on some tokenizers, the placeholders.
        added = self.tokenizer.added_tokens_decoder.values()
        # Somebody's tokenizer may not mark them as special.
        named = (getattr(processor, name, None) for name in ("image_token", "video_token"))
        marks = {mark for mark in named if isinstance(mark, str)}
        self._control_tokens = sorted(
            {token.content for token in added if token.special or _MARK.fullmatch(token.content)} | marks
        )
        self._image_id = self.family.placeholder_id(processor)
        self._clip_id = None
        if self.family.reads_clips and isinstance(mark := getattr(processor, "video_token", None), str):
            self._clip_id = self.tokenizer.convert_tokens_to_ids(mark)
        self.video = video or VideoConfig()
        self._options = self.family.options(processor.image_processor)
        self._known: dict[tuple, Tensor] = {}
        self._remember()

    def _remember(self) -> None:
        # Small sets, and candidates without a text, repeat them.
        remember = lru_cache(maxsize=KNOWN_PROMPTS)
        self._tokens_of_picture = remember(lambda size: self.family.picture_tokens(self.processor, size))
        self._tokens_of_text = remember(self._count_tokens)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not hasattr(value, "cache_info")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._remember()

    def but(self, profile: Profile, max_tokens: int | None = None, video: VideoConfig | None = None) -> Self:
        """A copy with another profile and, if given, another maximum length and other frames of clips."""
        other = copy(self)
        other.profile, other.max_tokens = profile, max_tokens or self.max_tokens
        other.video = video or self.video
        other._known = {}
        other._remember()
        return other

    def check_template(self) -> None:
        """Refuse a chat template that is missing, or that leaves out pictures or the text of a turn.

        Raises:
            UserError: see above.
        """
        of = f"the processor {getattr(self.tokenizer, 'name_or_path', '')}".rstrip()
        if self.processor.chat_template is None:
            raise UserError(
                "it has no chat template: add its family's as chat_template.jinja to its folder",
                of,
                kind="template",
            )
        square = Image.new("RGB", (64, 64))
        images = [self.family.scaled(square, self.processor.image_processor)] * 2
        try:
            renders = [self._render((None, None, text)) for text in ("a text", "another")]
            given = {"images": images, "return_tensors": "pt", **self._options}
            input_ids = self.processor(text=renders[:1], **given)["input_ids"]
            num_placeholders = int((input_ids == self._image_id).sum())
        except Exception as error:  # jinja's, or a processor's that misses placeholders
            raise UserError(
                f"its chat template cannot be used: {type(error).__name__}: {error}", of, kind="template"
            ) from error
        left_out = "pictures" if num_placeholders < 2 else "the text" if renders[0] == renders[1] else None
        if left_out:
            raise UserError(
                f"its chat template leaves out {left_out}: of a turn with two pictures and a text it makes "
                f"{shortened(repr(renders[0]))}. Use its family's, which reads a list of contents",
                of,
                kind="template",
            )

    def build(
        self,
        item: Item,
        side: str,
        load: Callable[[ImageRef], Image.Image] = load_image,
        keep: Callable[[Tensor], object] | None = None,
    ) -> Prompt:
        """Token ids and pictures of one prompt; `load` decodes a picture.

        `keep` gets the patches of one picture, page or frame after the other, and the prompt has none: a document is never in memory
        as a whole. Families whose pictures are cut together leave them in the prompt.

        A prompt over `max_tokens` loses only the end of the item's last text: cutting the ids would remove the assistant header, or a
        picture's placeholders.

        Raises:
            UserError: an empty item, or one that is too long even without its last text.
            ImageError: a picture cannot be read.
        """
        return self.build_scaled(item, side, self.scaled(item, load, keep))

    def scaled(
        self,
        item: Item,
        load: Callable[[ImageRef], Image.Image] = load_image,
        keep: Callable[[Tensor], object] | None = None,
    ) -> Pieces[Shown]:
        """An item's content for `build_scaled`; `keep` as in `build`. One picture or frame at a time is held at its full size."""
        if files := tuple(part for part in item.content if isinstance(part, PdfPart | VideoPart)):
            # Thousands of pages are not rendered to find that there is no room for them.
            with _of_pictures(item.id):
                needed = sum(map(self._tokens_of, self._sizes(replace(item, content=files))))
            if needed > self.max_tokens:
                raise UserError(
                    f"its pages and frames take {needed:,} tokens, more than max_prompt_tokens={self.max_tokens}; show fewer, "
                    f"or {MAKE_ROOM}",
                    place=f"item {item.id!r}",
                ).about("max_prompt_tokens")

        image_processor = self.processor.image_processor

        def cut(image: Image.Image, pixels: list[Tensor]) -> Tensor | None:
            """The grid of a picture whose patches are kept or added to `pixels`."""
            with _of_pictures(item.id):
                found = self.family.cut(image, image_processor)
            if found is None:
                return None
            (pixels.append if keep is None else keep)(found[0])
            return found[1]

        def scaled(part: Part) -> Iterator[Shown]:
            pixels: list[Tensor]
            if isinstance(part, VideoPart):
                self.family.check_clips(self.processor)
                pixels, seconds, size = [], [], (0, 0)
                sides: Tensor | None = None
                for frame, time in visuals.frames(part, self.rule):
                    sides, size = cut(frame, pixels), frame.size
                    seconds.append(time)
                    del frame
                assert sides is not None, "a family that reads clips cuts pictures alone"
                whole = torch.tensor([[len(seconds), *sides[0, 1:].tolist()]])
                yield Cut(ClipSize(size, tuple(seconds)), pixels, whole)
                return
            for visual in visuals.shown(part, self.rule, load):
                assert isinstance(visual, Image.Image)
                with _of_pictures(item.id):
                    small = self.family.scaled(visual, image_processor)
                del visual
                pixels = []
                grid = cut(small, pixels)
                yield small if grid is None else Cut(small.size, pixels, grid)

        return self._pieces(item, scaled)

    def build_scaled(self, item: Item, side: str, pieces: Pieces[Shown]) -> Prompt:
        """`build`, after `scaled`."""
        images = [piece for piece in pieces if not isinstance(piece, str)]
        sizes = [image.size for image in images]
        return self._fitted(item, side, pieces, sizes, partial(self._encode, item.id, images))

    @property
    def rule(self) -> FittedRule:
        """The rule of clips, whose frames have sizes that the model reads."""

        def fit(size: Size, most: int) -> Size:
            return self.family.clip_size(size, most, self.processor.image_processor)

        step = self.processor.image_processor.temporal_patch_size if self.family.reads_clips else 1
        return FittedRule(**vars(self.video), multiple=step, fit=fit)

    def _sizes(self, item: Item, size_of: Callable[[ImageRef], Size] = picture_size) -> list[Size | ClipSize]:
        found = self._pieces(item, lambda part: visuals.sizes(part, self.rule, size_of))
        return [piece for piece in found if not isinstance(piece, str)]

    def _tokens_of(self, size: Size | ClipSize) -> int:
        if isinstance(size, ClipSize):
            return self.family.clip_text(self.processor, size).count(self.processor.video_token)
        return self._tokens_of_picture(size)

    def _num_times(self, size: Size | ClipSize) -> int:
        """Frames that share patches count once."""
        return -(-len(size.seconds) // self.rule.multiple) if isinstance(size, ClipSize) else 1

    def measure(self, item: Item, side: str, size_of: Callable[[ImageRef], Size] = picture_size) -> Measured:
        """The size of `build`'s prompt; `size_of` gives a picture's width and height. Errors as there."""
        pieces = self._pieces(item, lambda part: visuals.sizes(part, self.rule, size_of))
        sizes = [piece for piece in pieces if not isinstance(piece, str)]
        pictures = [size for size in sizes if not isinstance(size, ClipSize)]
        num_pictures = sum(len(size.seconds) if isinstance(size, ClipSize) else 1 for size in sizes)
        with _of_pictures(item.id):
            for_pictures, all_visuals = sum(map(self._tokens_of, pictures)), sum(map(self._tokens_of, sizes))
            compared = sum(self._tokens_of(size) ** 2 // self._num_times(size) for size in sizes)

        def counted(layout: Layout, num_cut: int) -> Measured:
            num_tokens = self._tokens_of_text(layout) - len(pictures) + for_pictures
            return Measured(num_tokens, all_visuals, num_cut, num_pictures, compared)

        return self._fitted(item, side, pieces, sizes, counted)

    def _pieces(self, item: Item, shown: Callable[[Part], Iterator[V]]) -> Pieces[V]:
        """See `rge.content.visuals.pieces`."""
        if self._clip_id is None and any(isinstance(part, VideoPart) for part in item.content):
            raise UserError(
                f"it has a video, and models of the family {type(self.family).__name__} read none: give pictures of it, or use a "
                "model that reads videos",
                place=f"item {item.id!r}",
                kind="video",
            )
        return visuals.pieces(item.content, shown)

    def _fitted(
        self,
        item: Item,
        side: str,
        pieces: Pieces[Any],
        sizes: Sequence[Size | ClipSize],
        encode: Callable[[Layout, int], P],
    ) -> P:
        """A prompt within `max_tokens`: `encode` gets less of the last text, and how many of its tokens are missing, until it fits."""
        layout, last, after = self._laid_out(item, side, pieces)
        # A benchmark's candidate may be empty; its wording alone is embedded. A query's instruction asks nothing.
        has_own = len(sizes) < len(pieces) if side == "query" else bool(layout[last])
        if not sizes and not has_own:
            raise UserError("it has neither text nor images", place=f"item {item.id!r}")
        prompt = encode(layout, 0)
        if len(prompt) <= self.max_tokens:  # first, since the rest takes time
            return prompt

        around: tuple[Layout, Layout] = layout[:last], layout[last + 1 :]

        def shorter(part: str, num_cut: int) -> P:
            return encode((*around[0], part + after, *around[1]), num_cut)

        def too_long() -> UserError:
            rest = "pictures and template" if len(layout) - len(sizes) == 1 else "other parts and template"
            room = f"max_prompt_tokens={self.max_tokens} ({self._pictures(sizes)}); {MAKE_ROOM}"
            error = UserError(f"{rest} alone exceed {room}", place=f"item {item.id!r}")
            return error.about("max_prompt_tokens")

        text = str(layout[last]).removesuffix(after)
        return self._shortened(prompt, text, shorter, self.max_tokens, too_long)

    def _laid_out(self, item: Item, side: str, pieces: Pieces[Any]) -> tuple[Layout, int, str]:
        """The layout of a prompt, the place of its last text, and the wording at that text's end.

        The wording surrounds the whole text: it begins before the first piece and ends after the last. Without a text, it stands at
        the end.
        """
        layout = [_laid(piece) for piece in pieces]
        places = [place for place, piece in enumerate(layout) if isinstance(piece, str)]
        before, after = wording(item, side, self.profile)
        if not places:
            return (*layout, self._plain(after)), len(layout), ""
        first, last = places[0], places[-1]
        layout[first] = before + str(layout[first])
        layout[last] = str(layout[last]) + after
        worded = (self._plain(piece) if isinstance(piece, str) else piece for piece in layout)
        return tuple(worded), last, self._plain(after)

    def _shortened(
        self,
        prompt: P,
        text: str,
        encode: Callable[[str, int], P],
        max_tokens: int,
        too_long: Callable[[], UserError],
    ) -> P:
        """`prompt` if it fits, else `encode` of as much of its text as does."""
        if len(prompt) <= max_tokens:
            return prompt
        text_ids = self.tokenizer(text, add_special_tokens=False).input_ids
        kept = len(text_ids)
        # Decoding a prefix of the ids and encoding it again may give other ids, a few more than before, hence a loop.
        while (excess := len(prompt) - max_tokens) > 0:
            if kept == 0:
                raise too_long()
            kept = max(0, kept - excess)
            # A cut inside a character of several tokens decodes to a replacement character.
            prompt = encode(self.tokenizer.decode(text_ids[:kept]).rstrip("\ufffd"), len(text_ids) - kept)
        return prompt

    def _pictures(self, sizes: Sequence[Size | ClipSize]) -> str:
        plural = "s" * (len(sizes) != 1)
        kind = "picture" if not any(isinstance(size, ClipSize) for size in sizes) else "picture or clip"
        return f"{len(sizes)} {kind}{plural}, {sum(map(self._tokens_of, sizes))} tokens"

    def build_pairs(
        self, first: Item, seconds: Sequence[Item], *, wording: tuple[str, str, str]
    ) -> tuple[Prompt, list[Prompt]]:
        """Prompts that show one item and then another, as their common beginning and what follows it in each.

        `wording` stands before the first item's first text, after the first item, and after the second. The end of a second
        item's last text is cut where a prompt would exceed `max_tokens`.

        Returns:
            The beginning, and for each second item the rest, with its positions in the whole prompt.

        Raises:
            UserError: a prompt is too long even without the second item's text, or the chat template reorders its parts.
            ImageError: a picture cannot be read.
        """
        before, between, after = wording
        shown = self.scaled(first)
        opening = self._around(shown, before, between)
        marked = self._turn(_contents((*opening[:-1], f"{opening[-1]}{_TEXT}")))
        rendered = marked.rpartition(_TEXT)[0]
        head = self._whole(first.id, rendered, shown, opening, 0)
        rests = []
        for second in seconds:
            own = self.scaled(second)
            texts = [place for place, piece in enumerate(own) if isinstance(piece, str)]
            last = texts[-1] if texts else len(own)

            def rest(
                text: str, num_cut: int, second: Item = second, own: Pieces[Any] = own, last: int = last
            ) -> Prompt:
                shown = [*own[:last], *filter(None, [text]), *own[last + 1 :]]
                layout = self._around(shown, "", f"\n{after}")
                whole = (*opening, *layout)
                if isinstance(layout[0], str):
                    whole = (*opening[:-1], f"{opening[-1]}{layout[0]}", *layout[1:])
                turn = self._turn(_contents(whole))
                if not turn.startswith(rendered):
                    raise UserError(
                        "the model's chat template changes the order of pictures and texts: use another judge"
                    )
                return self._continued(head, second.id, turn[len(rendered) :], shown, layout, num_cut)

            def too_long(second: Item = second) -> UserError:
                return UserError(
                    f"item {second.id!r} does not fit behind {first.id!r} in {self.max_tokens} tokens, even without its "
                    "text: limit the pictures' size, or shorten the first"
                )

            text = self._plain(str(own[last])) if texts else ""
            most = self.max_tokens - len(head)
            rests.append(self._shortened(rest(text, 0), text, rest, most, too_long))
        return head, rests

    def _around(self, shown: Pieces[Any], before: str, after: str) -> Layout:
        """The layout of an item among others, with words around it; a text before a picture is a line of its own."""
        *others, last = map(_laid, visuals.surrounded(shown, before, after))
        lines = (f"{self._plain(one)}\n" if isinstance(one, str) else one for one in others)
        return (*lines, self._plain(str(last)))

    def _continued(
        self, head: Prompt, name: str, rendered: str, shown: Pieces[Any], layout: Layout, num_cut: int
    ) -> Prompt:
        """What follows a prompt, at its positions after it."""
        alone = self._whole(name, rendered, shown, layout, num_cut, add_special_tokens=False)
        both = [one for one in (head, alone) if one.image_grid is not None]
        position_3T = self.family.positions(
            self.processor.image_processor,
            torch.cat([head.input_ids, alone.input_ids]),
            torch.cat([head.type_ids, alone.type_ids]),
            torch.cat([one.image_grid for one in both]) if both else None,  # type: ignore[misc]
            intervals_of(both),
        )
        return replace(alone, position_3T=position_3T[:, len(head) :])

    def rationale_ids(self, rationale: str, record_id: str) -> list[int]:
        """Token ids of an oracle rationale and its ``<emb>``; ValueError if it is empty, too long, or contains ``<emb>``."""
        text = rationale.strip()
        if not text:
            raise ValueError(f"record {record_id!r} has an empty rationale")
        if EMB_TOKEN in text:
            raise ValueError(
                f"record {record_id!r}: the rationale contains {EMB_TOKEN}, which the trainer appends itself"
            )
        ids = self.tokenizer(self._plain(text), add_special_tokens=False).input_ids
        if self.max_rationale_tokens is not None and len(ids) > self.max_rationale_tokens:
            raise ValueError(
                f"record {record_id!r}: the rationale has {len(ids)} tokens, more than "
                f"data.max_rationale_tokens={self.max_rationale_tokens}; shorten it or raise that"
            )
        return [*ids, self.emb_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def _render(self, layout: Layout) -> str:
        """The prompt as a string with one placeholder per picture or clip; other models' adapters override it."""
        return self._turn(_contents([f"{one}\n" if isinstance(one, str) else one for one in layout]))

    def _with_clips(self, rendered: str, layout: Layout) -> str:
        """A rendered prompt in which clips have all their placeholders, with their times."""
        clips = [self.family.clip_text(self.processor, one) for one in layout if isinstance(one, ClipSize)]
        return _filled(rendered, self.processor.video_token, clips) if clips else rendered

    def _count_tokens(self, layout: Layout) -> int:
        """Tokens of a prompt in which each picture is one placeholder with the processor's text around it."""
        mark = self.family.picture_mark(self.processor)
        rendered = self._with_clips(self._render(layout), layout).replace(self.processor.image_token, mark)
        return len(self.tokenizer(rendered).input_ids)

    def _turn(self, content: list[dict[str, str]]) -> str:
        return rendered_turn(self.processor, content)

    def _encode(self, name: str, shown: Sequence[Shown], layout: Layout, num_cut: int) -> Prompt:
        cuts = [one for one in shown if isinstance(one, Cut)]
        if len(cuts) < len(shown) or any(isinstance(one.size, ClipSize) for one in cuts):
            return self._whole(name, self._render(layout), shown, layout, num_cut)
        # Rendering and tokenising depend only on the texts and the pictures' sizes. Candidates without a text, and
        # small sets, repeat them; clips hardly do, since their times differ.
        key = (layout, *(one.size for one in cuts))
        input_ids = self._known.get(key)
        if input_ids is None:
            input_ids = self._tokens(self._render(layout), layout, cuts)
            if len(self._known) >= KNOWN_PROMPTS:
                self._known.clear()
            self._known[key] = input_ids
        return self._prompt(name, input_ids, cuts, num_cut)

    def _whole(
        self,
        name: str,
        rendered: str,
        shown: Sequence[str | Shown],
        layout: Layout,
        num_cut: int,
        **more: Any,
    ) -> Prompt:
        """A rendered prompt and what it shows."""
        visuals = [piece for piece in shown if not isinstance(piece, str)]
        cuts = [one for one in visuals if isinstance(one, Cut)]
        if len(cuts) < len(visuals):
            return self._processed(name, rendered, visuals, num_cut, **more)
        return self._prompt(name, self._tokens(rendered, layout, cuts, **more), cuts, num_cut)

    def _tokens(self, rendered: str, layout: Layout, cuts: Sequence[Cut], **more: Any) -> Tensor:
        """Ids of a rendered prompt, with the placeholders of pictures and clips written like the processor's."""
        rendered = self._with_clips(rendered, layout)
        mark = self.processor.image_token
        # By their own sides: a scaled picture of unusual shape would be scaled once more.
        pictures = [
            mark * self.family.scaled_tokens(self.processor, one.size)
            for one in cuts
            if not isinstance(one.size, ClipSize)
        ]
        if pictures:
            rendered = _filled(rendered, mark, pictures)
        return self.tokenizer(rendered, return_tensors="pt", **more).input_ids[0]

    def _processed(
        self, name: str, rendered: str, images: Sequence[Any], num_cut: int, **more: Any
    ) -> Prompt:
        """A rendered prompt whose pictures the processor cuts together."""
        given = {"images": list(images) or None, "return_tensors": "pt", **self._options, **more}
        with _of_pictures(name):
            fields = self.processor(text=[rendered], **given)
        pixels, grid = self.family.pictures_of(fields, self.processor.image_processor)
        return self._positioned(name, fields["input_ids"][0], pixels, grid, None, num_cut)

    def _prompt(self, name: str, input_ids: Tensor, cuts: Sequence[Cut], num_cut: int) -> Prompt:
        pixels = [part for one in cuts for part in one.pixels]
        interval_G = None
        if any(isinstance(one.size, ClipSize) for one in cuts):
            step = self.processor.image_processor.temporal_patch_size
            per_second = getattr(self.processor, "rge_tokens_per_second", 1)
            interval_G = torch.tensor([one.interval * step for one in cuts], dtype=torch.float64) * per_second
        return self._positioned(
            name,
            input_ids,
            pixels[0] if len(pixels) == 1 else torch.cat(pixels) if pixels else None,
            torch.cat([one.grid for one in cuts]) if cuts else None,
            interval_G,
            num_cut,
        )

    def _positioned(
        self,
        name: str,
        input_ids: Tensor,
        pixels: Tensor | None,
        image_grid: Tensor | None,
        interval_G: Tensor | None,
        num_cut: int,
    ) -> Prompt:
        image_processor = self.processor.image_processor
        type_ids = (input_ids == self._image_id).long()
        if self._clip_id is not None:
            type_ids += 2 * (input_ids == self._clip_id)
        return Prompt(
            id=name,
            input_ids=input_ids,
            type_ids=type_ids,
            position_3T=self.family.positions(image_processor, input_ids, type_ids, image_grid, interval_G),
            pixels=pixels,
            image_grid=image_grid,
            num_cut_tokens=num_cut,
            interval_G=interval_G,
        )

    def _plain(self, text: str) -> str:
        # A picture placeholder or a turn marker in the data must not become a control token. A (zero-width) word joiner inside
        # keeps it readable.
        try:
            text.encode()
        except UnicodeEncodeError as error:
            place = ascii(text[max(0, error.start - 20) : error.start + 20])
            raise UserError(f"the text {place} contains half a character (a lone surrogate)") from None
        for token in self._control_tokens:
            if token in text:
                text = text.replace(token, token[:1] + "\u2060" + token[1:])
        return text


def _filled(rendered: str, mark: str, instead: Sequence[str]) -> str:
    """A rendered prompt with something in place of each of its marks."""
    start, *rest = rendered.split(mark)
    if len(rest) != len(instead):
        raise UserError(
            f"the model's chat template shows {len(rest)} of {len(instead)} parts as {mark}: use its family's"
        )
    return start + "".join(map("".join, zip(instead, rest, strict=True)))


def _contents(layout: Sequence[str | ClipSize | None]) -> list[dict[str, str]]:
    """A layout as a chat template takes it; a text begins a line after a picture or clip."""
    content = []
    for previous, piece in zip(("", *layout), layout, strict=False):
        newline = "" if isinstance(previous, str) else "\n"
        text = {"type": "text", "text": f"{newline}{piece}"}
        content.append(text if isinstance(piece, str) else {"type": "image" if piece is None else "video"})
    return content


def _laid(piece: str | Shown | Size | ClipSize) -> str | ClipSize | None:
    if isinstance(piece, Cut):
        return _laid(piece.size)
    return piece if isinstance(piece, str | ClipSize) else None


@contextmanager
def _of_pictures(name: str) -> Iterator[None]:
    """Report the processor's errors, such as a side 200 times as long as the other, as errors of the item's pictures."""
    try:
        yield
    except UserError:  # such as a family that reads no videos
        raise
    except ValueError as error:
        raise ImageError(f"it cannot be processed: {error}", f"of item {name!r}", kind="processed") from error


def rendered_turn(processor: Any, content: Sequence[Mapping[str, str]]) -> str:
    """A user's turn, and the assistant's header, by a processor's chat template. Raises `UserError`: the template fails."""
    try:
        return processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise UserError(
            f"the model's chat template cannot be used: {error} ({type(error).__name__}). It runs in a sandbox, which refuses code "
            "that could reach the system: use the template that the model was published with",
            kind="template",
        ) from None
