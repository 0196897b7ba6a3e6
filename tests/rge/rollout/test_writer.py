"""How a step comes by its rationales: one encoding of the prompt, reuse, several a query, none on purpose."""

import dataclasses

import pytest
import torch
from faults import error_about
from transformers import SiglipVisionConfig, SiglipVisionModel

from rge.common.errors import RecipeError
from rge.config import Recipe
from rge.distributed import launch
from rge.distributed.config import TrainConfig
from rge.loss_config import LossConfig
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.optim.config import StageConfig
from rge.rollout.config import RolloutConfig
from rge.rollout.generate import Rationale, generate
from rge.rollout.micro_batches import Kept, has_dropout
from rge.rollout.writer import (
    DIRECT,
    DIRECT_STATE,
    ORACLE,
    Rollout,
    Store,
    Writer,
    drawn_cap,
    encodes_once,
    is_drawn,
    make_writer,
    oracle_share,
    rollout_report,
    sample_seeds,
)
from rge.step.training_step import TrainingStep

OBJECTIVE = Objective(0.4, 0.6, 0.07)
MIX = dataclasses.replace(OBJECTIVE, anchor="mix")
SETTINGS = RolloutConfig(max_new_tokens=9, batch_size=4)
RECIPE = Recipe(
    recipe="tiny", rollout=SETTINGS, joint=StageConfig(batch_size=5), train=TrainConfig(micro_batch_size=2)
)


@pytest.fixture
def batch(lively, make_batch):
    return make_batch(PromptBuilder(lively.processor))


