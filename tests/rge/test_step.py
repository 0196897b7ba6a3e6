"""The joint step against its definition: three stock forward passes, labels by hand, InfoNCE in loops."""

import json
import math
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from family_models import INSTALLED, PHOTOS, every_family
from stock import (
    TEMPERATURE,
    gradients,
    naive_info_nce,
    nll_of,
    state_at_end,
    stock_forward,
    worst_gradient_error,
)

from rge.data.collate import Collator, Source
from rge.data.config import DataConfig
from rge.data.mixture import Draw
from rge.data.sources import RecordFile
from rge.losses import CONTRASTIVE_LOSSES, info_nce, register_loss
from rge.model.adapters import add_adapters
from rge.model.backbone import load_backbone
from rge.model.config import LoraConfig
from rge.model.embedding_model import EmbeddingModel
from rge.model.families import with_pixels
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.rollout.generate import Rationale
from rge.rollout.micro_batches import chunks_of, encode_prompts
from rge.rollout.writer import Rollout
from rge.step.comparison import candidate_masks
from rge.step.training_step import TrainingStep


def three_passes(embedder, batch, self_ids, emb_id, objective, padding_side):
    """The two losses and the total, from one pass each over (query, own rationale), (query, oracle), candidate."""
    pass_over = partial(stock_forward, embedder, padding_side=padding_side)
    direct = [[emb_id]] * len(batch.candidates)
    anchors = {
        "self": [[*ids, emb_id] for ids in self_ids],
        "oracle": batch.oracle_ids,
        "none": [[emb_id]] * len(batch.queries),
    }
    hidden, _, starts = pass_over(batch.queries, anchors[objective.anchor])
    q = state_at_end(hidden, starts, batch.queries, anchors[objective.anchor])
    _, logits, starts = pass_over(batch.queries, batch.oracle_ids)
    nll, count = nll_of(logits, starts, batch.queries, batch.oracle_ids)
    hidden, logits, starts = pass_over(batch.candidates, direct)
    c = state_at_end(hidden, starts, batch.candidates, direct)
    if objective.lm_on_candidates:
        more_nll, more_count = nll_of(logits, starts, batch.candidates, direct)
        nll, count = nll + more_nll, count + more_count
    lm, contrastive = nll / count, naive_info_nce(q, c, batch)
    return lm, contrastive, objective.alpha_lm * lm + objective.alpha_con * contrastive


def run_step(embedder, batch, objective, rationales, micro_batch_size=100, encoded=None, **more):
    report = TrainingStep(embedder, embedder, objective, micro_batch_size, **more)(
        batch, Rollout(rationales, encoded)
    )
    return report, gradients(embedder)


def run_once(embedder, batch, objective, roll_out):
    """The step with its prompts encoded once: for the rollout and for the gradient."""
    encoded = encode_prompts(embedder, embedder, batch.queries)
    rationales = roll_out(embedder, batch, encoded=encoded)
    return rationales, *run_step(embedder, batch, objective, rationales, encoded=encoded)


LAYOUTS = {
    "mixed": (True, True),
    "text queries": (False, True),
    "text candidates": (True, False),
    "text": (False, False),
}


