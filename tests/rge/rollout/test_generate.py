"""Generation against transformers' own, and what a rationale must not depend on."""

import math

import numpy as np
import pytest
import torch
from family_models import PLUGINS, every_family, stock_inputs
from forwards import counted_forwards
from scipy import stats

from rge.common.parts import content_of
from rge.common.schema import Item
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.rollout.decoding import _choose
from rge.rollout.generate import generate

CAP = 24


@pytest.fixture
def prompts(lively, make_prompts):
    return make_prompts(PromptBuilder(lively.processor), 16)


def written(rationales):
    return [(rationale.ids, rationale.forced) for rationale in rationales]


def stock_generate(embedder, prompts, max_new_tokens):
    """transformers' greedy generate on a left-padded batch, with the same tokens forbidden."""
    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), embedder.pad_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = prompt.input_ids
        attention_mask[row, longest - len(prompt) :] = 1
    sequences = embedder.model.generate(
        **stock_inputs(embedder, prompts, input_ids, attention_mask),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=embedder.emb_id,
        pad_token_id=embedder.pad_id,
        suppress_tokens=embedder.suppressed_ids,
    )
    found = []
    for row in sequences[:, longest:].tolist():
        forced = embedder.emb_id not in row
        found.append((tuple(row) if forced else tuple(row[: row.index(embedder.emb_id)]), forced))
    return found


@every_family
def test_greedy_tokens_equal_transformers_generate(lively, prompts):
    rationales = generate(lively, prompts, max_new_tokens=CAP, batch_size=16)
    assert written(rationales) == stock_generate(lively, prompts, CAP)
    # The case is worth something: varied tokens, rows that stop at many lengths, and rows that do not stop.
    if lively.model.config.model_type in PLUGINS:
        assert len({token for rationale in rationales for token in rationale.ids}) > 20
        return
    lengths = {len(rationale.ids) for rationale in rationales if not rationale.forced}
    assert len(lengths) >= 6
    assert min(lengths) <= 3
    assert sum(rationale.forced for rationale in rationales) >= 2
    assert len({token for rationale in rationales for token in rationale.ids}) > 50


@every_family
def test_state_equals_a_forward_over_prompt_and_rationale(lively, prompts):
    rationales = generate(lively, prompts, max_new_tokens=CAP, batch_size=16)
    branches = [[Branch([*rationale.ids, lively.emb_id], read_state=True)] for rationale in rationales]
    with torch.no_grad():
        again = lively(lively.pack(prompts, branches))[0].state_ND
    states = torch.stack([rationale.state_D for rationale in rationales])
    torch.testing.assert_close(states, again, atol=1e-5, rtol=0)
    torch.testing.assert_close(states.norm(dim=1), torch.ones(16))


def test_emb_as_the_first_token_gives_the_direct_state(lively, prompts):
    with torch.no_grad():
        states = lively.model(input_ids=prompts[1].input_ids[None], output_hidden_states=True).hidden_states[
            -1
        ]
        lively.model.get_input_embeddings().weight[lively.emb_id] = 9 * states[0, -1]
    rationale = generate(lively, [prompts[1]], max_new_tokens=CAP, batch_size=1)[0]
    assert (rationale.ids, rationale.forced) == ((), False)
    with torch.no_grad():
        direct = lively(lively.pack([prompts[1]], [[Branch([lively.emb_id], read_state=True)]]))[0].state_ND[
            0
        ]
    torch.testing.assert_close(rationale.state_D, direct, atol=1e-5, rtol=0)
    # Kept from that, it takes its second choice.
    kept = generate(lively, [prompts[1]], max_new_tokens=CAP, batch_size=1, min_new_tokens=1)[0]
    with torch.no_grad():
        logits = lively.model(input_ids=prompts[1].input_ids[None]).logits[0, -1]
    logits[[lively.emb_id, *lively.suppressed_ids]] = float("-inf")
    assert kept.ids[0] == int(logits.argmax())


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_row_does_not_depend_on_the_others(lively, prompts, temperature):
    seeds = list(range(100, 116))
    settings = {"max_new_tokens": CAP, "temperature": temperature}
    together = generate(lively, prompts, batch_size=16, seeds=seeds, **settings)
    limit = 3 * max(map(len, prompts))
    divided = [{"batch_size": 5}, {"batch_size": 1}, {"batch_size": 16, "batch_tokens": limit}]
    for most in divided[: 1 if temperature else 3]:  # one by one takes most of the time
        with counted_forwards() as forwards:
            parts = generate(lively, prompts, seeds=seeds, **most, **settings)
        assert forwards.within(limit) or "batch_tokens" not in most
        assert written(parts) == written(together)
        for one, other in zip(parts, together, strict=True):
            torch.testing.assert_close(one.state_D, other.state_D, atol=1e-5, rtol=0)
    backwards = generate(lively, prompts[::-1], batch_size=7, seeds=seeds[::-1], **settings)
    assert written(backwards[::-1]) == written(together)


