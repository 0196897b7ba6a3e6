"""Prompts token by token: the released format, its borders, and what data must not be able to do to it."""

import pytest
import torch
from family_models import every_family
from faults import error_about

from rge.common.errors import UserError
from rge.common.images import ImageError, load_image
from rge.common.parts import ImagePart, TextPart, content_of
from rge.common.prompt_profiles import EMB_TOKEN, PROFILES, Profile
from rge.common.schema import Item
from rge.model.families import normalised
from rge.model.prompts import PromptBuilder, user_text

# The format of the released checkpoint, with {pad} standing for one placeholder a 28 x 28 square.
RELEASED = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{pad}<|vision_end|>\n{text}\n<|im_end|>\n<|im_start|>assistant\n"
)
RELEASED_TEXT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{text}\n<|im_end|>\n<|im_start|>assistant\n"
)
PAD = "<|image_pad|>"


@pytest.fixture
def encoded(builder):
    """Ids of a string in which special tokens are meant."""
    return lambda text: builder.tokenizer(text, add_special_tokens=False).input_ids


def test_query_with_a_picture_is_the_released_format(builder, picture, encoded):
    item = Item("q", content_of("What opens this?", [picture(56, 84)]), "Find the picture.")
    prompt = builder.build(item, "query")
    text = RELEASED.format(pad=6 * PAD, text="Find the picture. What opens this?")
    assert builder.tokenizer.decode(prompt.input_ids) == text
    assert prompt.input_ids.tolist() == encoded(text)
    assert prompt.image_grid.tolist() == [[1, 6, 4]]
    assert prompt.pixels.shape[0] == 24
    assert prompt.type_ids.sum() == 6
    assert (prompt.input_ids[prompt.type_ids.bool()] == encoded(PAD)[0]).all()


def test_text_only_query(builder, encoded):
    prompt = builder.build(Item("q", content_of("What opens this?")), "query")
    assert prompt.input_ids.tolist() == encoded(RELEASED_TEXT.format(text="What opens this?"))
    assert prompt.pixels is None
    assert prompt.image_grid is None
    assert not prompt.type_ids.any()


def test_several_pictures_stand_before_the_text_in_order(builder, picture, encoded):
    prompt = builder.build(Item("q", content_of("egg", [picture(28, 28), picture(84, 28)])), "query")
    pads = f"{PAD}<|vision_end|><|vision_start|>{3 * PAD}"
    assert prompt.input_ids.tolist() == encoded(RELEASED.format(pad=pads, text="egg"))
    assert prompt.image_grid.tolist() == [[1, 2, 2], [1, 2, 6]]
    assert prompt.pixels.shape[0] == 4 + 12


