"""Clips and documents equal stock transformers on the same frames: ids, positions, pixels, states, losses and gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from faults import error_about
from stock import gradients, naive_info_nce, nll_of, state_at_end, stock_forward, worst_gradient_error
from transformers.video_utils import VideoMetadata

from rge.common.errors import UserError
from rge.common.parts import ImagePart, TextPart, VideoPart, content_of
from rge.common.schema import Item
from rge.content.config import VideoConfig
from rge.data.collate import flatten, unflatten
from rge.model.families import normalised
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.rollout.generate import generate
from rge.rollout.writer import Rollout
from rge.step.training_step import TrainingStep

FPS = 4.0
reading = pytest.mark.parametrize("lively_path", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], indirect=True)
"""Every family that reads clips."""


@pytest.fixture
def clip(picture, lively):
    """A clip of frames at 4 a second, with sides that the family reads as they are."""
    image_processor = lively.processor.image_processor
    side = getattr(image_processor, "patch_size", 14) * getattr(image_processor, "merge_size", 2)

    def make(count, across=3, down=2, seed=0):
        frames = tuple(picture(across * side, down * side, 100 * seed + number) for number in range(count))
        return VideoPart(frames, fps=FPS)

    return make


def builder_of(embedder, **more):
    return PromptBuilder(embedder.processor, video=VideoConfig(fps=FPS, max_pixels=128 * 128), **more)


def stock_fields(processor, content, rendered):
    """What the family's own processor makes of the same pictures and frames."""
    images = [
        processor.rge_family.scaled(part.image, processor.image_processor)
        for part in content
        if isinstance(part, ImagePart)
    ]
    clips = [part.video for part in content if isinstance(part, VideoPart)]
    frames = [torch.from_numpy(np.stack([np.array(frame) for frame in one])).movedim(-1, 1) for one in clips]
    about = [
        VideoMetadata(total_num_frames=len(one), fps=FPS, frames_indices=[*range(len(one))]) for one in clips
    ]
    return processor(
        text=[rendered], images=images or None, videos=frames, video_metadata=about, do_resize=False,
        do_sample_frames=False, return_tensors="pt",
    )  # fmt: skip


@reading
def test_ids_positions_pixels_and_states_are_those_of_transformers(lively, clip, picture):
    """Two clips, a picture between them and one after: each text, picture and frame in its place."""
    builder, model = builder_of(lively), lively.model
    content = (
        TextPart("First"), clip(6), ImagePart(picture(60, 90)), TextPart("then"), clip(10, 2, 3, 3),
        ImagePart(picture(90, 60, 4)), TextPart("what is this?"),
    )  # fmt: skip
    prompt = builder.build(Item("x", content), "query")
    layout, _, _ = builder._laid_out(Item("x", content), "query", builder.scaled(Item("x", content)))
    expected = stock_fields(builder.processor, content, builder._render(layout))
    assert prompt.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert prompt.type_ids.tolist() == expected["mm_token_type_ids"][0].tolist()
    assert prompt.image_grid[:, 0].tolist() == [6, 1, 10, 1]

    measured = builder.measure(Item("x", content), "query")
    assert (measured.num_tokens, measured.num_picture_tokens) == (
        len(prompt),
        int((prompt.type_ids > 0).sum()),
    )

    more = {"second_per_grid_ts": expected["second_per_grid_ts"]} if "second_per_grid_ts" in expected else {}
    fields = ("image_grid_thw", "video_grid_thw", "mm_token_type_ids", "input_ids")
    positions = model.model.get_rope_index(**{name: expected[name] for name in fields}, **more)[0]
    assert torch.equal(prompt.position_3T, positions[:, 0])

    values = normalised(builder.processor.image_processor, prompt.pixels, prompt.image_grid)
    sizes = [expected["video_grid_thw"][0].prod(), expected["image_grid_thw"][0].prod()]
    assert torch.equal(values[: sizes[0]], expected["pixel_values_videos"][: sizes[0]])
    assert torch.equal(values[sizes[0] : sum(sizes)], expected["pixel_values"][: sizes[1]])

    after = [lively.emb_id]
    hidden = model(
        **{name: value for name, value in expected.items() if isinstance(value, torch.Tensor)} | more
        | {
            "input_ids": torch.cat([expected["input_ids"], torch.tensor([after])], dim=1),
            "attention_mask": torch.ones(1, len(prompt) + 1, dtype=torch.long),
            "mm_token_type_ids": torch.nn.functional.pad(expected["mm_token_type_ids"], (0, 1)),
        },
        output_hidden_states=True,
    ).hidden_states[-1]  # fmt: skip
    (found,) = lively(lively.pack([prompt], [[Branch(after, read_state=True)]]))
    wanted = hidden[0, -1] / hidden[0, -1].norm()
    torch.testing.assert_close(found.state_ND[0], wanted, atol=1e-6, rtol=0)


@pytest.fixture
def with_clips(make_batch, roll_out, clip, picture):
    """A batch in which two queries and a candidate show a clip, among pictures and texts."""

    def make(embedder):
        builder = builder_of(embedder)
        batch = make_batch(PromptBuilder(embedder.processor))
        queries, candidates = [*batch.queries], [*batch.candidates]
        queries[1] = builder.build(Item("clip", (clip(4), TextPart("what is this egg?"))), "query")
        both = (TextPart("see"), ImagePart(picture(50, 80)), clip(6, 1, 2, 2), TextPart("so?"))
        queries[2] = builder.build(Item("both", both), "query")
        candidates[0] = builder.build(Item("shown", (clip(2, seed=5),)), "candidate")
        batch = replace(batch, queries=queries, candidates=candidates)
        return batch, roll_out(embedder, batch)

    return make