def test_sampling_repeats_with_its_seed_and_varies_with_it(lively, prompts):
    settings = {"max_new_tokens": CAP, "batch_size": 16, "temperature": 1.0}
    first = generate(lively, prompts, seeds=list(range(16)), **settings)
    torch.manual_seed(123)  # the global generator has no say
    again = generate(lively, prompts, seeds=list(range(16)), **settings)
    other = generate(lively, prompts, seeds=list(range(16, 32)), **settings)
    assert written(first) == written(again)
    assert all(torch.equal(one.state_D, two.state_D) for one, two in zip(first, again, strict=True))
    assert sum(one != two for one, two in zip(written(first), written(other), strict=True)) > 12
    assert not {token for rationale in first for token in rationale.ids} & set(lively.suppressed_ids)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_samples_follow_the_models_distribution(lively, temperature):
    prompt = PromptBuilder(lively.processor).build(Item("q", content_of("egg")), "query")
    count = 3000
    drawn = generate(
        lively,
        [prompt] * count,
        max_new_tokens=1,
        batch_size=500,
        temperature=temperature,
        seeds=list(range(count)),
    )
    tokens = [rationale.ids[0] if rationale.ids else lively.emb_id for rationale in drawn]
    with torch.no_grad():
        logits = lively.model(input_ids=prompt.input_ids[None]).logits[0, -1].double()
    logits[lively.suppressed_ids] = -np.inf
    expected = torch.softmax(logits / temperature, dim=0).numpy() * count
    observed = np.bincount(tokens, minlength=len(expected))
    assert not observed[expected == 0].any()
    common = expected >= 5
    assert common.sum() > 10
    rest_expected, rest_observed = expected[~common].sum(), observed[~common].sum()
    _, p_value = stats.chisquare(
        np.append(observed[common], rest_observed), np.append(expected[common], rest_expected)
    )
    assert p_value > 1e-3