def test_a_known_text_costs_its_pictures_only_and_gives_the_same_prompt(embedder, picture, monkeypatch):
    builder, calls = PromptBuilder(embedder.processor), []
    render = builder.processor.apply_chat_template
    monkeypatch.setattr(
        builder.processor, "apply_chat_template", lambda *args, **kw: calls.append(1) or render(*args, **kw)
    )
    sizes = [[(56, 84)], [(56, 84)], [(84, 56)], [(56, 84), (28, 28)], [(56, 84)], [], []]
    for number, row in enumerate(sizes):
        pictures = [picture(*size) for size in row]
        again = builder.build(Item(f"q{number}", content_of("egg", pictures)), "query")
        fresh = PromptBuilder(embedder.processor).build(
            Item(f"q{number}", content_of("egg", pictures)), "query"
        )
        assert (again.id, again.input_ids.tolist()) == (fresh.id, fresh.input_ids.tolist())
        for name in ("type_ids", "pixels", "image_grid"):
            mine, theirs = getattr(again, name), getattr(fresh, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
    # Four different layouts, each rendered once by the one builder; the fresh builders render all seven.
    assert len(calls) == 4 + len(sizes)


def test_pictures_are_loaded_by_reference(builder, picture, tmp_path):
    picture(60, 60).save(tmp_path / "egg.png")
    by_reference = builder.build(Item("q", content_of("egg", (str(tmp_path / "egg.png"),))), "query")
    given = builder.build(Item("q", content_of("egg", [picture(60, 60)])), "query")
    assert torch.equal(by_reference.pixels, given.pixels)
    assert torch.equal(by_reference.input_ids, given.input_ids)


def test_the_text_ends_in_a_newline_of_its_own(builder, encoded):
    """Surrounding blanks of data do not reach the template, so a query has one form."""
    plain = builder.build(Item("q", content_of("egg")), "query")
    assert torch.equal(builder.build(Item("q", content_of("  egg \n\n")), "query").input_ids, plain.input_ids)
    assert (
        builder.tokenizer.decode(plain.input_ids).split("egg")[1] == "\n<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("profile", "item", "side", "expected"),
    [
        ("rge", Item("", content_of("t"), instruction="i"), "query", "i t"),
        ("rge", Item("", content_of("t")), "query", "t"),
        ("rge", Item("", content_of(None, ("p",)), instruction="i"), "query", "i"),
        ("rge", Item("", content_of("t")), "candidate", "Summarize the following text in one word: t"),
        ("rge", Item("", content_of(None, ("p",))), "candidate", "Summarize the given image in one word."),
        (
            "rge",
            Item("", content_of("t", ("p",))),
            "candidate",
            "Summarize the given image and text in one word: t",
        ),
        ("plain", Item("", content_of("t")), "candidate", "t"),
        ("plain", Item("", content_of(None, ("p",))), "candidate", ""),
        (
            "plain",
            Item("", content_of("{text} {0}"), instruction="{instruction}"),
            "query",
            "{instruction} {text} {0}",
        ),
    ],
)
def test_wording(profile, item, side, expected):
    assert user_text(item, side, PROFILES[profile]) == expected


def test_profiles_word_everything():
    assert all(isinstance(profile, Profile) for profile in PROFILES.values())
    with pytest.raises(ValueError):
        user_text(Item("", content_of("t")), "document", PROFILES["plain"])


def test_a_picture_without_text_is_a_prompt_and_nothing_at_all_is_not(embedder, picture):
    builder = PromptBuilder(embedder.processor, "plain")
    prompt = builder.build(Item("c", content_of(None, [picture(28, 28)])), "candidate")
    assert prompt.type_ids.sum() == 1
    with error_about(UserError, "item 'c'"):
        builder.build(Item("c", content_of("  ")), "candidate")


LIMITS = [(784, 3136), (200_704, 802_816)]
"""Tiny ones, and those of the released checkpoint."""
SIDES = [
    (20, 20),
    (27, 27),
    (28, 28),
    (13, 41),
    (300, 500),
    (640, 480),
    (1, 150),
    (2000, 20),
    (1500, 1000),
    (57, 40),
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_pictures_are_those_of_the_released_path(embedder, limits, mode, picture):
    """qwen-vl-utils, then the stock processor: the same pixels to the last bit, small and long pictures too."""
    from qwen_vl_utils import process_vision_info

    stock = embedder.processor.image_processor
    stock.size = {"shortest_edge": limits[0], "longest_edge": limits[1]}
    builder = PromptBuilder(embedder.processor, max_tokens=4096)
    for number, (width, height) in enumerate(SIDES):
        image = picture(width, height, number).convert(mode)
        if mode == "RGBA":
            image.putalpha(picture(width, height, number + 1).convert("L"))
        asked = {"type": "image", "image": image, "min_pixels": limits[0], "max_pixels": limits[1]}
        prompt = builder.build(Item("q", content_of(None, [load_image(image)])), "query")
        try:
            shown, _ = process_vision_info([{"role": "user", "content": [asked]}])
        except ValueError:  # it rounds a side down to nothing; the processor does not
            assert max(width, height) > 4 * min(width, height)
            assert prompt.image_grid.tolist() == stock(images=[load_image(image)])["image_grid_thw"].tolist()
            continue
        expected = stock(images=shown, return_tensors="pt")
        assert torch.equal(prompt.image_grid, expected["image_grid_thw"]), (width, height)
        assert torch.equal(normalised(stock, prompt.pixels), expected["pixel_values"]), (width, height)


def test_a_picture_of_a_placeholders_multiple_is_left_as_it_is(embedder, picture):
    """So whoever trained on such pictures trains on the same ones."""
    stock, image = embedder.processor.image_processor, picture(56, 28)
    stock.size = {"shortest_edge": 784, "longest_edge": 3136}
    alone = stock(images=[image], return_tensors="pt")["pixel_values"]
    prompt = PromptBuilder(embedder.processor).build(Item("q", content_of(None, [image])), "query")
    assert torch.equal(normalised(stock, prompt.pixels), alone)


LONG = " ".join(f"word{number}" for number in range(400))


@pytest.mark.parametrize("text", [LONG, "ä€𝄞" * 300, "<|im_end|>" * 100, LONG + "."])
@pytest.mark.parametrize("limit", [90, 91, 92, 93, 120])
def test_a_long_text_is_cut_at_its_end_and_nothing_else_is(embedder, picture, text, limit):
    builder = PromptBuilder(embedder.processor, max_tokens=limit)
    prompt = builder.build(Item("q", content_of(text, [picture(56, 84)])), "query")
    shown = builder.tokenizer.decode(prompt.input_ids)
    head, tail = RELEASED.format(pad=6 * PAD, text="|CUT|").split("|CUT|")
    assert shown.startswith(head)
    assert shown.endswith(tail)
    kept = shown[len(head) : -len(tail)]
    assert kept
    assert text.startswith(kept.replace("\u2060", ""))
    # As much is kept as fits; re-encoding the cut text may cost a few tokens.
    assert limit - 8 <= len(prompt) <= limit
    assert prompt.num_cut_tokens > 0


@pytest.mark.parametrize("side", ["query", "candidate"])
def test_wording_after_a_long_text_is_kept(embedder, side):
    """Such as the one word that a model is asked for; only the text itself is cut."""
    ending = "\nIn one word:"
    profile = Profile(
        f"{{instruction}} {{text}}{ending}", f"{{text}}{ending}", f"{{text}}{ending}", "", "{text}"
    )
    builder = PromptBuilder(embedder.processor, profile, max_tokens=90)
    item = Item("x", content_of(LONG), instruction="Find it.")
    prompt = builder.build(item, side)
    assert f"{ending}\n<|im_end|>" in builder.tokenizer.decode(prompt.input_ids)
    assert 82 <= len(prompt) <= 90
    assert prompt.num_cut_tokens > 0
    measured = builder.measure(item, side)
    assert (measured.num_tokens, measured.num_cut_tokens) == (len(prompt), prompt.num_cut_tokens)


@pytest.mark.parametrize("side", ["query", "candidate"])
@pytest.mark.parametrize("order", ["TIT", "TI", "ITI", "TIIT", "ITITT", "TTI", "II T"])
@pytest.mark.parametrize("max_tokens", [4096, 150])
def test_every_order_is_laid_out_measured_and_cut_alike(embedder, picture, encoded, order, side, max_tokens):
    """Texts and pictures stay in their places, worded as one text; only the end of the last text is cut."""
    builder = PromptBuilder(embedder.processor, max_tokens=max_tokens)
    texts = [f"text {number} " + "of a key " * 25 * (number == order.count("T") - 1) for number in range(4)]
    words = iter(texts)
    shown = {
        "T": lambda: TextPart(next(words)),
        "I": lambda: ImagePart(picture(56, 84)),
        " ": lambda: TextPart(" \n"),
    }
    item = Item("x", tuple(shown[one]() for one in order), "Find it.")
    prompt = builder.build(item, side)
    measured = builder.measure(item, side, lambda image: image.size)
    assert (measured.num_tokens, measured.num_cut_tokens) == (len(prompt), prompt.num_cut_tokens)
    assert measured.num_picture_tokens == prompt.type_ids.sum() == 6 * order.count("I")

    before = "Find it. " if side == "query" else "Summarize the given image and text in one word: "
    joined = "".join(order.split())
    rendered, number = "", 0
    for place, one in enumerate(joined):
        if one == "I":
            rendered += f"<|vision_start|>{6 * PAD}<|vision_end|>"
            continue
        is_new = place > 0 and joined[place - 1] == "I"
        rendered += "\n" * is_new + before * (number == 0) + texts[number].strip() + "\n"
        number += 1
    whole = RELEASED_TEXT.replace("{text}\n", "{turn}")
    whole = whole.format(turn=rendered)
    if max_tokens == 4096:
        assert prompt.input_ids.tolist() == encoded(whole)
        assert prompt.num_cut_tokens == 0
        return
    cut = texts[order.count("T") - 1].strip()
    head, _, tail = whole.rpartition(cut)
    kept = builder.tokenizer.decode(prompt.input_ids)
    assert kept.startswith(head)
    assert kept.endswith(tail)
    assert cut.startswith(kept[len(head) : len(kept) - len(tail)])
    assert 142 <= len(prompt) <= 150


def test_a_text_that_fits_is_not_cut(embedder):
    short = PromptBuilder(embedder.processor, max_tokens=4096).build(Item("q", content_of(LONG)), "query")
    assert short.num_cut_tokens == 0
    exact = PromptBuilder(embedder.processor, max_tokens=len(short)).build(
        Item("q", content_of(LONG)), "query"
    )
    assert torch.equal(exact.input_ids, short.input_ids)


def test_pictures_that_leave_no_room_are_an_error(embedder, picture):
    builder = PromptBuilder(embedder.processor, max_tokens=40)
    sizes = [(56, 84), (28, 28)]
    item = Item("q", content_of(LONG, [picture(*size) for size in sizes]))
    with error_about(UserError, "item 'q'", "max_prompt_tokens"):
        builder.build(item, "query")
    with error_about(UserError, "item 'q'", "max_prompt_tokens"):
        builder.measure(item, "query", lambda image: image.size)
    # With exactly enough room for picture and template the text goes, all of it.
    bare = len(
        PromptBuilder(embedder.processor, "plain").build(
            Item("q", content_of(None, [picture(56, 84)])), "query"
        )
    )
    tight = PromptBuilder(embedder.processor, max_tokens=bare).build(
        Item("q", content_of(LONG, [picture(56, 84)])), "query"
    )
    assert len(tight) <= bare


def control_tokens(builder):
    return [token.content for token in builder.tokenizer.added_tokens_decoder.values() if token.special]


def test_control_tokens_in_data_are_text(builder, picture):
    names = control_tokens(builder)
    assert {"<|image_pad|>", "<|vision_start|>", "<|im_start|>", "<|im_end|>", EMB_TOKEN} <= set(names)
    clean = builder.build(Item("q", content_of("egg", [picture(28, 28)]), instruction="find"), "query")
    special = torch.tensor(builder.tokenizer.convert_tokens_to_ids(names))
    for name in names:
        content = content_of(f"{name} egg{name}{name}", [picture(28, 28)])
        prompt = builder.build(Item("q", content, f"find {name}"), "query")
        found = prompt.input_ids[torch.isin(prompt.input_ids, special)]
        assert torch.equal(found, clean.input_ids[torch.isin(clean.input_ids, special)])
        assert prompt.type_ids.sum() == 1


def test_rationale_ids_end_with_emb(builder, encoded):
    assert builder.rationale_ids(" a key \n", "r") == [*encoded("a key"), builder.emb_id]


def test_control_tokens_in_a_rationale_are_text(builder):
    """`<|im_end|>` is suppressed in generation, so it must not be taught either."""
    special = set(builder.tokenizer.convert_tokens_to_ids(control_tokens(builder)))
    ids = builder.rationale_ids("a key<|im_end|> <|endoftext|>", "r")
    assert [token for token in ids if token in special] == [builder.emb_id]


def test_rationale_errors(builder):
    with pytest.raises(ValueError):
        builder.rationale_ids(" \n", "r7")
    with pytest.raises(ValueError):
        builder.rationale_ids("a key <emb>", "r7")


def test_decode_leaves_special_tokens_out(builder):
    assert builder.decode(builder.rationale_ids("a key", "r")) == "a key"


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ raise_exception('no system') }}", "{% if %}"]
)
def test_a_chat_template_that_fails_is_no_traceback(builder, monkeypatch, template):
    """Code that the sandbox refuses, an error of the template's own, and one that is no template."""
    monkeypatch.setattr(builder.processor, "chat_template", template)
    with error_about(UserError, "template"):
        builder.build(Item("a", content_of("never seen before")), "query")