@pytest.mark.slow
@reading
@pytest.mark.parametrize("micro_batch_size", [99, 2])
def test_losses_and_gradients_are_those_of_separate_passes_of_stock(lively, with_clips, micro_batch_size):
    batch, rationales = with_clips(lively)
    emb_id = lively.emb_id
    direct = [[emb_id]] * len(batch.candidates)
    own = [[*rationale.ids, emb_id] for rationale in rationales]
    hidden, _, starts = stock_forward(lively, batch.queries, own, "right")
    q = state_at_end(hidden, starts, batch.queries, own)
    _, logits, starts = stock_forward(lively, batch.queries, batch.oracle_ids, "right")
    q_nll, q_count = nll_of(logits, starts, batch.queries, batch.oracle_ids)
    hidden, logits, starts = stock_forward(lively, batch.candidates, direct, "right")
    c = state_at_end(hidden, starts, batch.candidates, direct)
    c_nll, c_count = nll_of(logits, starts, batch.candidates, direct)
    lm, contrastive = (q_nll + c_nll) / (q_count + c_count), naive_info_nce(q, c, batch)
    (0.3 * lm + 0.7 * contrastive).backward()
    expected = gradients(lively)
    step = TrainingStep(lively, lively, Objective(0.3, 0.7, 0.07), micro_batch_size)
    report = step(batch, Rollout(rationales))
    assert report["loss_lm"] == pytest.approx(lm.item(), abs=1e-5)
    assert report["loss_contrastive"] == pytest.approx(contrastive.item(), abs=1e-5)
    assert worst_gradient_error(gradients(lively), expected)[0] < 1e-4


@reading
def test_a_rollout_continues_after_a_clip_as_training_does(lively, with_clips):
    """Its state at <emb> is that of one forward over prompt and rationale, in batches and alone."""
    batch, _ = with_clips(lively)
    written = generate(lively, batch.queries, max_new_tokens=6, batch_size=len(batch.queries))
    for prompt, one in zip(batch.queries, written, strict=True):
        ids = [*one.ids, lively.emb_id]
        hidden, _, starts = stock_forward(lively, [prompt], [ids], "right")
        (expected,) = state_at_end(hidden, starts, [prompt], [ids])
        torch.testing.assert_close(one.state_D, expected, atol=1e-5, rtol=0)


def test_a_batch_travels_with_its_clips(lively, with_clips):
    batch, _ = with_clips(lively)
    again = unflatten(*flatten(batch))
    for one, other in zip(
        [*batch.queries, *batch.candidates], [*again.queries, *again.candidates], strict=True
    ):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.type_ids, other.type_ids)
        assert torch.equal(one.position_3T, other.position_3T)
        assert (one.pixels is None) == (other.pixels is None)
        if one.pixels is not None:
            assert torch.equal(one.pixels, other.pixels)
            assert torch.equal(one.image_grid, other.image_grid)


@pytest.mark.parametrize("lively_path", ["idefics3"], indirect=True)
def test_a_family_without_videos_refuses_them_by_name(lively, clip):
    item = Item("x", (clip(4), TextPart("what?")))
    for read in (PromptBuilder(lively.processor).build, PromptBuilder(lively.processor).measure):
        with error_about(UserError, "item 'x'", "video"):
            read(item, "query")


def test_the_text_after_a_clip_is_cut_and_no_frame_is_dropped(lively, clip):
    item = Item("x", (clip(8), TextPart("a long text " * 200)))
    prompt = builder_of(lively, max_tokens=160).build(item, "query")
    assert len(prompt) <= 160
    assert prompt.num_cut_tokens > 0
    assert prompt.image_grid[:, 0].tolist() == [8]
    with error_about(UserError, "item 'x'", "max_prompt_tokens"):
        builder_of(lively, max_tokens=20).build(item, "query")


def test_what_a_part_says_precedes_the_rule(lively, clip, picture):
    frames = tuple(picture(112, 112, number) for number in range(12))
    shown = {
        "all": (VideoPart(frames), 12),
        "fewer": (VideoPart(frames, max_frames=4), 4),
        "as many": (VideoPart(frames, num_frames=6), 6),
        "a span": (VideoPart(frames, start=0.5, end=1.5, fps=FPS), 4),
    }
    for name, (part, count) in shown.items():
        prompt = builder_of(lively).build(Item(name, (part, *content_of("what?"))), "query")
        assert prompt.image_grid[0, 0] == count, name


@reading
def test_a_file_is_measured_as_it_is_shown(lively, tmp_path):
    """Frames at uneven times, by packets alone: as many tokens, times written as text included."""
    clips = pytest.importorskip("clips", exc_type=ImportError)
    times_ms = [0, 130, 400, 410, 900, 1500, 2600, 2700, 3300, 4800, 5000, 6100]
    (tmp_path / "clip.mp4").write_bytes(clips.clip(times_ms, size=(160, 96)))
    item = Item("x", (VideoPart(str(tmp_path / "clip.mp4"), start=0.2), TextPart("what is this?")))
    builder = PromptBuilder(lively.processor, video=VideoConfig(fps=1.5, max_pixels=96 * 64))
    prompt, measured = builder.build(item, "query"), builder.measure(item, "query")
    assert (measured.num_tokens, measured.num_pictures) == (len(prompt), int(prompt.image_grid[0, 0]))
    assert measured.num_picture_tokens == int((prompt.type_ids == 2).sum())