THREE_PASSES = [
    ("qwen2_5_vl", precision, padding_side, layout, anchor)
    for precision, padding_sides in [("float64", ("right", "left")), ("float32", ("right",))]
    for padding_side in padding_sides
    for layout, anchor in [("mixed", "self"), ("mixed", "oracle"), ("mixed", "none")]
    + [("text queries", "self"), ("text candidates", "self"), ("text", "self")]
] + [
    (family, precision, padding_side, layout, "self")
    for family in INSTALLED
    for precision, padding_side, layout in [
        ("float32", "right", "mixed"),
        ("float64", "left", "mixed"),
        ("float64", "right", "text queries"),
    ]
    if family != "qwen2_5_vl"
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lively_path", "precision", "padding_side", "layout", "anchor"), THREE_PASSES, indirect=["lively_path"]
)
def test_one_forward_equals_three_passes(
    lively_path, make_batch, roll_out, precision, padding_side, layout, anchor
):
    embedder = EmbeddingModel(load_backbone(lively_path, dtype=precision)).eval()
    batch = make_batch(PromptBuilder(embedder.processor), 0, *LAYOUTS[layout])
    rationales = roll_out(embedder, batch)
    # The tiny model with the pretrained tower writes rationales of one length for this batch.
    few = {"qwen2_5_vl": 2, PHOTOS: 0}.get(embedder.model.config.model_type, 1)
    assert len({len(rationale.ids) for rationale in rationales}) > few
    objective = Objective(1 / 11, 10 / 11, TEMPERATURE, anchor)

    # Which side the reference pads is nothing to ours; each way of encoding prompts meets one of them.
    if padding_side == "right":
        again, report, found = run_once(embedder, batch, objective, roll_out)
        assert [one.ids for one in again] == [other.ids for other in rationales]
        for one, other in zip(again, rationales, strict=True):
            torch.testing.assert_close(one.state_D, other.state_D, atol=1e-5, rtol=0)
    else:
        report, found = run_step(embedder, batch, objective, rationales)
    lm, contrastive, total = three_passes(
        embedder,
        batch,
        [rationale.ids for rationale in rationales],
        embedder.emb_id,
        objective,
        padding_side,
    )
    total.backward()
    lm, contrastive, total = float(lm.detach()), float(contrastive.detach()), float(total.detach())
    error, name = worst_gradient_error(found, gradients(embedder))

    loss_tolerance, gradient_tolerance = {"float32": (1e-6, 1e-4), "float64": (1e-9, 1e-6)}[precision]
    differences = [
        abs(report["loss_lm"] / lm - 1),
        abs(report["loss_contrastive"] / contrastive - 1),
        abs(report["loss"] / total - 1),
    ]
    assert max(differences) < loss_tolerance
    assert error < gradient_tolerance, name


def test_a_separate_weight_for_the_output_matrix(tiny_path, make_batch, roll_out, untied):
    """The reference holds for untied weights too, where the LM loss alone trains the output matrix."""
    batch = make_batch(PromptBuilder(untied.processor))
    rationales = roll_out(untied, batch)
    report, found = run_step(untied, batch, Objective(0.5, 0.5, TEMPERATURE), rationales)
    ids = [rationale.ids for rationale in rationales]
    *_, total = three_passes(untied, batch, ids, untied.emb_id, Objective(0.5, 0.5, TEMPERATURE), "right")
    total.backward()
    error, name = worst_gradient_error(found, gradients(untied))
    assert report["loss"] == pytest.approx(float(total.detach()), rel=1e-6)
    assert error < 1e-4, name
    # With one loss switched off, everything else still takes part: DDP waits for every gradient.
    _, found = run_step(untied, batch, Objective(0.0, 1.0, TEMPERATURE), rationales)
    assert not found["model.lm_head.weight"].any()
    assert found.keys() == dict(untied.named_parameters()).keys()


def other_tokens(ids, emb_id):
    """The same length, every token but `<emb>` another."""
    return [*((token + 7) % 300 for token in ids[:-1]), emb_id]


@every_family
def test_own_state_does_not_move_by_a_bit_when_the_oracle_changes(lively, make_prompts):
    builder = PromptBuilder(lively.processor)
    prompts = make_prompts(builder, 4)
    own = [[3, 5, 9, lively.emb_id], [lively.emb_id], [40, 41, lively.emb_id], [7] * 12 + [lively.emb_id]]
    oracle = [
        builder.rationale_ids(text, "") for text in ("this is a key", "egg", "a chick", "open this padlock")
    ]

    def states(oracles):
        branches = [
            [Branch(mine, read_state=True), Branch(theirs, read_state=True, predict=True)]
            for mine, theirs in zip(own, oracles, strict=True)
        ]
        with torch.no_grad():
            readout = lively(lively.pack(prompts, branches))[0]
        return readout.state_ND[0::2], readout.state_ND[1::2]

    before, oracle_before = states(oracle)
    after, oracle_after = states([other_tokens(ids, lively.emb_id) for ids in oracle])
    assert torch.equal(before, after)
    # Another length moves columns and padding, so rounding may differ, and nothing else.
    longer, _ = states([[50, 51, 52, *ids] for ids in oracle])
    torch.testing.assert_close(longer, before, atol=2e-6, rtol=0)
    # The same change is seen where it should be, so the perturbation is real.
    assert ((oracle_before - oracle_after).norm(dim=1) > 1e-3).all()


