"""Two real processes against one: gathering, both losses, every gradient, whatever the ranks' batches look like."""

import copy
from pathlib import Path
from types import SimpleNamespace

import batch_losses
import forked
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.utils import DistributedType
from faults import error_about
from paths import WORKERS
from pdfs import GREEN, RED, page, pdf

from rge.common.parts import PdfPart, TextPart, VideoPart
from rge.common.schema import Item
from rge.config import Recipe
from rge.distributed import collectives as dist
from rge.distributed import launch
from rge.distributed.config import TrainConfig
from rge.identity.run_identity import flattened
from rge.loss_config import AdaptiveConfig, LossConfig
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.optim.muon import orthogonal
from rge.rl.config import RewardConfig, RLConfig
from rge.rl.credit import Reinforcement
from rge.rl.reference import Reference
from rge.rollout.config import RolloutConfig
from rge.rollout.generate import Rationale, generate
from rge.rollout.writer import Rollout, rollout_report, sample_seeds
from rge.step.training_step import TrainingStep


def start_workers(script: str, *words: str | Path) -> None:
    done = forked.run_pair(WORKERS / script, *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
def test_rows_are_gathered_with_the_gradient_of_one_process(tmp_path):
    world = 2
    total = sum(rank + 2 for rank in range(world))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(total, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(total, total, generator=generator, dtype=torch.float64)
    torch.save((rows, weights), tmp_path / "rows.pt")
    start_workers("gather.py", tmp_path)

    whole = rows.clone().requires_grad_()
    (whole @ whole.T * weights).sum().backward()
    start = 0
    for rank in range(world):
        seen = torch.load(tmp_path / f"seen_{rank}.pt")
        assert seen["world"] == world
        assert seen["sizes"] == [other + 2 for other in range(world)]
        assert torch.equal(seen["rows"], rows)
        torch.testing.assert_close(seen["gradient"], whole.grad[start : start + rank + 2], atol=1e-12, rtol=0)
        assert seen["ids"].tolist() == [
            10 * other + row for other in range(world) for row in range(other + 2)
        ]
        assert seen["sum"] == pytest.approx([world * (world + 1) / 2, world * 1e-12], rel=1e-12)
        assert seen["detached"] is False
        # Each rank does its share of Muon's work; every rank has all of it.
        for found, one in zip(
            seen["orthogonal"],
            orthogonal([rows.T.float(), weights.float(), rows[:2].float()]),
            strict=True,
        ):
            torch.testing.assert_close(found, one)
        start += rank + 2


NAMES = [
    f"{layout}-{anchor}-{micro}"
    for layout in ("mixed", "one rank without pictures", "no rank with pictures")
    for anchor in ("self", "oracle", "none")
    for micro in (100, 2)
    if anchor == "self" or layout == "mixed"
] + ["cold start-100", "cold start-2", "cold start without candidates-2", "no lm loss-100", "no lm loss-2"]
RL_NAMES = ["rl dapo-100", *(f"rl {loss_type}-2" for loss_type in ("grpo", "dr_grpo", "dapo"))]
RL_NAMES += ["rl dapo with kl-100", "rl dapo with kl-2", "rl dapo with a pool-2"]
NAMES += RL_NAMES
NAMES += ["both states-100", "both states-2"]
NAMES += ["adaptive states-100", "adaptive states-2"]
NAMES += ["judged-self-100", "judged-self-2"]  # one rank's queries have scores
NAMES += ["gathered-self-100", "gathered-self-2", "gathered-none-groups-2"]  # a loss sees all queries
NAMES += ["capped-self-2", "capped-self-once-100"]
NAMES += ["mixed-self-tokens-100", "one rank without pictures-none-tokens-3"]  # cut by tokens
NAMES += ["mixed-self-keep-2", "mixed-self-once-keep-2", "mixed-none-keep-2", "rl dapo-keep-2"]
NAMES += [
    "mixed-self-groups-2",
    "mixed-none-groups-100",
]  # of sources whose queries see their own candidates alone
# One rank shows clips, the other pages of a document.
NAMES += ["clips and pages-self-2", "clips and pages-self-tokens-99", "clips and pages-self-once-keep-2"]
NAMES += ["mixed-self-once-100", "one rank without pictures-self-once-100"]  # two forwards, one backward


EASY = 0.5
"""Of the batch's ten queries, not of the five of each process."""


@pytest.fixture(scope="module")
def paired(tmp_path_factory):
    """Filled by the first test that needs it: results of both ranks, and the cases."""
    return {"folder": tmp_path_factory.mktemp("paired")}


def rl_recipe(loss_type: str, folder: Path) -> Recipe:
    """The stage rl, with rewards of all candidates, of those of other queries, and of words."""
    rewards = [RewardConfig(name) for name in ("margin", "grace", "length")]
    loss_type, _, extra = loss_type.partition(" with ")
    candidates = "batch"
    if extra == "a pool":
        ids = [
            "a",
            "b",
            "a2",
            "c",
            "d",
            "n0",
            "n3",
            *(f"x{number}" for number in range(6)),
        ]  # two unequal shares
        table = {
            "id": ids,
            "text": [f"{name} key" for name in ids],
            "identity": ["a" if name == "a2" else None for name in ids],
        }
        pq.write_table(pa.table(table), folder / "corpus.parquet")
        candidates = f"pool:{folder}"
    return Recipe(
        recipe="tiny",
        stage="rl",
        loss=LossConfig(alpha_lm=0.5, alpha_con=0.5, temperature=0.07),
        rollout=RolloutConfig(max_new_tokens=9),
        rl=RLConfig(
            alpha_con=0.5,
            num_rationales=3,
            loss_type=loss_type,
            scale_rewards="batch",
            rewards=rewards,
            beta=0.3 * (extra == "kl"),
            candidates=candidates,
        ),
        train=TrainConfig(micro_batch_size=2),
    )


def sampled(embedder, batch) -> list[Rationale]:
    seeds = [seed for own in batch.seeds for seed in sample_seeds(own, 3)]
    settings = {"max_new_tokens": 9, "batch_size": 30, "temperature": 1.0, "num_each": 3}
    return generate(embedder, batch.queries, seeds=seeds, **settings)


@pytest.fixture
def cases(paired, lively_path, make_batch, roll_out, without_negatives, longer_rationales, picture):
    if "cases" in paired:
        return paired
    embedder = EmbeddingModel(load_backbone(lively_path, add_emb=True)).eval()
    builder = PromptBuilder(embedder.processor)
    cases = {}
    for name in NAMES:
        layout, micro = name.split("-")[0], int(name.split("-")[-1])
        pictures = {"one rank without pictures": (True, False), "no rank with pictures": (False, False)}.get(
            layout, (True, True)
        )
        batches = [
            make_batch(builder, 0, pictures[0], pictures[0]),
            longer_rationales(without_negatives(make_batch(builder, 10, pictures[1], pictures[1])), builder),
        ]
        for batch in batches if "-groups-" in name else ():
            one = layout == "gathered" and batch is batches[1]  # the second rank has one source only
            of_rows = [1 if one else row % 2 for row in range(len(batch.queries))]
            batch.sources.extend(of_rows)
            batch.groups.extend(of_rows)
            owners = {column: row for row, column in enumerate(batch.positive)}
            owners |= {column: row for row, columns in enumerate(batch.negatives) for column in columns}
            batch.candidate_groups.extend(of_rows[owners[column]] for column in range(len(batch.candidates)))
        if layout == "clips and pages":
            clip = VideoPart(tuple(picture(84, 56, number) for number in range(4)), fps=1.0)
            pages = PdfPart(pdf([page("a", RED), page("b", GREEN)]), dpi=20)
            for batch, shown in zip(batches, (clip, pages), strict=True):
                batch.queries[1] = builder.build(
                    Item("q", (TextPart("see"), shown, TextPart("so?"))), "query"
                )
                batch.candidates[0] = builder.build(Item("c", (shown,)), "candidate")
        rationales, rl = [roll_out(embedder, batch) for batch in batches], None
        if layout == "capped":
            settings = {"max_new_tokens": 12, "batch_size": 8, "caps": [0, 2, 12, 5, 1]}
            rationales = [generate(embedder, batch.queries, **settings) for batch in batches]
        if layout == "judged":
            batches[0].scores.extend([0.9, 0.2, 0.5, 0.8, None, 0.3, 0.4, 0.6, 0.1])
            batches[1].scores.extend([None] * len(batches[1].candidates))
        if layout.startswith("rl "):
            rl = rl_recipe(layout.removeprefix("rl "), paired["folder"])
            objective = Objective.of(rl, "rl")
            rationales = [sampled(embedder, batch) for batch in batches]
        elif layout.endswith(" states"):
            adaptive = AdaptiveConfig(share=0.5, margin=-3.0) if layout == "adaptive states" else None
            objective = Objective(1 / 11, 10 / 11, 0.07, direct=0.3, adaptive=adaptive)
            settings = {"max_new_tokens": 12, "batch_size": 8, "with_direct": True}
            rationales = [generate(embedder, batch.queries, **settings) for batch in batches]
        elif layout.startswith("cold start"):
            objective = Objective(1.0, 0.0, lm_on_candidates=layout == "cold start")
        elif layout == "judged":
            terms = {"info_nce": 0.5, "kl": 0.3, "margin_mse": 0.2}
            objective = Objective(
                1 / 11, 10 / 11, 0.07, terms=terms, teacher_temperature=0.2, teacher_scale=0.5
            )
        elif layout == "gathered":
            terms = {"info_nce": 0.5, batch_losses.NAME: 0.5}
            objective = Objective(
                1 / 11, 10 / 11, 0.07, name.split("-")[1], terms=terms, matryoshka_dims=(16,)
            )
        elif layout == "no lm loss":
            objective = Objective(0.0, 1.0, 0.07)
        else:
            objective = Objective(1 / 11, 10 / 11, 0.07, name.split("-")[1])
        cases[name] = {
            "batches": batches,
            "rationales": rationales,
            "objective": objective,
            "micro_batch_size": micro,
            "micro_batch_tokens": 80 if "-tokens-" in name else None,
            "once": "-once-" in name,
            "keep": "device" if "-keep-" in name else "none",
            "easy_share": EASY * (objective.adaptive is not None),
            "rl": rl,
            "sources": ("one", "two") if "-groups-" in name else (),
        }
    torch.save(cases, paired["folder"] / "cases.pt")
    start_workers("step.py", lively_path, paired["folder"])
    paired["cases"] = cases
    paired["found"] = [torch.load(paired["folder"] / f"found_{rank}.pt") for rank in range(2)]
    return paired


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_step_on_two_processes_equals_one(cases, lively_path, backbone_of, name, merge):
    lively = EmbeddingModel(backbone_of(lively_path, add_emb=True)).eval()
    case, (first, second) = cases["cases"][name], (found[name] for found in cases["found"])
    whole = merge(case["batches"])
    rationales = case["rationales"][0] + case["rationales"][1]
    credit = None
    if case["rl"] is not None:
        reference = None
        if case["rl"].rl.beta:
            moved = copy.deepcopy(lively).requires_grad_(False)
            for parameter in moved.parameters():
                parameter.mul_(1.02)
            reference = Reference(moved, 1.0, micro_batch_size=100)
        stage = Reinforcement(case["rl"], lively, reference, cases["folder"])
        credit = stage.begin(whole, rationales, False)
    rollout = Rollout(rationales, easy_share=case["easy_share"])
    step = TrainingStep(lively, lively, case["objective"], 100, sources=case["sources"])
    with batch_losses.registered():
        report = flattened(step(whole, rollout, credit))
    assert first["report"] == second["report"]
    # A policy's loss at its writing is the mean of advantages, nearly nothing.
    assert flattened(first["report"]) == pytest.approx(report, rel=1e-5, abs=1e-6 if credit else None)
    if case["objective"].adaptive is not None:
        assert report["easy_rate"] == EASY
    if case["objective"].alpha_con > 0:
        # Counted by hand: the first rank's queries have 4 labelled negatives, the second's none, 10 queries in all.
        assert first["report"]["labelled_negatives_mean"] == 4 / 10
    for key, parameter in lively.named_parameters():
        assert torch.equal(first["gradients"][key], second["gradients"][key])
        error = (first["gradients"][key] - parameter.grad).norm()
        # Advantages divide small differences of rewards: what rounding does to those is larger.
        assert error <= (1e-4 if credit else 1e-5) * parameter.grad.norm(), key
    if credit is not None:
        assert ("kl" in first["report"]) == bool(case["rl"].rl.beta)
        assert first["report"].get("kl", 1.0) > 1e-3
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in lively.parameters()])
    assert first["norm"] == pytest.approx(float(norm), rel=1e-5)
    expected = rollout_report(Rollout(rationales), 1.0, lively.device)
    assert first["rollout"] == second["rollout"] == pytest.approx(expected)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_process_ends_both_and_names_its_records(cases):
    ids = cases["cases"]["cold start-2"]["batches"][1].record_ids
    messages = [found["broken"] for found in cases["found"]]
    assert messages == [f"the loss is nan; records of this batch: {ids}"] * 2


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(value):
    """As after a finite loss: each of these would make every weight NaN, and the next state too."""
    accelerator = launch.make_accelerator(TrainConfig())
    net = torch.nn.Linear(2, 1, bias=False)
    before = net.weight.detach().clone()
    model, optimizer = dist.prepare(
        accelerator, net, torch.optim.AdamW(net.parameters(), lr=1.0), max_grad_norm=1.0
    )
    accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    net.weight.grad[0, 1] = float(value)
    with error_about(FloatingPointError, value, "7", "'r1'"):
        dist.optimizer_step(accelerator, model, optimizer, 1.0, "step 7, records of this batch: ['r1']")
    assert torch.equal(net.weight, before)
    assert not optimizer.state