def test_a_random_number_at_the_edge_never_draws_an_impossible_token():
    """Zero falls on the first token that has any probability, the greatest number below one on the last."""
    logits = torch.tensor([[-np.inf, 0.0, -np.inf, 0.0, -np.inf]] * 3)
    uniform = torch.tensor([0.0, 0.5, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert _choose(logits, 1.0, uniform).tolist() == [1, 3, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("margins", [False, True])
def test_weights_that_are_not_numbers_give_states_that_are_none(lively, prompts, temperature, margins):
    """The loss says so, and names the records; here nothing may be looked up under a token that does not exist."""
    lively.model.model.language_model.norm.weight.data[0] = math.nan
    seeds = range(len(prompts))
    found = generate(
        lively, prompts, max_new_tokens=4, batch_size=3, temperature=temperature, seeds=seeds, margins=margins
    )
    assert all(rationale.state_D.isnan().any() for rationale in found)


def test_settings_of_the_model_have_no_influence(lively, prompts):
    expected = generate(lively, prompts, max_new_tokens=CAP, batch_size=16)
    settings = lively.model.generation_config
    settings.do_sample, settings.temperature, settings.top_p, settings.repetition_penalty = (
        True,
        9.0,
        0.1,
        3.0,
    )
    settings.max_new_tokens, settings.eos_token_id, settings.suppress_tokens = 1, 5, [lively.emb_id]
    found = generate(lively, prompts, max_new_tokens=CAP, batch_size=16)
    assert written(found) == written(expected)
    # They do have influence on transformers' own generate, so the settings above are not idle.
    assert stock_generate(lively, prompts, CAP) != written(expected)


def test_training_mode_is_restored_and_does_not_matter(lively, prompts):
    expected = written(generate(lively, prompts, max_new_tokens=CAP, batch_size=16))
    lively.model.gradient_checkpointing_enable()
    lively.train()
    assert written(generate(lively, prompts, max_new_tokens=CAP, batch_size=16)) == expected
    assert all(module.training for module in lively.modules())


@pytest.mark.parametrize("cap", [1, 2, 7])
def test_the_cap_counts_tokens_and_forces_emb(lively, prompts, cap):
    long = generate(lively, prompts, max_new_tokens=CAP, batch_size=16)
    for short, full in zip(generate(lively, prompts, max_new_tokens=cap, batch_size=16), long, strict=True):
        # `<emb>` is one of the cap's tokens: a rationale of cap tokens has no room left for it.
        assert short.ids == full.ids[:cap]
        assert short.forced == (len(full.ids) >= cap)


def test_emb_at_the_last_allowed_token_is_not_forced(lively, prompts):
    long = generate(lively, prompts, max_new_tokens=CAP, batch_size=16)
    row = next(row for row, rationale in enumerate(long) if not rationale.forced and len(rationale.ids) > 2)
    exact = generate(lively, [prompts[row]], max_new_tokens=len(long[row].ids) + 1, batch_size=1)[0]
    assert (exact.ids, exact.forced) == (long[row].ids, False)
    torch.testing.assert_close(exact.state_D, long[row].state_D, atol=1e-5, rtol=0)
    cut = generate(lively, [prompts[row]], max_new_tokens=len(long[row].ids), batch_size=1)[0]
    # The appended `<emb>` stands where the model's own would: the same state, but counted.
    assert (cut.ids, cut.forced) == (long[row].ids, True)
    torch.testing.assert_close(cut.state_D, long[row].state_D, atol=1e-5, rtol=0)


CAPS = [0, 1, 2, 5, CAP, 3, 0, 9] * 2


@pytest.mark.parametrize("draw", [{}, {"temperature": 1.0, "seeds": range(32), "num_each": 2}])
def test_each_row_of_a_batch_has_its_own_cap(lively, prompts, draw):
    """As a batch written with that cap alone; a cap of 0 is the direct state, which nothing else precedes."""
    num_each = draw.get("num_each", 1)
    found = generate(
        lively, prompts, max_new_tokens=CAP, batch_size=7, caps=CAPS, with_direct=True, margins=True, **draw
    )
    found = [found[row * (num_each + 1) : (row + 1) * (num_each + 1)] for row in range(16)]
    for cap in sorted(set(CAPS) - {0}):
        alone = generate(lively, prompts, max_new_tokens=cap, batch_size=16, **draw)
        for row in (row for row in range(16) if CAPS[row] == cap):
            expected = alone[row * num_each : (row + 1) * num_each]
            assert written(found[row][:-1]) == written(expected)
            for one, other in zip(found[row], expected, strict=False):
                torch.testing.assert_close(one.state_D, other.state_D, atol=1e-5, rtol=0)
    for *own, direct in (found[row] for row in range(16) if CAPS[row] == 0):
        for one in own:
            assert (one.ids, one.forced, one.direct, one.margin) == ((), False, True, math.inf)
            torch.testing.assert_close(one.state_D, direct.state_D)
    for caps in ([1], [CAP + 1] * 16, [-1] * 16):
        with pytest.raises(ValueError):
            generate(lively, prompts, max_new_tokens=CAP, batch_size=16, caps=caps)


@pytest.mark.parametrize("settings", [{"min_new_tokens": 4}, {"direct_above": 0.0}, {"direct_above": 1.0}])
def test_a_cap_precedes_what_else_decides_on_emb(lively, prompts, settings):
    free = generate(lively, prompts, max_new_tokens=CAP, batch_size=16, **settings)
    found = generate(lively, prompts, max_new_tokens=CAP, batch_size=16, caps=[3] * 16, **settings)
    assert written(found) == [(one.ids[:3], len(one.ids) >= 3) for one in free]


@pytest.mark.slow
@every_family
def test_text_only_batches_and_no_prompts(lively, make_prompts):
    prompts = make_prompts(PromptBuilder(lively.processor), 6, pictures=False)
    together = generate(lively, prompts, max_new_tokens=CAP, batch_size=6)
    apart = [generate(lively, [prompt], max_new_tokens=CAP, batch_size=1)[0] for prompt in prompts]
    assert written(together) == written(apart)
    assert generate(lively, [], max_new_tokens=CAP, batch_size=4) == []


def test_progress_and_seconds(lively, prompts):
    seen = []
    rationales = generate(lively, prompts[:7], max_new_tokens=3, batch_size=3, on_progress=seen.append)
    assert seen == [3, 3, 1]
    assert all(rationale.seconds > 0 for rationale in rationales)


@pytest.mark.slow
@pytest.mark.parametrize("num_each", [1, 3])
def test_tokens_are_told_as_they_are_written_and_who_listens_may_end_it(lively, prompts, num_each):
    told: dict[int, list[int]] = {}
    sampling = {"temperature": 1.0, "seeds": range(16 * num_each)} if num_each > 1 else {}
    settings = {"max_new_tokens": CAP, "batch_size": 6, "num_each": num_each, **sampling}
    found = generate(
        lively, prompts, **settings, on_token=lambda row, token: told.setdefault(row, []).append(token)
    )
    assert {row: tuple(tokens) for row, tokens in told.items()} == {
        row: (*rationale.ids, lively.emb_id) for row, rationale in enumerate(found)
    }
    assert written(found) == written(generate(lively, prompts, **settings))

    def leave(row, token):
        raise InterruptedError

    lively.train()
    with pytest.raises(InterruptedError):
        generate(lively, prompts, **settings, on_token=leave)
    assert lively.training


def test_states_carry_no_gradient(lively, prompts):
    rationales = generate(lively, prompts[:2], max_new_tokens=3, batch_size=2)
    assert not any(rationale.state_D.requires_grad for rationale in rationales)


def test_errors(lively, prompts):
    with pytest.raises(ValueError):
        generate(lively, prompts, max_new_tokens=0, batch_size=1)
    with pytest.raises(ValueError):
        generate(lively, prompts, max_new_tokens=1, batch_size=1, temperature=-0.5)
    with pytest.raises(ValueError):
        generate(lively, prompts, max_new_tokens=2, batch_size=1, min_new_tokens=2)
    with pytest.raises(ValueError):
        generate(lively, prompts, max_new_tokens=1, batch_size=1, temperature=1.0)
    with pytest.raises(ValueError):
        generate(lively, prompts, max_new_tokens=1, batch_size=1, temperature=1.0, seeds=[1])