def test_no_gradient_flows_from_the_own_state_to_oracle_tokens(lively, make_prompts):
    prompt = make_prompts(PromptBuilder(lively.processor), 1)
    own, oracle = [3, 5, 9, lively.emb_id], [11, 12, 13, 14, lively.emb_id]
    packed = lively.pack(prompt, [[Branch(own, read_state=True), Branch(oracle, predict=True)]])
    embedded = []

    def keep(module, inputs, output):
        output.requires_grad_().retain_grad()
        embedded.append(output)

    handle = lively.model.get_input_embeddings().register_forward_hook(keep)
    state = lively(packed)[0].state_ND
    handle.remove()
    (state * torch.linspace(-1, 1, state.shape[1])).sum().backward()
    tails = packed.tails
    reached = embedded[0].grad[0, packed.prompts.input_ids_T.shape[0] :].abs().sum(dim=1)[tails.index_BS[0]]
    assert not reached[tails.segment_BS[0] == 2].any()
    assert (reached[tails.segment_BS[0] <= 1] > 0).all()


CHUNKS = [("qwen2_5_vl", anchor, size) for anchor in ("self", "oracle", "none") for size in (1, 2, 3)]
CHUNKS += [(family, "self", 2) for family in INSTALLED if family != "qwen2_5_vl"]


@pytest.mark.parametrize(("lively_path", "anchor", "micro_batch_size"), CHUNKS, indirect=["lively_path"])
def test_chunks_equal_the_undivided_batch(lively, make_batch, roll_out, anchor, micro_batch_size):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = roll_out(lively, batch)
    objective = Objective(0.3, 0.7, TEMPERATURE, anchor)
    whole, expected = run_step(lively, batch, objective, rationales)
    report, found = run_step(lively, batch, objective, rationales, micro_batch_size)
    assert report == pytest.approx(whole, rel=1e-6)
    error, name = worst_gradient_error(found, expected)
    assert error < 1e-5, name


@pytest.mark.parametrize("tokens", [1, 60, 90, 10_000])
def test_a_step_does_not_see_how_tokens_cut_it(lively, make_batch, roll_out, tokens):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales, objective = roll_out(lively, batch), Objective(0.3, 0.7, TEMPERATURE)
    whole, expected = run_step(lively, batch, objective, rationales)
    step = TrainingStep(lively, lively, objective, 100, micro_batch_tokens=tokens)
    report = step(batch, Rollout(rationales))
    assert report == pytest.approx(whole, rel=1e-6)
    error, name = worst_gradient_error(gradients(lively), expected)
    assert error < 1e-5, name
    chunks = chunks_of(batch, [len(batch.queries)], 100, tokens)
    assert (len(chunks) > 1) == (tokens < 10_000)


def test_tokens_bound_a_chunk_and_a_long_prompt_is_alone():
    """One document of 32 pages among 63 short queries: the largest pass is the document's, and not with 31 others."""

    def prompts(*lengths):
        return [torch.zeros(length) for length in lengths]

    short, document = [20] * 63, 4096
    batch = SimpleNamespace(queries=prompts(*short, document), candidates=prompts(*[15] * 64))

    def largest(**limit):
        chunks = chunks_of(batch, [64], 32, **limit)
        rows = [[*batch.queries[queries], *batch.candidates[candidates]] for queries, candidates in chunks]
        assert [len(one) for one in batch.queries] == [
            len(one) for queries, _ in chunks for one in batch.queries[queries]
        ]
        assert sum(candidates.stop - candidates.start for _, candidates in chunks) == 64
        return len(chunks), max(sum(map(len, each)) for each in rows)

    assert largest() == (2, 31 * 20 + 4096 + 32 * 15)
    count, most = largest(micro_batch_tokens=4500)
    assert (count, most) <= (4, 4500)


