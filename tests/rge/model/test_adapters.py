"""LoRA and DoRA: only adapters and the `<emb>` row move, merging equals the adapted model, chunks equal the whole."""

import pytest
import torch
from accelerate import Accelerator
from faults import error_about
from recorded import settings_of
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from rge.checkpoints.export import export
from rge.checkpoints.training_state import States
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.model.adapters import AdapterError, add_adapters, has_adapters, merge
from rge.model.backbone import load_backbone
from rge.model.config import LoraConfig
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.rollout.generate import generate
from rge.rollout.micro_batches import has_dropout
from rge.rollout.writer import Rollout
from rge.step.comparison import Candidates
from rge.step.training_step import TrainingStep, _Packs, _Passes

OBJECTIVE = Objective(0.3, 0.7, 0.07)


def adapt(embedder, **changes):
    torch.manual_seed(0)
    add_adapters(embedder.model, LoraConfig(rank=3, alpha=6.0, **changes), embedder.emb_id)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # PEFT starts with B = 0, where nothing would show
        for parameter in embedder.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return embedder


def trained_names(embedder):
    return {name for name, parameter in embedder.named_parameters() if parameter.requires_grad}


def step(embedder, batch, rationales, micro_batch_size=100, objective=OBJECTIVE):
    report = TrainingStep(embedder, embedder, objective, micro_batch_size)(batch, Rollout(rationales))
    found = {name: p.grad.clone() for name, p in embedder.named_parameters() if p.grad is not None}
    embedder.zero_grad(set_to_none=True)
    return report, found


def assert_equal_gradients(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name in expected:
        assert float((found[name] - expected[name]).norm() / expected[name].norm()) < tolerance, name


@pytest.mark.parametrize("vision", [False, True])
def test_what_is_trained(lively, vision):
    adapt(lively, vision=vision)
    names = trained_names(lively)
    assert "model.emb_row.weight" in names
    assert any("lora_A" in name and "language_model" in name for name in names)
    assert any("visual" in name for name in names) == vision
    assert all("lora_" in name or "emb_row" in name for name in names)
    assert not any("lm_head" in name for name in names)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_of_the_embedding_matrix_only_the_row_of_emb_moves(lively, untied, make_batch, roll_out, kind):
    embedder = lively if kind == "tied" else untied
    plain = {name: value.clone() for name, value in embedder.model.state_dict().items()}
    batch = make_batch(PromptBuilder(embedder.processor))
    adapt(embedder)
    rationales = roll_out(embedder, batch)
    optimizer = torch.optim.AdamW([p for p in embedder.parameters() if p.requires_grad], lr=0.1)
    TrainingStep(embedder, embedder, OBJECTIVE, 2)(batch, Rollout(rationales))  # fmt: skip
    before = {name: p.detach().clone() for name, p in embedder.named_parameters() if p.requires_grad}
    optimizer.step()
    moved = {name: p for name, p in embedder.named_parameters() if p.requires_grad}
    assert all(not torch.equal(before[name], moved[name]) for name in before)
    merged = dict(merge(embedder.model))
    assert merged.keys() == plain.keys()
    changed = {name for name in plain if not torch.equal(plain[name], merged[name])}
    matrices = {"model.language_model.embed_tokens.weight", "lm_head.weight"}
    assert changed & matrices == matrices
    for name in matrices:
        rows = (plain[name] != merged[name]).any(dim=1).nonzero().flatten().tolist()
        assert rows == [embedder.emb_id]
    same = torch.equal(*(merged[name][embedder.emb_id] for name in matrices))
    assert same == (kind == "tied")
    assert all("proj" in name for name in changed - matrices)


def test_the_row_learns_what_it_would_learn_inside_the_matrix(lively, make_batch, roll_out):
    """Without adapters' change, the gradient of the row is the row of the full matrix's gradient."""
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = roll_out(lively, batch)
    report, full = step(lively, batch, rationales)
    expected = full["model.model.language_model.embed_tokens.weight"][lively.emb_id]
    add_adapters(lively.model, LoraConfig(rank=2, alpha=4, targets=["q_proj"]), lively.emb_id)
    adapted, found = step(lively, batch, rationales)
    assert adapted == pytest.approx(report, rel=1e-6)
    torch.testing.assert_close(found["model.emb_row.weight"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"dora": True}, {"rslora": True, "targets": ["q_proj", "down_proj"]}, {"vision": True}],
    ids=str,
)
def test_a_merged_checkpoint_is_plain_and_the_same_model(lively, untied, picture, tmp_path, kind, changes):
    embedder = adapt(lively if kind == "tied" else untied, **changes)
    before = {name: value.clone() for name, value in embedder.state_dict().items()}
    settings = settings_of(
        emb_id=embedder.emb_id, profile="rge", max_prompt_tokens=2048, min_pixels=784, max_pixels=7056,
        max_new_tokens=12, reasons="query", stage="joint", step=7,
    )  # fmt: skip
    export(embedder, tmp_path / "final", settings, dict(merge(embedder.model)))
    assert all(torch.equal(before[name], value) for name, value in embedder.state_dict().items())

    _, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path / "final", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    encoder = Embedder.from_pretrained(tmp_path / "final")
    picture(50, 80).save(tmp_path / "egg.png")
    items = [
        Item("1", content_of("what is this", (str(tmp_path / "egg.png"),))),
        Item("2", content_of("open a locked chick")),
        Item("3", content_of("key")),
    ]
    found = encoder.encode(items, side="query", mode="reasoning")
    prompts = [PromptBuilder(embedder.processor).build(item, "query") for item in items]
    own = generate(embedder, prompts, max_new_tokens=12, batch_size=8)
    assert found.num_rationale_tokens.tolist() == [len(rationale.ids) for rationale in own]
    expected = torch.stack([rationale.state_D for rationale in own])
    torch.testing.assert_close(torch.from_numpy(found.embeddings), expected, atol=2e-5, rtol=0)