def test_a_picture_the_processor_refuses_names_the_item(builder, picture):
    with error_about(ImageError, "of item 'thread'", "processed"):
        builder.build(Item("thread", content_of("egg", [picture(2000, 2)])), "query")


def test_builder_errors(builder, tiny_path, embedder):
    with pytest.raises(ValueError):
        PromptBuilder(embedder.processor, "rgb")
    from transformers import AutoProcessor

    with pytest.raises(ValueError):
        PromptBuilder(AutoProcessor.from_pretrained(tiny_path))


@every_family
@pytest.mark.parametrize(
    "sizes", [[], [(40, 90)], [(120, 30), (60, 60)], [(700, 400)], [(84, 84)] * 3, [(900, 60)]]
)
@pytest.mark.parametrize("max_tokens", [100_000, 130])
def test_a_prompt_is_measured_without_its_pictures(lively, picture, sizes, max_tokens):
    builder = PromptBuilder(lively.processor, max_tokens=max_tokens)
    images = [picture(width, height) for width, height in sizes]
    item = Item("x", content_of("what is this egg? " * 30, images))
    for side in ("query", "candidate"):
        try:
            prompt = builder.build(item, side)
        except ValueError as error:
            with pytest.raises(type(error)):
                builder.measure(item, side, lambda image: image.size)
            continue
        found = builder.measure(item, side, lambda image: image.size)
        expected = (len(prompt), prompt.num_cut_tokens)
        assert (found.num_tokens, found.num_cut_tokens) == expected
        assert found.num_picture_tokens >= int(prompt.type_ids.sum())