@pytest.mark.parametrize("lm_on_candidates", [True, False])
def test_cold_start_is_the_token_mean_over_the_global_batch(lively, make_batch, lm_on_candidates):
    """Alone, the LM loss needs no rollout; without the candidates' `<emb>` it needs no candidates either."""
    batch = make_batch(PromptBuilder(lively.processor))
    objective = Objective(1.0, 0.0, lm_on_candidates=lm_on_candidates)
    assert not objective.needs_rollout
    assert objective.needs_candidates == lm_on_candidates
    if not lm_on_candidates:
        batch.candidates.clear()
    whole, expected = run_step(lively, batch, objective, None)
    direct = [[lively.emb_id]] * len(batch.candidates)
    _, logits, starts = stock_forward(lively, batch.queries, batch.oracle_ids, "right")
    nll, count = nll_of(logits, starts, batch.queries, batch.oracle_ids)
    if direct:
        _, logits, starts = stock_forward(lively, batch.candidates, direct, "right")
        more, more_count = nll_of(logits, starts, batch.candidates, direct)
        nll, count = nll + more, count + more_count
    assert whole["loss"] == whole["loss_lm"] == pytest.approx(float(nll.detach()) / count, rel=1e-6)
    assert "loss_contrastive" not in whole
    report, found = run_step(lively, batch, objective, None, micro_batch_size=2)
    assert report == pytest.approx(whole, rel=1e-6)
    assert worst_gradient_error(found, expected)[0] < 1e-5


def test_masks_by_identity(lively, make_batch):
    """The batch of `make_batch`, written out. Candidates: a n0 b | b | a2 | c n3 | d e."""
    batch = make_batch(PromptBuilder(lively.processor))
    positive, ignored, _ = candidate_masks(batch, torch.tensor(batch.candidate_identity), offset=0)
    columns = ["a", "n0", "b-", "b", "a2", "c", "n3", "d", "e"]

    def names(mask):
        return [[columns[column] for column in row.nonzero().flatten()] for row in mask]

    assert names(positive) == [["a"], ["b"], ["a2"], ["c"], ["d"]]
    assert names(ignored) == [["a2"], ["b-"], ["a"], ["d", "e"], []]
    # Candidates of a rank before this one: columns move, and its duplicates are ignored as well.
    shifted = torch.tensor([batch.candidate_identity[0], 12345, *batch.candidate_identity])
    positive, ignored, _ = candidate_masks(batch, shifted, offset=2)
    assert positive.nonzero()[:, 1].tolist() == [2, 5, 6, 7, 9]
    assert ignored[0].nonzero().flatten().tolist() == [0, 6]


def test_without_lm_loss_no_oracle_is_needed(lively, make_batch, roll_out):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = roll_out(lively, batch)
    expected, gradient = run_step(lively, batch, Objective(0.0, 1.0, TEMPERATURE), rationales)
    batch.oracle_ids[:] = [[] for _ in batch.queries]
    report, found = run_step(lively, batch, Objective(0.0, 1.0, TEMPERATURE), rationales)
    assert report == expected
    assert "loss_lm" not in report
    assert worst_gradient_error(found, gradient)[0] == 0


@pytest.mark.slow
@every_family
def test_gradient_checkpointing_changes_nothing(lively, make_batch, roll_out):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = roll_out(lively, batch)
    objective = Objective(0.5, 0.5, TEMPERATURE)
    lively.train()
    _, expected = run_step(lively, batch, objective, rationales, micro_batch_size=3)
    lively.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert [rationale.ids for rationale in roll_out(lively, batch)] == [
        rationale.ids for rationale in rationales
    ]
    _, found = run_step(lively, batch, objective, rationales, micro_batch_size=3)
    assert worst_gradient_error(found, expected)[0] == 0


def kept_step(embedder, batch, objective, rationales, keep, encoded=None, micro_batch_size=2):
    """Report and gradients; dropout draws from the same numbers in every call."""
    torch.manual_seed(0)
    embedder.zero_grad(set_to_none=True)
    step = TrainingStep(embedder, embedder, objective, micro_batch_size, keep=keep)
    return step(batch, Rollout(rationales, encoded)), gradients(embedder)


KEPT = [
    (change, (number + later) % 2 == 1, form)
    for number, change in enumerate(["self", "oracle", "states", "adapters"])
    for later, form in enumerate(["sdpa", "varlen"])
]
"""Every pair of a change, checkpointing and a form."""