def writer_of(embedder, once=False, loss=RECIPE.loss, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    return Writer(
        embedder, embedder, settings, once=once, vllm=None, loss=loss, micro_batch_size=100, keep="none"
    )


def do_step(embedder, batch, rationales, encoded=None, micro_batch_size=100, objective=OBJECTIVE):
    embedder.zero_grad(set_to_none=True)
    report = TrainingStep(embedder, embedder, objective, micro_batch_size)(
        batch, Rollout(rationales, encoded)
    )
    gradients = [
        parameter.grad.flatten() for parameter in embedder.parameters() if parameter.grad is not None
    ]
    return report, torch.cat(gradients)


def ids_of(rationales):
    return [rationale.ids for rationale in rationales]


def assert_same_step(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert float((found[1] - expected[1]).norm()) < 1e-5 * float(expected[1].norm())


def test_once_and_twice_give_the_same_step(lively, batch):
    twice, nothing, *_ = writer_of(lively)(0, batch)
    once, encoded, *_ = writer_of(lively, once=True)(0, batch)
    assert nothing is None
    assert ids_of(once) == ids_of(twice)
    assert all(keys.requires_grad for keys in encoded.parts[0].keys)
    assert_same_step(do_step(lively, batch, once, encoded), do_step(lively, batch, twice))


def test_checkpointing_may_encode_once(lively, batch):
    expected = do_step(lively, batch, writer_of(lively)(0, batch)[0])
    lively.train()
    lively.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_step(do_step(lively, batch, *writer_of(lively, once=True)(0, batch)[:2]), expected)


def test_one_encoding_belongs_to_one_chunk(lively, batch):
    rationales, encoded, *_ = writer_of(lively, once=True)(0, batch)
    with pytest.raises(ValueError):
        do_step(lively, batch, rationales, encoded, micro_batch_size=2)


def test_when_prompts_are_encoded_once(lively):
    fits = {
        "queries_a_rank": 8,
        "micro_batch_size": 8,
        "sharded": False,
        "has_dropout": False,
        "keep": "none",
    }
    assert encodes_once("auto", **fits)
    assert encodes_once("once", **fits)
    assert not encodes_once("twice", **fits)
    for change, reason in [
        (
            {"queries_a_rank": 9},
            "a process has 9 queries per step, train.micro_batch_size is 8, and nothing is kept",
        ),
        ({"sharded": True}, "parameters are sharded"),
        ({"has_dropout": True}, "dropout is on"),
    ]:
        assert not encodes_once("auto", **{**fits, **change})
        with error_about(RecipeError, "rollout.prompt_pass") as caught:
            encodes_once("once", **{**fits, **change})
        assert reason in caught.value.reason
    assert encodes_once("auto", **{**fits, "queries_a_rank": 9, "keep": "host"})
    lively.train()
    assert not has_dropout(lively)
    lively.model.model.language_model.layers[0].self_attn.attention_dropout = 0.1
    assert has_dropout(lively)
    for rate in (0.1, 0.0):
        config = SiglipVisionConfig(
            hidden_size=16,
            num_attention_heads=2,
            num_hidden_layers=1,
            intermediate_size=16,
            attention_dropout=rate,
        )
        assert has_dropout(SiglipVisionModel(config).train()) == bool(rate)


def test_several_rationales_a_query_are_branches_of_one_prompt(lively, batch, monkeypatch):
    settings = {"temperature": 1.0, "num_rationales": 3}
    calls = []
    pack = lively.pack_prompts
    monkeypatch.setattr(
        lively, "pack_prompts", lambda prompts: (calls.append(len(prompts)), pack(prompts))[1]
    )
    rationales, encoded, *_ = writer_of(lively, once=True, batch_size=8, **settings)(0, batch)
    assert calls == [5]  # every prompt once, for fifteen rationales and the gradient
    assert len(rationales) == 15
    assert len(set(ids_of(rationales))) > 10
    # Each is what its own seed writes alone.
    seeds = [seed for one in batch.seeds for seed in sample_seeds(one, 3)]
    assert seeds[::3] == batch.seeds
    assert len(set(seeds)) == 15
    prompts = [prompt for prompt in batch.queries for _ in range(3)]
    alone = generate(lively, prompts, max_new_tokens=9, batch_size=15, temperature=1.0, seeds=seeds)
    assert ids_of(alone) == ids_of(rationales)
    # The step is the mean over three steps that see one rationale each; the LM loss is in all of them.
    report, gradient = do_step(lively, batch, rationales, encoded)
    parts = [do_step(lively, batch, rationales[number::3]) for number in range(3)]
    for name, value in report.items():
        assert value == pytest.approx(sum(part[name] for part, _ in parts) / 3, rel=1e-5), name
    mean = sum(part for _, part in parts) / 3
    assert float((gradient - mean).norm()) < 1e-5 * float(mean.norm())
    assert_same_step(do_step(lively, batch, rationales, micro_batch_size=2), (report, gradient))


def test_a_rationale_is_used_again_until_it_is_too_old(lively, batch, monkeypatch):
    writer = writer_of(lively, reuse_steps=2)
    first, *_ = writer(10, batch)
    with torch.no_grad():
        lively.model.get_input_embeddings().weight.mul_(1.3)  # the model moves on
    now = ids_of(generate(lively, batch.queries, max_new_tokens=9, batch_size=5))
    assert now != ids_of(first)
    counted = []
    monkeypatch.setattr(
        "rge.rollout.writer.generate",
        lambda *args, **kwargs: (counted.append(len(args[1])), generate(*args, **kwargs))[1],
    )
    for step, age in [(11, 1), (12, 2), (13, 0), (14, 1)]:
        rationales, *_ = writer(step, batch)
        assert [rationale.age for rationale in rationales] == [age] * 5
        assert ids_of(rationales) == (ids_of(first) if step < 13 else now)
        report = rollout_report(Rollout(rationales), 2.0, lively.device)
        assert report["rationale_age_mean"] == age
        tokens = sum(map(len, ids_of(rationales)))
        assert report["tokens_per_s"] == (0 if age else tokens / 2.0)
    assert counted == [0, 0, 5, 0]
    # What was written for other words is not used, whatever the id says.
    other = dataclasses.replace(batch, queries=[batch.queries[1], *batch.queries[1:]])
    assert [rationale.age for rationale in writer(14, other)[0]] == [0, 1, 1, 1, 1]
    # Nor for another source's record of the same id, words and size of picture.
    other = dataclasses.replace(batch, right_answers=[[-7], *batch.right_answers[1:]])
    assert [rationale.age for rationale in writer(14, other)[0]] == [0, 1, 1, 1, 1]


@pytest.mark.slow
def test_states_of_old_rationales_are_computed_with_the_present_weights(lively, batch):
    writer = writer_of(lively, reuse_steps=5)
    writer(0, batch)
    with torch.no_grad():
        lively.model.get_input_embeddings().weight.mul_(1.3)
    old, *_ = writer(1, batch)
    assert all(rationale.state_D is None for rationale in old)
    whole = do_step(lively, batch, old)
    assert_same_step(do_step(lively, batch, old, micro_batch_size=2), whole)
    # Also where the first of a query's rationales is new, and the others are not.
    branches = [[Branch([*old[3].ids, lively.emb_id], read_state=True)]]
    with torch.no_grad():
        state = lively(lively.pack([batch.queries[3]], branches))[0].state_ND[0]
    old[3] = Rationale(old[3].ids, old[3].forced, state, 0.0)
    assert_same_step(do_step(lively, batch, old, micro_batch_size=2), whole)


def test_a_resumed_store_goes_on(lively, batch):
    writer = writer_of(lively, reuse_steps=3)
    first, *_ = writer(0, batch)
    resumed = writer_of(lively, reuse_steps=3)
    resumed.store.load_state_dict(writer.store.state_dict())
    assert ids_of(resumed(2, batch)[0]) == ids_of(first)
    assert [rationale.age for rationale in resumed(2, batch)[0]] == [2] * 5


def test_the_store_forgets(lively):
    store = Store(2)
    for step in range(20):
        store.add(step, [(f"q{step}", [((step,), False)])])
    assert sorted(store.entries) == ["q18", "q19"]
    assert store.find("q19", 20) == (1, [((19,), False)])
    assert store.find("q19", 22) is None


def test_direct_queries_are_drawn_and_not_written(lively, batch):
    share = 0.4
    drawn = [is_drawn(seed, DIRECT, share) for seed in range(4000)]
    assert abs(sum(drawn) / 4000 - share) < 0.03
    batch.seeds[:] = [
        drawn.index(True),
        *[seed for seed in range(50) if not drawn[seed]][:3],
        60 + drawn[60:].index(True),
    ]
    plain, *_ = writer_of(lively)(0, batch)
    rationales, encoded, *_ = writer_of(lively, once=True, direct_share=share)(0, batch)
    assert [rationale.direct for rationale in rationales] == [True, False, False, False, True]
    assert ids_of(rationales) == [(), *ids_of(plain)[1:4], ()]
    report = rollout_report(Rollout(rationales), 1.0, lively.device)
    assert report["direct_rate"] == pytest.approx(0.4)
    assert report["rationale_tokens_mean"] == sum(map(len, ids_of(plain)[1:4])) / 3
    # Their anchor is the direct state.
    whole = do_step(lively, batch, rationales, encoded)
    assert_same_step(do_step(lively, batch, rationales, micro_batch_size=2), whole)
    by_hand = [Rationale(ids, False, None, 0.0) for ids in ids_of(rationales)]
    assert_same_step(do_step(lively, batch, by_hand), whole)


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("draw", [{}, {"temperature": 1.0, "num_rationales": 2}])
def test_a_drawn_number_of_tokens_ends_a_rationale(lively, batch, draw, reused):
    """The step is that of rationales cut by hand; of reused ones the whole is kept, and cut anew in every step."""
    most, loss, num_each = SETTINGS.max_new_tokens, LossConfig(budget=0.7), draw.get("num_rationales", 1)
    drawn = [drawn_cap(seed, 0.7, most) for seed in range(4000)]
    assert abs(sum(cap is None for cap in drawn) / 4000 - 0.3) < 0.03
    assert {cap for cap in drawn if cap is not None} == {*range(most)}
    batch.seeds[:] = [drawn.index(cap) for cap in (0, None, 2, 5, 1)]
    plain, *_ = writer_of(lively, **draw)(0, batch)
    writer = writer_of(lively, once=True, loss=loss, reuse_steps=3 * reused, **draw)
    rationales, encoded, *_ = writer(0, batch)
    caps = [cap for cap in (0, None, 2, 5, 1) for _ in range(num_each)]
    assert ids_of(rationales) == [one.ids[:cap] for one, cap in zip(plain, caps, strict=True)]
    ended = [cap is not None and len(one.ids) >= cap for one, cap in zip(plain, caps, strict=True)]
    assert [one.direct or one.capped for one in rationales] == ended
    assert [one.direct for one in rationales] == [cap == 0 for cap in caps]
    assert all(not one.forced for one, end in zip(rationales, ended, strict=True) if end)
    if not reused:
        assert all(one.state_D is not None for one in rationales)
    by_hand = [Rationale(ids, False, None, 0.0) for ids in ids_of(rationales)]
    whole = do_step(lively, batch, rationales, encoded)
    assert_same_step(do_step(lively, batch, rationales, micro_batch_size=2), whole)
    assert_same_step(do_step(lively, batch, by_hand), whole)
    report = rollout_report(Rollout(rationales), 1.0, lively.device)
    assert report["capped_rate"] == sum(one.capped for one in rationales) / sum(not one.direct for one in rationales)  # fmt: skip
    assert "capped_rate" not in rollout_report(Rollout(plain), 1.0, lively.device)
    batch.seeds[:] = [drawn.index(cap) for cap in (3, 0, None, 5, 1)]
    if reused:
        again, *_ = writer(1, batch)
        caps = [cap for cap in (3, 0, None, 5, 1) for _ in range(num_each)]
        assert ids_of(again) == [one.ids[:cap] for one, cap in zip(plain, caps, strict=True)]
        assert all(one.age == 1 for one in again)


def test_forced_stops_and_ages_are_of_what_the_model_wrote(lively):
    """With anchor=mix a model that never ends a rationale has a rate of 1, whatever the oracle's share."""
    cut = Rationale((5, 6), True, None, 0.0, age=2)
    given = Rationale((5,), False, None, 0.0, oracle=True)
    report = rollout_report(Rollout([cut, given, given, cut]), 1.0, lively.device)
    names = ("forced_rate", "rationale_age_mean", "rationale_tokens_mean", "oracle_rate", "tokens_per_s")
    assert [report[name] for name in names] == [1.0, 2.0, 1.5, 0.5, 0.0]


@pytest.mark.slow
def test_a_mix_of_anchors_is_the_step_of_either_where_it_stands(lively, batch):
    mix = LossConfig(anchor="mix", oracle_share=0.5)
    drawn = [is_drawn(seed, ORACLE, 0.5) for seed in range(4000)]
    assert abs(sum(drawn) / 4000 - 0.5) < 0.03
    assert drawn != [is_drawn(seed, DIRECT, 0.5) for seed in range(4000)]
    batch.seeds[:] = [drawn.index(True), *[seed for seed in range(50) if not drawn[seed]][:4]]
    plain, *_ = writer_of(lively)(0, batch)
    rationales, encoded, *_ = writer_of(lively, once=True, loss=mix)(0, batch)
    given = tuple(batch.oracle_ids[0][:-1])
    assert batch.oracle_ids[0][-1] == lively.emb_id
    assert ids_of(rationales) == [given, *ids_of(plain)[1:]]
    report = rollout_report(Rollout(rationales), 1.0, lively.device)
    assert report["oracle_rate"] == 0.2
    both = [one for group in rationales for one in (group, DIRECT_STATE)]
    assert (
        rollout_report(Rollout(both, num_beside=len(rationales)), 1.0, lively.device)["oracle_rate"] == 0.2
    )  # of the queries
    assert report["tokens_per_s"] == sum(map(len, ids_of(plain)[1:]))  # what was given was not written
    whole = do_step(lively, batch, rationales, encoded, objective=MIX)
    assert_same_step(do_step(lively, batch, rationales, micro_batch_size=2, objective=MIX), whole)
    # All of them the oracle's is anchor=oracle, none of them anchor=self.
    everyone, *_ = writer_of(lively, loss=LossConfig(anchor="mix", oracle_share=1.0))(0, batch)
    oracle = dataclasses.replace(OBJECTIVE, anchor="oracle")
    assert_same_step(
        do_step(lively, batch, everyone, objective=MIX), do_step(lively, batch, None, objective=oracle)
    )
    assert_same_step(do_step(lively, batch, plain, objective=MIX), do_step(lively, batch, plain))
    alone = [dataclasses.replace(one, alpha_lm=0.0) for one in (MIX, oracle)]
    assert_same_step(
        *(
            do_step(lively, batch, found, objective=one)
            for found, one in zip((everyone, None), alone, strict=True)
        )
    )


def test_the_share_of_oracles_falls_to_zero():
    falling = LossConfig(anchor="mix", oracle_share=0.8, oracle_decay_steps=10)
    assert [oracle_share(falling, step) for step in (0, 5, 10, 99)] == pytest.approx([0.8, 0.4, 0, 0])
    assert oracle_share(dataclasses.replace(falling, oracle_decay_steps=None), 99) == 0.8
    assert oracle_share(dataclasses.replace(falling, anchor="self"), 0) == 0


@pytest.mark.slow
def test_a_frozen_tower_sees_each_picture_once_a_step(lively, batch, monkeypatch):
    vision = lively.model.model.visual.requires_grad_(False)
    rationales = generate(lively, batch.queries, max_new_tokens=9, batch_size=5)
    expected = do_step(lively, batch, rationales, micro_batch_size=2)
    patches = []
    vision.register_forward_pre_hook(
        lambda module, args, kwargs: patches.append(sum(map(len, args[:1]))), with_kwargs=True
    )
    accelerator = launch.make_accelerator(TrainConfig())
    writer = make_writer(lively, lively, RECIPE, RECIPE.joint, accelerator, Kept("none", "auto"))
    assert lively.pictures is not None
    for _ in range(2):  # a step leaves nothing behind
        patches.clear()
        rationales, *_ = writer(0, batch)
        assert_same_step(do_step(lively, batch, rationales, micro_batch_size=2), expected)
        prompts = [*batch.queries, *batch.candidates]
        once = sum(len(prompt.pixels) for prompt in prompts if prompt.pixels is not None)
        masked = len(lively.family.square_picture(lively.model.config)[0])
        # Micro batches without any picture run the masked one.
        assert sum(patches) in range(once, once + 8 * masked + 1, masked)


def test_a_tower_that_trains_is_run_in_every_pass(lively):
    accelerator = launch.make_accelerator(TrainConfig())
    make_writer(lively, lively, RECIPE, RECIPE.joint, accelerator, Kept("none", "auto"))
    assert lively.pictures is None