def test_merging_is_what_peft_does(lively):
    """The same weights as PEFT's own in-place merge, layer by layer."""
    adapt(lively, dora=True, vision=True)
    merged = dict(merge(lively.model))
    compared = 0
    for name, module in lively.model.named_modules():
        if hasattr(module, "lora_A"):
            module.merge()
            weight = module.get_base_layer().weight
            torch.testing.assert_close(merged[f"{name}.weight"], weight, atol=1e-6, rtol=1e-5)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_chunks_equal_the_whole_with_adapters(lively, make_batch, roll_out, dora, micro_batch_size):
    batch = make_batch(PromptBuilder(lively.processor))
    adapt(lively, dora=dora)
    rationales = roll_out(lively, batch)
    whole, expected = step(lively, batch, rationales)
    report, found = step(lively, batch, rationales, micro_batch_size)
    assert report == pytest.approx(whole, rel=1e-6)
    assert_equal_gradients(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("anchor", ["self", "none"])
def test_chunks_draw_the_dropout_of_their_first_forward(lively, make_batch, roll_out, anchor):
    """The reference holds all chunks' graphs at once and takes the loss of their states: nothing to replay."""
    objective = Objective(0.3, 0.7, 0.07, anchor)
    batch = make_batch(PromptBuilder(lively.processor))
    adapt(lively, dropout=0.3).train()
    assert has_dropout(lively)
    rationales = roll_out(lively, batch) if anchor == "self" else None
    torch.manual_seed(5)
    packs = _Packs(lively, objective, batch, Rollout(rationales or ()), 2)
    passes = _Passes(packs, 2, "none")
    readouts = [passes.second(lively, number) for number in range(len(packs.chunks))]
    q_ND, t_ND = (torch.cat([readout.state_ND for readout in side]) for side in zip(*readouts, strict=True))
    candidates = Candidates.gather([batch], t_ND)
    con = objective.contrastive(q_ND, t_ND, candidates.labels([batch], scored=False)).loss.value
    nll = sum(q.nll + t.nll for q, t in readouts)
    tokens = objective.num_lm_tokens(batch)
    total = 0.3 * nll / tokens + 0.7 * con / len(batch.queries)
    total.backward()
    expected = {name: p.grad.clone() for name, p in lively.named_parameters() if p.grad is not None}
    lively.zero_grad(set_to_none=True)

    torch.manual_seed(5)
    report, found = step(lively, batch, rationales, 2, objective)
    assert report["loss"] == pytest.approx(float(total.detach()), rel=1e-6)
    assert_equal_gradients(found, expected)
    torch.manual_seed(6)
    other, _ = step(lively, batch, rationales, 2, objective)
    assert abs(other["loss"] - report["loss"]) > 1e-4  # the masks do matter
    lively.eval()
    assert not has_dropout(lively)


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(lively, lively_path, make_batch, roll_out, tmp_path):
    """Dropout included; of a state only what is trained is on the disk."""
    accelerator = Accelerator(cpu=True)
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = roll_out(lively, batch)

    def start():
        embedder = adapt(EmbeddingModel(load_backbone(lively_path)), dropout=0.2).train()
        optimizer = torch.optim.AdamW([p for p in embedder.parameters() if p.requires_grad], lr=0.01)
        return embedder, optimizer, States(accelerator, embedder, optimizer, tmp_path, keep_last=1)

    def train(embedder, optimizer):
        TrainingStep(embedder, embedder, OBJECTIVE, 2)(batch, Rollout(rationales))  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()

    embedder, optimizer, states = start()
    train(embedder, optimizer)
    states.save(1, {})
    train(embedder, optimizer)
    states.wait()
    expected = embedder.state_dict()
    assert all(
        "lora_" in name or "emb_row" in name
        for name in load_file(tmp_path / "step_00000001/model.safetensors")
    )
    torch.manual_seed(99)
    embedder, optimizer, states = start()
    states.load(states.latest()[0])
    train(embedder, optimizer)
    assert all(torch.equal(expected[name], value) for name, value in embedder.state_dict().items())


def test_unknown_targets_are_named(lively):
    with error_about(AdapterError, "model.lora.targets", "unknown"):
        adapt(lively, targets=["q_proj", "q_prof"])
    assert not has_adapters(lively.model)