@pytest.mark.slow
@pytest.mark.parametrize(("change", "checkpointing", "form"), KEPT)
def test_kept_activations_change_nothing_but_the_work(
    lively, make_batch, roll_out, monkeypatch, change, checkpointing, form
):
    """In three micro batches; of forwards without gradient only those are left that make a rollout's missing states."""
    lively.double().train()
    lively.attention = form
    batch = make_batch(PromptBuilder(lively.processor))
    if change == "adapters":
        add_adapters(lively.model, LoraConfig(rank=2, alpha=4.0, vision=True), lively.emb_id)
        for name, parameter in lively.named_parameters():
            if "lora_B" in name:  # which starts as zero, and nothing would reach the other matrix
                torch.nn.init.normal_(parameter, std=0.02)
        lively.double()
    if checkpointing:
        lively.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    anchor = change if change == "oracle" else "none" if change == "states" else "self"
    objective = Objective(0.3, 0.7, TEMPERATURE, anchor, direct=0.4 * (change == "states"))
    rationales = roll_out(lively, batch)
    passes = []
    run = EmbeddingModel._run
    monkeypatch.setattr(
        EmbeddingModel,
        "_run",
        lambda self, packed: (passes.append(torch.is_grad_enabled()), run(self, packed))[1],
    )
    expected = kept_step(lively, batch, objective, rationales, "none")
    assert passes.count(False) == 6 - 3 * objective.needs_rollout
    passes.clear()
    found = kept_step(lively, batch, objective, rationales, "device")
    assert passes == [True] * 6
    encoded = encode_prompts(lively, lively, batch.queries, [slice(0, 1), slice(1, 3), slice(3, 5)], "device")
    once = kept_step(lively, batch, objective, roll_out(lively, batch, encoded=encoded), "device", encoded)
    for report, gradient in (found, once)[: 1 + objective.needs_rollout]:
        assert report == pytest.approx(expected[0], rel=1e-9)
        assert worst_gradient_error(gradient, expected[1])[0] < 1e-6  # transformers' norms round to float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("anchor", "checkpointing"), [("self", False), ("self", True), ("oracle", True), ("none", False)]
)
def test_kept_activations_with_dropout_are_equal_to_the_last_bit(
    lively, make_batch, roll_out, anchor, checkpointing
):
    """There the first pass without gradient is the second's to the bit, random numbers included."""
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = roll_out(lively, batch)
    lively.train()
    if checkpointing:
        lively.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in lively.model.model.language_model.layers:
        layer.self_attn.attention_dropout = 0.1
    objective = Objective(0.3, 0.7, TEMPERATURE, anchor)
    report, gradient = kept_step(lively, batch, objective, rationales, "none")
    after = torch.get_rng_state()
    found, kept_gradient = kept_step(lively, batch, objective, rationales, "device")
    assert found == report
    assert torch.equal(torch.get_rng_state(), after)
    assert gradient.keys() == kept_gradient.keys()
    for name, expected in gradient.items():
        assert torch.equal(kept_gradient[name], expected), name


def test_a_loss_that_is_not_finite_names_the_records(lively, make_batch, roll_out):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = roll_out(lively, batch)
    with torch.no_grad():
        lively.model.model.language_model.norm.weight[0] = math.nan
    with pytest.raises(FloatingPointError, match="the loss is nan; records of this batch: .*record3"):
        run_step(lively, batch, Objective(0.5, 0.5, TEMPERATURE), rationales)


def test_rationales_are_carried_as_ids(lively, make_batch):
    """Ids that no text tokenises to (single bytes of one word) reach the state as they are."""
    batch = make_batch(PromptBuilder(lively.processor))
    whole = lively.processor.tokenizer("picture").input_ids
    letters = [token for letter in "picture" for token in lively.processor.tokenizer(letter).input_ids]
    assert lively.processor.tokenizer.decode(whole) == lively.processor.tokenizer.decode(letters)
    losses = []
    for ids in (whole, letters):
        rationales = [Rationale(tuple(ids), False, F.normalize(torch.ones(32), dim=0), 0.0)] * len(
            batch.queries
        )
        losses.append(run_step(lively, batch, Objective(0.0, 1.0, TEMPERATURE), rationales)[0]["loss"])
    assert abs(losses[0] - losses[1]) > 1e-3


