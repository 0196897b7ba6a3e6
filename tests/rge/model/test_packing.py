"""The flat layout of prompts and tails: order, positions, masks, indices; and that rows do not matter to one another."""

from dataclasses import replace

import pytest
import torch
from family_models import PHOTOS, every_family

from rge.common.parts import content_of
from rge.common.schema import Item
from rge.model.backbone import vision_parameters
from rge.model.packing import PADDING, Branch, pack_prompts, pack_tails, tail_mask
from rge.model.prompts import Prompt, PromptBuilder

START, PLACEHOLDER, END, EMB = 90, 91, 92, 99
EMPTY = (torch.zeros(4, 6), torch.tensor([[1, 2, 2]]))


def text_prompt(*ids: int) -> Prompt:
    counted = torch.arange(len(ids)).expand(3, -1)
    return Prompt("text", torch.tensor(ids), torch.zeros(len(ids), dtype=torch.long), counted, None, None)


def picture_prompt() -> Prompt:
    """Three placeholders side by side (a grid of 2 x 6 patches) between two text tokens."""
    ids = torch.tensor([5, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 6])
    positions = torch.tensor([[0, 1, 1, 1, 4], [0, 1, 1, 1, 4], [0, 1, 2, 3, 4]])
    types, grid = torch.tensor([0, 1, 1, 1, 0]), torch.tensor([[1, 2, 6]])
    return Prompt("picture", ids, types, positions, torch.ones(12, 6), grid)


def do_pack(prompts):
    picture = {"picture_ids": (START, PLACEHOLDER, END), "empty_picture": EMPTY}
    return pack_prompts(prompts, **picture)


def test_prompts_by_hand():
    prompts = [picture_prompt(), text_prompt(7, 8)]
    part = do_pack(prompts)
    assert part.input_ids_T.tolist() == [5, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 7]
    assert part.position_ids_3T.tolist() == [[0, 1, 1, 1, 0], [0, 1, 1, 1, 0], [0, 1, 2, 3, 0]]
    assert part.index_BP.tolist() == [[0, 1, 2, 3], [4, 0, 0, 0]]
    assert part.length_B.tolist() == [4, 1]
    assert part.last_id_B.tolist() == [6, 8]
    assert part.last_position_3B.tolist() == [[4, 1]] * 3
    assert part.after_B.tolist() == [5, 2]
    assert part.pixels.shape == (12, 6)


def test_tails_by_hand():
    prompts = [picture_prompt(), text_prompt(7, 8)]
    branches = [
        [Branch([11, EMB], read_state=True), Branch([21, 22, EMB], predict=True)],
        [Branch([EMB], read_state=True, predict=True)],
    ]
    part = pack_tails(prompts, branches)
    assert part.input_ids_T.tolist() == [6, 11, EMB, 21, 22, EMB, 8, EMB]
    assert part.index_BS.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 0, 0, 0, 0]]
    assert part.segment_BS.tolist() == [[0, 1, 1, 2, 2, 2], [0, 1, *[PADDING] * 4]]
    # Both branches go on after the prompt's last position, on all axes.
    assert part.position_ids_3T.tolist() == [[4, 5, 6, 5, 6, 7, 1, 2]] * 3
    assert part.state_index_N.tolist() == [2, 7]
    # The prompt's last state predicts a branch's first token; within a branch each state predicts the next.
    assert part.predict_index_M.tolist() == [0, 3, 4, 6]
    assert part.label_M.tolist() == [21, 22, EMB, EMB]


def test_what_follows_a_prompt_goes_on_after_its_last_token_where_a_clip_reaches_further():
    prompt = replace(text_prompt(7, 8), position_3T=torch.tensor([[0, 1], [0, 1], [6, 1]]))
    assert pack_tails([prompt], [[Branch([EMB])]]).position_ids_3T.tolist()[0] == [1, 2]
    picture = {"picture_ids": (START, PLACEHOLDER, END), "empty_picture": EMPTY}
    assert pack_prompts([prompt], **picture).after_B.tolist() == [2]


def test_tail_mask_by_hand():
    """Prompts of two and one token; tails [last, branch 1, branch 2, branch 2] and [last, branch 1, pad, pad]."""
    mask = tail_mask(torch.tensor([2, 1]), 2, torch.tensor([[0, 1, 2, 2], [0, 1, PADDING, PADDING]]))
    assert mask.shape == (2, 1, 4, 6)
    assert mask[0, 0].int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]
    assert mask[1, 0].int().tolist() == [
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_a_batch_without_pictures_gets_one_that_belongs_to_no_row():
    part = do_pack([text_prompt(7, 8), text_prompt(9, 10, 11)])
    assert part.input_ids_T.tolist() == [START, PLACEHOLDER, END, 7, 9, 10]
    assert part.index_BP.tolist() == [[3, 0], [4, 5]]
    assert part.length_B.tolist() == [1, 2]
    assert part.pixels.shape == (4, 6)
    assert part.image_grid.tolist() == [[1, 2, 2]]


def test_errors():
    with pytest.raises(ValueError):
        do_pack([])
    with pytest.raises(ValueError):
        pack_tails([text_prompt(1)], [[Branch([])]])
    counted = torch.arange(2).expand(3, -1)
    ends = Prompt("seen", torch.tensor([5, PLACEHOLDER]), torch.tensor([0, 1]), counted, None, None)
    with pytest.raises(ValueError):
        do_pack([ends])


@pytest.fixture
def states(lively):
    def compute(prompts, branches):
        with torch.no_grad():
            return lively(lively.pack(prompts, branches))[0].state_ND

    return compute


@every_family
def test_states_do_not_depend_on_padding_or_on_other_rows(lively, make_prompts, states):
    prompts = make_prompts(PromptBuilder(lively.processor), 8)
    branches = [[Branch([*range(number), lively.emb_id], read_state=True)] for number in range(8)]
    alone = torch.cat([states([prompt], [branch]) for prompt, branch in zip(prompts, branches, strict=True)])
    torch.testing.assert_close(states(prompts, branches), alone, atol=2e-6, rtol=0)
    torch.testing.assert_close(states(prompts[::-1], branches[::-1]), alone.flip(0), atol=2e-6, rtol=0)


@every_family
def test_branches_equal_rows_of_their_own(lively, make_prompts, states):
    prompts = make_prompts(PromptBuilder(lively.processor), 3)
    emb = lively.emb_id
    branches = [
        Branch([1, 2, emb], read_state=True),
        Branch([emb], read_state=True),
        Branch([3, 4, 5, 6, emb], read_state=True),
    ]
    together = states(prompts, [branches] * 3)
    apart = [states(prompts, [[branch]] * 3) for branch in branches]
    torch.testing.assert_close(together, torch.stack(apart, dim=1).flatten(0, 1), atol=2e-6, rtol=0)


@every_family
def test_the_masked_picture_changes_nothing_but_gives_the_vision_tower_a_gradient(lively, picture):
    builder = PromptBuilder(lively.processor)
    text, seen = (
        builder.build(Item("t", content_of("open this")), "query"),
        builder.build(Item("p", content_of("egg", [picture(50, 50)])), "query"),
    )
    branch = [Branch([lively.emb_id], read_state=True)]
    alone = lively(lively.pack([text], [branch]))[0].state_ND
    alone[0, 0].backward()
    visual = vision_parameters(lively.model)
    assert len(visual) > (5 if lively.model.config.model_type == PHOTOS else 10)  # there the merger alone
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in visual)
    beside = lively(lively.pack([text, seen], [branch, branch]))[0].state_ND
    torch.testing.assert_close(alone[0], beside[0], atol=2e-6, rtol=0)
