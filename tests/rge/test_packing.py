"""The layout of a packed row: columns, positions, masks, indices, padding."""

import pytest
import torch

from rge.packing import PADDING, Branch, attention_mask, pack
from rge.prompts import Prompt, PromptBuilder
from rge.schema import Item

PAD, START, PLACEHOLDER, END, EMB = 0, 90, 91, 92, 99
EMPTY = (torch.zeros(4, 6), torch.tensor([[1, 2, 2]]))


def text_prompt(*ids: int) -> Prompt:
    return Prompt("text", torch.tensor(ids), torch.zeros(len(ids), dtype=torch.long), None, None)


def picture_prompt() -> Prompt:
    """Three placeholders side by side (a grid of 2 x 6 patches) between two text tokens."""
    ids = torch.tensor([5, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 6])
    return Prompt("picture", ids, torch.tensor([0, 1, 1, 1, 0]), torch.ones(12, 6), torch.tensor([[1, 2, 6]]))


PICTURE_POSITIONS = torch.tensor([[0, 1, 1, 1, 4], [0, 1, 1, 1, 4], [0, 1, 2, 3, 4]])


def do_pack(prompts, branches, **options):
    positions = [
        PICTURE_POSITIONS if prompt.image_grid is not None else torch.arange(len(prompt)).expand(3, -1)
        for prompt in prompts
    ]
    return pack(
        prompts,
        positions,
        branches,
        pad_id=PAD,
        picture_ids=(START, PLACEHOLDER, END),
        empty_picture=EMPTY,
        **options,
    )


def test_layout_by_hand():
    branches = [
        [Branch([11, EMB], read_state=True), Branch([21, 22, EMB], predict=True)],
        [Branch([EMB], read_state=True, predict=True)],
    ]
    packed = do_pack([picture_prompt(), text_prompt(7, 8)], branches)
    assert packed.input_ids_BT.tolist() == [
        [5, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 6, 11, EMB, 21, 22, EMB],
        [7, 8, EMB, *[PAD] * 7],
    ]
    assert packed.segment_BT.tolist() == [[0, 0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, *[PADDING] * 7]]
    # Both branches go on after the prompt's last position, on all axes.
    assert packed.position_ids_3BT[:, 0].tolist() == [
        [0, 1, 1, 1, 4, 5, 6, 5, 6, 7],
        [0, 1, 1, 1, 4, 5, 6, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 5, 6, 7],
    ]
    assert packed.position_ids_3BT[:, 1, :3].tolist() == [[0, 1, 2]] * 3
    assert packed.state_index_N.tolist() == [6, 10 + 2]
    # The prompt's last state predicts a branch's first token; within a branch each state predicts the next.
    assert packed.predict_index_M.tolist() == [4, 7, 8, 10 + 1]
    assert packed.label_M.tolist() == [21, 22, EMB, EMB]
    assert packed.pixel_values.shape == (12, 6)


def test_left_padding_moves_every_index():
    prompts, branches = (
        [picture_prompt(), text_prompt(7, 8)],
        [[Branch([EMB], read_state=True, predict=True)]] * 2,
    )
    right, left = do_pack(prompts, branches), do_pack(prompts, branches, padding_side="left")
    assert left.input_ids_BT.tolist()[1] == [PAD, PAD, PAD, 7, 8, EMB]
    for packed in (right, left):
        tokens = packed.input_ids_BT.flatten()
        assert tokens[packed.state_index_N].tolist() == [EMB, EMB]
        assert tokens[packed.predict_index_M].tolist() == [6, 8]
        assert packed.segment_BT.flatten()[packed.state_index_N].tolist() == [1, 1]


def test_attention_mask_by_hand():
    """[pad, prompt, prompt, branch 1, branch 2, branch 2]: rows look at columns."""
    mask = attention_mask(torch.tensor([[PADDING, 0, 0, 1, 2, 2]]))
    assert mask.shape == (1, 1, 6, 6)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 1, 1, 0, 1, 0],
        [0, 1, 1, 0, 1, 1],
    ]


def test_a_batch_without_pictures_gets_a_masked_one():
    packed = do_pack([text_prompt(7, 8), text_prompt(9)], [[Branch([EMB], read_state=True)]] * 2)
    assert packed.input_ids_BT.tolist() == [
        [START, PLACEHOLDER, END, 7, 8, EMB],
        [9, EMB, PAD, PAD, PAD, PAD],
    ]
    assert packed.segment_BT[0].tolist() == [PADDING] * 3 + [0, 0, 1]
    assert packed.position_ids_3BT[0, 0, 3:].tolist() == [0, 1, 2]
    assert packed.state_index_N.tolist() == [5, 7]
    assert packed.pixel_values.shape == (4, 6)
    assert packed.image_grid.tolist() == [[1, 2, 2]]


def test_errors():
    with pytest.raises(ValueError, match="cannot pack a batch without rows"):
        do_pack([], [])
    with pytest.raises(ValueError, match="padding_side must be right or left, got 'middle'"):
        do_pack([text_prompt(1)], [[]], padding_side="middle")
    with pytest.raises(ValueError, match=r"row 0 \(text\): a branch needs at least one token"):
        do_pack([text_prompt(1)], [[Branch([])]])


@pytest.fixture
def states(lively):
    def compute(prompts, branches, **options):
        with torch.no_grad():
            return lively(lively.pack(prompts, branches, **options))[0].state_ND

    return compute


def test_states_do_not_depend_on_padding_or_on_other_rows(lively, make_prompts, states):
    prompts = make_prompts(PromptBuilder(lively.processor), 8)
    branches = [[Branch([*range(number), lively.emb_id], read_state=True)] for number in range(8)]
    alone = torch.cat([states([prompt], [branch]) for prompt, branch in zip(prompts, branches, strict=True)])
    torch.testing.assert_close(states(prompts, branches), alone, atol=2e-6, rtol=0)
    torch.testing.assert_close(states(prompts, branches, padding_side="left"), alone, atol=2e-6, rtol=0)
    torch.testing.assert_close(states(prompts[::-1], branches[::-1]), alone.flip(0), atol=2e-6, rtol=0)


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


def test_the_masked_picture_changes_nothing_but_gives_the_vision_tower_a_gradient(lively, picture):
    builder = PromptBuilder(lively.processor)
    text, seen = (
        builder.build(Item("t", "open this"), "query"),
        builder.build(Item("p", "egg"), "query", [picture(50, 50)]),
    )
    branch = [Branch([lively.emb_id], read_state=True)]
    alone = lively(lively.pack([text], [branch]))[0].state_ND
    alone[0, 0].backward()
    visual = dict(lively.model.model.visual.named_parameters())
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in visual.values())
    beside = lively(lively.pack([text, seen], [branch, branch]))[0].state_ND
    torch.testing.assert_close(alone[0], beside[0], atol=2e-6, rtol=0)