def test_labelled_negatives_and_all_positives_reach_the_loss_in_numbers(lively, make_batch, roll_out):
    """The batch of `make_batch`: 9 candidates; labelled are n0 and b of query 0, n3 of query 3, e of query 4."""
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = roll_out(lively, batch)
    objective = Objective(0.3, 0.7, TEMPERATURE)
    whole, _ = run_step(lively, batch, objective, rationales)
    assert whole["labelled_negatives_mean"] == pytest.approx(4 / 5)
    # 9 candidates less the positive and the ignored: a2 | b- | a | d, e | none.
    assert whole["negatives_mean"] == pytest.approx((7 + 7 + 7 + 6 + 8) / 5)
    # Query 3's other positive d, here in query 4's columns, made a candidate of its own: one more column for all.
    batch.more_positives.extend([[], [], [], [9], []])
    batch.candidates.append(batch.candidates[7])
    batch.candidate_identity.append(batch.candidate_identity[7])
    positive, ignored, _ = candidate_masks(batch, torch.tensor(batch.candidate_identity), offset=0)
    assert positive[3].nonzero().flatten().tolist() == [5, 9]
    assert ignored[3].nonzero().flatten().tolist() == [7, 8]
    assert ignored[4].nonzero().flatten().tolist() == [9]
    more, expected = run_step(lively, batch, objective, rationales)
    assert more["labelled_negatives_mean"] == pytest.approx(4 / 5)
    assert more["negatives_mean"] == pytest.approx((8 + 8 + 8 + 6 + 8) / 5)
    chunked, found = run_step(lively, batch, objective, rationales, micro_batch_size=2)
    assert chunked == pytest.approx(more, rel=1e-6)
    assert worst_gradient_error(found, expected)[0] < 1e-5


@pytest.fixture
def two_sources(tmp_path, picture, lively64):
    """Sources with pictures, several positives and labelled negatives, and different profiles, picture sizes and negatives."""
    for number in range(4):
        picture(80 + 30 * number, 120 - 20 * number, number).save(tmp_path / f"{number}.png")

    def target(number, **more):
        shown = {"image": f"{number % 4}.png"} if number % 2 else {}
        return {"id": f"t{number}", "text": f"egg {number}", **shown, **more}

    found = []
    for name, count, most, settings in (
        ("a", 3, 1600, DataConfig(profile="rge", max_negatives=2)),
        ("b", 4, 7056, DataConfig(profile="plain", max_negatives=0, positives="all")),
    ):
        records = [
            {
                "id": f"{name}{number}", "group": "g", "source": name, "split": "train", "instruction": "open it",
                "query": {"text": "what key" + " turns" * number, "images": [f"{number}.png"][: number % 3]},
                "positives": [target(number + place, rationale="a key" * (1 + place)) for place in (0, 9)],
                "negatives": [target(20 + number), target(31 + number)],
            }
            for number in range(count)
        ]  # fmt: skip
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        prompts = PromptBuilder(with_pixels(lively64.processor, 784, most), settings.profile)
        found.append(Source(RecordFile(path), prompts, settings, group=len(found)))
    return found