def test_a_step_that_deepspeed_leaves_out_has_no_norm():
    """Its engine may still have that of the step before."""
    accelerator = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    engine = SimpleNamespace(get_global_grad_norm=lambda: 1.5)
    optimizer = SimpleNamespace(step_was_skipped=False, zero_grad=lambda: None)
    assert dist.optimizer_step(accelerator, engine, optimizer, 1.0) == 1.5
    optimizer.step_was_skipped = True
    with error_about(FloatingPointError, "7"):
        dist.optimizer_step(accelerator, engine, optimizer, 1.0, "step 7")


def test_alone_nothing_is_gathered():
    rows = torch.ones(3, 2, requires_grad=True)
    sizes = dist.gather_sizes(3, rows.device)
    assert sizes == [3]
    assert dist.gather_rows(rows, sizes) is rows
    assert dist.sum_over_ranks([1.5, 2], rows.device) == [1.5, 2.0]
    assert (dist.rank(), dist.world_size()) == (0, 1)


@pytest.mark.parametrize(("limit", "moved"), [(1.0, (0.6, 0.8)), (5.0, (3.0, 4.0)), (0.0, (3.0, 4.0))])
def test_the_gradient_is_clipped_by_its_norm_and_cleared(limit, moved):
    accelerator = launch.make_accelerator(TrainConfig())
    net = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.zero_()
    model, optimizer = dist.prepare(
        accelerator, net, torch.optim.SGD(net.parameters(), lr=1.0), max_grad_norm=limit
    )
    accelerator.backward((model(torch.tensor([[3.0, 4.0]]))).sum())
    assert dist.optimizer_step(accelerator, model, optimizer, limit) == pytest.approx(5.0)
    torch.testing.assert_close(net.weight[0].detach(), -torch.tensor(moved), rtol=1e-5, atol=0)
    assert net.weight.grad is None
    assert dist.full_weights(accelerator, model, net) is None  # nothing is sharded