@pytest.mark.parametrize("micro_batch_size", [2, 100])
def test_sources_of_their_own_in_one_step_equal_separate_passes(
    lively64, two_sources, roll_out, monkeypatch, micro_batch_size
):
    """Losses are means over all queries and labels, each of them computed from its own source's batch alone."""
    draws = [
        Draw(source, index, index)
        for source, index in ((1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2), (1, 3))
    ]
    whole = Collator(two_sources).collate(draws)
    parts = [
        Collator([source]).collate([replace(draw, source=0) for draw in draws if draw.source == number])
        for number, source in enumerate(two_sources)
    ]
    assert whole.groups.count(0) == 3
    objective = Objective(0.3, 0.7, TEMPERATURE)
    report, found = run_step(
        lively64, whole, objective, roll_out(lively64, whole), micro_batch_size, sources=("a", "b", "none")
    )
    own = [{}, {}]
    expected: dict[str, torch.Tensor] = {}
    losses = {"loss_lm": 0.0, "loss_contrastive": 0.0, "hit_at_1": 0.0, "negatives_mean": 0.0}
    for number, part in enumerate(parts):
        rationales = roll_out(lively64, part)
        own[number]["rationale_tokens_mean"] = sum(len(one.ids) for one in rationales) / len(rationales)
        own[number]["queries"] = len(part.queries)
        labels = objective.num_lm_tokens(part) / objective.num_lm_tokens(whole)
        queries = len(part.queries) / len(whole.queries)
        for share, weights in ((labels, (0.3, 0.0)), (queries, (0.0, 0.7))):
            alone, gradient = run_step(lively64, part, Objective(*weights, TEMPERATURE), rationales)
            for name in losses.keys() & alone.keys():
                losses[name] += share * alone[name]
            own[number] |= {name: value for name, value in alone.items() if name != "loss"}
            for name, value in gradient.items():
                expected[name] = expected.get(name, 0) + share * value
    for name, value in losses.items():
        assert report[name] == pytest.approx(value, rel=1e-9), name
    for number, name in enumerate(("a", "b")):
        expected_own = own[number] | {
            "loss": 0.3 * own[number]["loss_lm"] + 0.7 * own[number]["loss_contrastive"]
        }
        by_source = {key: values[name] for key, values in report.items() if key.endswith("_by_source")}
        assert by_source == {f"{key}_by_source": pytest.approx(value) for key, value in expected_own.items()}
    assert all("none" not in values for key, values in report.items() if key.endswith("_by_source"))
    assert worst_gradient_error(found, expected)[0] < 1e-6

    # In a step that is not logged, the same without a second comparison.
    compared = []
    contrastive = Objective.contrastive
    monkeypatch.setattr(
        Objective, "contrastive", lambda *given, **more: compared.append(1) or contrastive(*given, **more)
    )
    step = TrainingStep(lively64, lively64, objective, micro_batch_size, sources=("a", "b", "none"))
    lively64.zero_grad(set_to_none=True)
    plain = step(whole, Rollout(roll_out(lively64, whole)), by_source=False)
    assert plain == {key: value for key, value in report.items() if not key.endswith("_by_source")}
    assert all(torch.equal(found[key], value) for key, value in gradients(lively64).items())
    assert len(compared) == 1


@pytest.mark.parametrize("micro_batch_size", [2, 100])
def test_matryoshka_sizes_reach_the_loss(lively, make_batch, roll_out, micro_batch_size):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = roll_out(lively, batch)
    with torch.no_grad():
        q = torch.stack([rationale.state_D for rationale in rationales])
        direct = Branch([lively.emb_id], read_state=True)
        c = lively(lively.pack(batch.candidates, [[direct]] * len(batch.candidates)))[0].state_ND
    cuts = [(F.normalize(q[:, :n], dim=1), F.normalize(c[:, :n], dim=1)) for n in (32, 16, 5)]
    expected = sum(float(naive_info_nce(*cut, batch)) for cut in cuts) / 3
    objective = Objective(0.0, 1.0, TEMPERATURE, matryoshka_dims=(16, 5))
    report, _ = run_step(lively, batch, objective, rationales, micro_batch_size)
    assert report["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [2, 100])
def test_a_second_contrastive_loss_is_trained_by_its_weight(lively, make_batch, roll_out, micro_batch_size):
    """Twice InfoNCE by two names is InfoNCE with the sum of the weights."""
    register_loss("again")(info_nce)
    try:
        batch = make_batch(PromptBuilder(lively.processor))
        rationales = roll_out(lively, batch)
        both = Objective(0.3, 0.7, TEMPERATURE, terms={"info_nce": 0.5, "again": 0.25})
        report, gradient = run_step(lively, batch, both, rationales, micro_batch_size)
        one, expected = run_step(
            lively,
            batch,
            Objective(0.3, 0.7, TEMPERATURE, terms={"info_nce": 0.75}),
            rationales,
            micro_batch_size,
        )
        assert report["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert (
            report["loss_again"] == report["loss_info_nce"] == pytest.approx(one["loss_contrastive"] / 0.75)
        )
        assert worst_gradient_error(gradient, expected)[0] < 1e-5
        plain, _ = run_step(lively, batch, Objective(0.3, 0.7, TEMPERATURE), rationales, micro_batch_size)
        assert plain["loss_contrastive"] == pytest.approx(one["loss_contrastive"] / 0.75)
    finally:
        del CONTRASTIVE_LOSSES._entries["again"]


JUDGED = Objective(
    0.3, 0.7, TEMPERATURE, terms={"info_nce": 0.5, "kl": 0.3, "margin_mse": 0.2}, teacher_temperature=0.2,
    teacher_scale=0.5,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [2, 100])
def test_a_judges_scores_are_learned_as_in_plain_autograd(lively, make_batch, roll_out, micro_batch_size):
    """On states of stock forwards; queries 0, 3 and 4 have a scored negative, of which 4's positive has no score."""
    batch = make_batch(PromptBuilder(lively.processor))
    batch.scores.extend([0.9, 0.2, 0.5, 0.8, None, 0.3, 0.4, None, 0.1])
    rationales = roll_out(lively, batch)
    report, gradient = run_step(lively, batch, replace(JUDGED, alpha_lm=0.0), rationales, micro_batch_size)
    assert report["scored_rate"] == pytest.approx(2 / 5)

    pass_over = partial(stock_forward, lively, padding_side="right")
    ends = [[*rationale.ids, lively.emb_id] for rationale in rationales]
    direct = [[lively.emb_id]] * len(batch.candidates)
    hidden, _, starts = pass_over(batch.queries, ends)
    q = state_at_end(hidden, starts, batch.queries, ends)
    hidden, _, starts = pass_over(batch.candidates, direct)
    c = state_at_end(hidden, starts, batch.candidates, direct)
    q, c = (part if isinstance(part, torch.Tensor) else torch.stack(part) for part in (q, c))
    listwise = margins = 0.0
    for row, (right, wrong) in enumerate(zip(batch.positive, batch.negatives, strict=True)):
        known = [place for place in (right, *wrong) if batch.scores[place] is not None]
        scores = torch.tensor([batch.scores[place] for place in known])
        if len(known) > 1:
            log_q = (q[row] @ c[known].T / TEMPERATURE).log_softmax(0)
            p = (scores / 0.2).softmax(0)
            listwise = listwise + (p * (p.log() - log_q)).sum() / 5
            if right in known:
                cosine = q[row] @ c[known].T
                apart = cosine[0] - cosine[1:] - 0.5 * (scores[0] - scores[1:])
                margins = margins + apart.square().mean() / 5
    assert report["loss_kl"] == pytest.approx(float(listwise), rel=1e-4)
    assert report["loss_margin_mse"] == pytest.approx(float(margins), rel=1e-4)
    lively.zero_grad()
    total = 0.5 * naive_info_nce(q, c, batch) + 0.3 * listwise + 0.2 * margins
    (0.7 * total).backward()
    assert worst_gradient_error(gradient, gradients(lively))[0] < 1e-4


def reversed_batch(batch):
    """The batch with its rows and candidates in the opposite order."""
    last = len(batch.candidates) - 1
    values = {item.name: getattr(batch, item.name)[::-1] for item in fields(batch)}
    for name in ("negatives", "more_positives"):
        values[name] = [[last - column for column in own] for own in values[name]]
    return replace(batch, **values | {"positive": [last - column for column in values["positive"]]})


def test_the_order_of_rows_changes_neither_loss_nor_gradient(lively, make_batch, roll_out):
    """Sorting by length may move rows between micro batches."""
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = roll_out(lively, batch)
    objective = Objective(0.3, 0.7, TEMPERATURE)
    whole, expected = run_step(lively, batch, objective, rationales)
    ordered = reversed_batch(batch)
    assert ordered.record_ids != batch.record_ids
    own = {name: rationale for name, rationale in zip(batch.record_ids, rationales, strict=True)}
    report, found = run_step(lively, ordered, objective, [own[name] for name in ordered.record_ids], 2)
    assert report == pytest.approx(whole, rel=1e-6)
    assert worst_gradient_error(found, expected)[0] < 1e-5
