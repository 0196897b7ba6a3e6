"""The whole step on tensors that say they are on a GPU: no mixing of devices, few waits, kernels counted."""

import copy

import pytest
import torch
from fake_gpu import DEVICE, FakeGpu, OnGpu
from family_models import PHOTOS  # its network has no kernel of ours, and hundreds of others
from faults import error_about

from rge.config import Recipe
from rge.distributed.config import TrainConfig
from rge.model.adapters import add_adapters
from rge.model.config import LoraConfig
from rge.model.embedding_model import EmbeddingModel
from rge.model.families import FAMILIES, family_of
from rge.model.prompts import PromptBuilder
from rge.model.varlen import KernelError
from rge.objective import Objective
from rge.rl.config import RewardConfig, RLConfig
from rge.rl.credit import Reinforcement
from rge.rollout import cuda_graphs, micro_batches
from rge.rollout.config import RolloutConfig
from rge.rollout.generate import Rationale, generate
from rge.rollout.micro_batches import encode_prompts
from rge.rollout.writer import Rollout
from rge.step.training_step import TrainingStep

CAP = 24
KERNELS_A_LAYER, KERNELS_A_TOKEN = 45, 40
MOVES = {"one chunk": 2, "checkpointing": 12}
"""Forwards of a step, each of which gets its indices, layout and pictures' sizes by one copy each."""


def test_it_is_as_strict_as_a_gpu():
    with FakeGpu() as gpu:
        x = torch.ones(3, device=DEVICE)
        assert isinstance(x, OnGpu)
        assert x.device.type == "cuda"
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        assert not gpu.waits
        y = torch.arange(3).to(DEVICE, non_blocking=True)
        assert (gpu.of(gpu.copies, "-"), gpu.of(gpu.waits, "-")) == (1, 0)
        assert float((x * y).sum()) == 3
        assert y[y > 0].tolist() == [1, 2]
        assert torch.tensor([1, 2], device=DEVICE).cpu().tolist() == [1, 2]
        kinds = [kind for _, kind, _ in gpu.waits]
        assert kinds == ["_local_scalar_dense", "index by mask", "tolist", "copy from host", "copy to host"]
        assert {place.split(":")[0] for _, _, place in gpu.waits} == {"tests/rge/test_step_on_fake_gpu.py"}, (
            gpu.waits
        )
        with pytest.raises(TypeError, match="can't convert cuda"):
            x.numpy()


def test_a_captured_step_runs_when_replayed_and_only_then():
    with FakeGpu() as gpu:
        total, n = torch.zeros(2, device=DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE)

        def work():
            total.add_(n * 2 + 1)
            n.add_(1)

        replay = gpu.capture(work)
        assert (total.tolist(), n.tolist()) == ([0, 0], [0])
        for _ in range(3):
            replay()
        assert (total.tolist(), n.tolist()) == ([9, 9], [3])
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            gpu.capture(lambda: int(n))


def run_step(embedder: EmbeddingModel, batch, optimizer, gpu: FakeGpu | None, micro_batch_size: int):
    """Rollout, both losses, backward, optimizer; tokens and report."""
    once = micro_batch_size >= len(batch.queries)

    def phase(name: str) -> None:
        if gpu is not None:
            gpu.phase = name

    phase("prompts")
    encoded = encode_prompts(embedder, embedder, batch.queries) if once else None
    phase("rollout")
    rationales = generate(embedder, batch.queries, max_new_tokens=CAP, batch_size=5, encoded=encoded)
    phase("step")
    report = TrainingStep(embedder, embedder, Objective(0.3, 0.7), micro_batch_size)(batch, Rollout(rationales, encoded))  # fmt: skip
    phase("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    return [(r.ids, r.forced) for r in rationales], report


STOCK_TOWERS = ("gemma3", "idefics3", "internvl")
"""Families whose vision tower is transformers' own, attention included."""


def trainer(embedder: EmbeddingModel, checkpointing: bool):
    if checkpointing:
        embedder.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return torch.optim.SGD(embedder.train().parameters(), lr=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lively_path", "options"),
    [
        ("qwen2_5_vl", "one chunk"),
        *((family, "checkpointing") for family in sorted(set(FAMILIES) - {PHOTOS})),
    ],
    indirect=["lively_path"],
)
def test_two_steps_on_a_gpu(lively_path, backbone_of, make_batch, options, caplog):
    """The tokens, losses and weights of the CPU, and within the second step a budget of waits."""
    here = EmbeddingModel(backbone_of(lively_path))
    there = copy.deepcopy(here)
    batch = make_batch(PromptBuilder(here.processor))
    checkpointing = options == "checkpointing"
    size = 2 if checkpointing else 100
    optimizer = trainer(here, checkpointing)
    expected = [run_step(here, batch, optimizer, None, size) for _ in range(2)]
    with FakeGpu(flash_in_float32=True) as gpu:
        gpu.move(there)
        optimizer = trainer(there, checkpointing)
        found = [run_step(there, batch, optimizer, gpu, size)]
        # The first step has compared the kernels and the captured step of the rollout with the plain ones, and said so.
        said = [record.message for record in caplog.records]
        assert sum("flash attention checked against" in line for line in said) >= 3
        assert (
            sum("a captured step checked against the plain one: tokens equal" in line for line in said) == 1
        )
        counts = (gpu.waits, gpu.kernels, gpu.graphs, gpu.copies, gpu.attention)
        for count in counts:
            count.clear()
        found.append(run_step(there, batch, optimizer, gpu, size))
        gpu.phase = "-"
        weights = {name: parameter.detach().cpu() for name, parameter in there.named_parameters()}
    for (tokens, report), (tokens_there, report_there) in zip(expected, found, strict=True):
        assert tokens_there == tokens
        assert report_there == pytest.approx(report, rel=1e-4, abs=1e-5)
    for name, parameter in here.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    # Of the rollout: who is done, every eighth step, and what was written. Of all the rest: the losses, once.
    waits = {phase: gpu.of(gpu.waits, phase) for phase in ("prompts", "rollout", "step", "optimizer")}
    assert waits["prompts"] == waits["optimizer"] == 0, gpu.waits
    assert waits["step"] == 1, gpu.waits
    new = gpu.graphs["rollout"]  # of sizes that the first step did not have, whose rows ended elsewhere
    assert waits["rollout"] <= 2 + -(-CAP // 8) + new, gpu.waits
    # Attention is flash attention and nothing else, but for vision towers that are transformers' own.
    kinds = {kind for _, kind in gpu.attention}
    own = {"_varlen_attn", "_varlen_attn_backward"}
    assert own <= kinds
    assert kinds == own or (kinds - own and here.model.config.model_type in STOCK_TOWERS), gpu.attention
    # All steps of writing are launched as one graph, but for the one before a new size is captured. The prompt's pass gives the first
    # token, and a rationale's `<emb>` is one more, unless it was forced.
    longest = max(len(ids) + (not forced) for ids, forced in found[1][0])
    assert gpu.kernels["rollout", "graph"] >= longest - 1 - 2 * new
    assert gpu.copies["step"] <= 3 * MOVES[options] + 4, gpu.copies
    if not checkpointing:  # where some families copy more
        # Only pixels, which the loader would have delivered in pinned memory.
        assert gpu.unpinned["step"] <= MOVES[options], gpu.unpinned


@pytest.mark.slow
def test_rows_with_caps_of_their_own_are_captured(lively, make_prompts):
    """What plain steps write; a batch without caps in between does not get the caps of the one before."""
    there = copy.deepcopy(lively)
    prompts = make_prompts(PromptBuilder(lively.processor), 6)
    every = [None, [0, 1, 5, 24, 12, 3], None, [24, 9, 0, 0, 2, 17]]

    def write(embedder: EmbeddingModel) -> list:
        settings = {"max_new_tokens": CAP, "batch_size": 6}
        parts = [generate(embedder, prompts, caps=caps, **settings) for caps in every]
        return [(one.ids, one.forced, one.direct) for part in parts for one in part]

    expected = write(lively)
    with FakeGpu(flash_in_float32=True) as gpu:
        gpu.move(there)
        gpu.phase = "rollout"
        assert write(there) == expected
        assert gpu.kernels["rollout", "graph"] > CAP


@pytest.mark.slow
def test_a_step_of_the_stage_rl_on_a_gpu(lively_path, backbone_of, make_batch, tmp_path):
    """Every reward, the advantages and all losses are those of the CPU: no mask is left on the host."""
    here = EmbeddingModel(backbone_of(lively_path)).train()
    there = copy.deepcopy(here)
    batch = make_batch(PromptBuilder(here.processor))
    names = (
        "margin",
        "rank",
        "hit",
        "ndcg",
        "gain_over_direct",
        "length",
        "oracle_overlap",
        "ume_r1",
        "embed_rl",
        "grace",
    )
    recipe = Recipe(
        recipe="tiny",
        stage="rl",
        rollout=RolloutConfig(max_new_tokens=CAP, batch_size=8),
        rl=RLConfig(
            num_rationales=2, alpha_con=0.4, alpha_lm=0.2, rewards=[RewardConfig(name) for name in names]
        ),
        train=TrainConfig(micro_batch_size=2),
    )

    def step(embedder: EmbeddingModel) -> dict[str, float]:
        written = [
            Rationale((7 + number,) * (2 + number % 3), False, None, 0.0)
            for number in range(2 * len(batch.queries))
        ]
        credit = Reinforcement(recipe, embedder, None, tmp_path).begin(batch, written, True)
        objective = Objective.of(recipe, "rl")
        return TrainingStep(embedder, embedder, objective, 2)(batch, Rollout(credit.rationales, None), credit)

    expected = step(here)
    with FakeGpu(flash_in_float32=True) as gpu:
        gpu.move(there)
        found = step(there)
    assert {f"reward_{name}" for name in names} <= set(found)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["bfloat16", "float32", "adapters"])
def test_captured_steps_stay_for_the_run(trained, lively_path, backbone_of, make_prompts, caplog):
    """While the weights change in place, and until they are elsewhere; each rollout writes what plain steps write."""
    mixed = trained != "bfloat16"
    here = EmbeddingModel(backbone_of(lively_path, dtype="float32" if trained == "float32" else "bfloat16"))
    if trained == "adapters":
        add_adapters(here.model, LoraConfig(rank=2, alpha=4), here.emb_id)
        for parameter in here.parameters():
            if parameter.requires_grad:
                parameter.data = torch.full_like(parameter, 0.05, dtype=torch.float32)
    builder = PromptBuilder(here.processor)
    prompts, longer = make_prompts(builder, 5), make_prompts(builder, 5, side="candidate")
    ends = [CAP, CAP, 0, 2, 4, 9, 13]  # rows end one after the other

    def sampled(prompts, first):
        rows = [prompt for prompt in prompts for _ in ends]
        seeds = range(first, first + len(rows))
        settings = {"batch_size": 21, "temperature": 0.8, "min_new_tokens": CAP - 1}
        return rows, {**settings, "seeds": seeds, "caps": ends * len(prompts)}

    rollouts = [
        sampled(prompts[:3], 0),
        sampled(prompts[:2], 0),
        sampled(prompts[1:4], 30),
        (longer, {"batch_size": 3}),
        (prompts, {"batch_size": 3}),
        (longer, {"batch_size": 3}),
        (longer, {"batch_size": 3, "direct_above": 1e-4, "margins": True}),
    ]

    def write(embedder, number):
        rows, settings = rollouts[number]
        settings = {"batch_size": 6, **settings}
        # To torch's C++ the tensors are on the CPU, so that is the autocast that they see; its cache of weights ends with it.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            found = generate(embedder, rows, max_new_tokens=CAP, **settings)
        return [one.ids for one in found], torch.stack([one.state_D for one in found])

    with FakeGpu() as gpu:
        gpu.move(here)
        here.eval()
        plain = copy.copy(here)
        plain.cuda_graphs = False
        kept, captures = [], []
        for number in (0, 1, 2, 0, 3, 4, 5, 3, 6):
            gpu.graphs.clear()
            known = set(cuda_graphs._CAPTURED[here].steps) if captures else set()
            tokens, states = write(here, number)
            now = set(cuda_graphs._CAPTURED[here].steps)
            captures.append(gpu.graphs["-"])
            if len(captures) in (3, 4, 7, 8):  # no larger than an earlier one
                assert known <= now
                assert captures[-1] == len(now - known) <= mixed * 2, captures
            expected_tokens, expected = write(plain, number)
            assert tokens == expected_tokens
            torch.testing.assert_close(states.cpu(), expected.cpu(), rtol=0, atol=1e-2)
            kept.append((states, states.cpu()))
            with torch.no_grad():
                here.model.get_output_embeddings().weight.mul_(1.01)
                here.model.get_input_embeddings().weight.mul_(0.99)
                for parameter in here.parameters():
                    if trained == "adapters" and parameter.requires_grad:
                        parameter.mul_(1.1)
        # What a rollout gave is not written over by the next one.
        assert all(torch.equal(states.cpu(), before) for states, before in kept)
        assert captures[0] > 1
        assert captures[4] > 0
        # A weight that is elsewhere now: every step is captured again.
        part = family_of(here.model).decoder(here.model).norm
        part.weight = torch.nn.Parameter(part.weight.detach() * 2)
        gpu.graphs.clear()
        assert write(here, 3)[0] == write(plain, 3)[0]
        assert gpu.graphs["-"] > 0
        gpu.graphs.clear()
        write(here, 3)
        assert gpu.graphs["-"] == 0
        # Two rollouts at once do not share memory: one of them is written plainly.
        inside = []
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            generate(
                here,
                prompts,
                max_new_tokens=CAP,
                batch_size=6,
                on_token=lambda *_: inside or inside.append(write(here, 3)[0]),
            )
        assert inside == [write(plain, 3)[0]]


@pytest.mark.slow
def test_kernels_a_layer_and_a_token(lively_path, backbone_of, make_batch):
    """Launched one by one: what a decoder layer takes to write a token. A layer more is as many kernels more."""
    embedder = EmbeddingModel(backbone_of(lively_path, dtype="bfloat16"), cuda_graphs=False)
    batch = make_batch(PromptBuilder(embedder.processor))
    with torch.no_grad():
        embedder.model.get_input_embeddings().weight[embedder.emb_id] = (
            0  # nothing ends: every step is a whole one
        )
    counts = []
    with FakeGpu() as gpu:
        gpu.move(embedder)
        for cap in (9, 8, 9, 8):
            gpu.kernels.clear()
            generate(embedder, batch.queries, max_new_tokens=cap, batch_size=5)
            counts.append(gpu.of(gpu.kernels, "-"))
    one_token = counts[2] - counts[3]
    assert one_token <= 2 * KERNELS_A_LAYER + KERNELS_A_TOKEN


@pytest.mark.slow
def test_what_is_kept_in_main_memory_comes_back(lively_path, backbone_of, make_batch, monkeypatch):
    """The gradients of keeping it on the device, in as many waits: copies are asked for, and never waited for."""
    monkeypatch.setattr(micro_batches, "LEAST_BYTES", 1)
    embedder = EmbeddingModel(backbone_of(lively_path))
    batch = make_batch(PromptBuilder(embedder.processor))
    waits, gradients = {}, {}
    with FakeGpu() as gpu:
        gpu.move(embedder)
        rationales = generate(embedder, batch.queries, max_new_tokens=9, batch_size=5)
        trainer(embedder, True)
        for place in ("device", "host"):
            embedder.zero_grad()
            gpu.phase = place
            TrainingStep(embedder, embedder, Objective(0.3, 0.7), 2, keep=place)(batch, Rollout(rationales))
            gpu.phase = "-"
            waits[place] = gpu.of(gpu.waits, place)
            gradients[place] = {name: parameter.grad.cpu() for name, parameter in embedder.named_parameters()}
        copies = gpu.copies["host"] - gpu.copies["device"]
    for name, expected in gradients["device"].items():
        assert torch.equal(gradients["host"][name], expected), name
    config = embedder.model.config
    layers = config.text_config.num_hidden_layers + config.vision_config.depth
    assert copies >= 3 * layers  # back to the device: a layer's input, in each of three micro batches
    assert waits["host"] == waits["device"] == 1, gpu.waits


def test_flash_attention_does_not_compute_in_float32(lively_path, backbone_of, make_batch):
    """So float32 takes rows, and asking for varlen is an error that says what to do."""
    embedder = EmbeddingModel(backbone_of(lively_path))
    batch = make_batch(PromptBuilder(embedder.processor))
    with FakeGpu() as gpu:
        gpu.move(embedder)
        encode_prompts(embedder, embedder, batch.queries)
        assert "_varlen_attn" not in {kind for _, kind in gpu.attention}
        embedder.attention = "varlen"
        with error_about(KernelError, "model.attn_implementation"):
            encode_prompts(embedder, embedder, batch.queries)


@pytest.mark.slow
def test_under_mixed_precision(lively_path, backbone_of, make_batch):
    """Float32 weights under autocast, as DDP trains: flash attention in bfloat16, and keys kept in it, not cast anew."""
    embedder = EmbeddingModel(backbone_of(lively_path))
    batch = make_batch(PromptBuilder(embedder.processor))
    # To torch's C++ the tensors are on the CPU, so that is the autocast that they see.
    with FakeGpu() as gpu, torch.autocast("cpu", dtype=torch.bfloat16):
        gpu.move(embedder)
        optimizer = trainer(embedder, checkpointing=False)
        encoded = encode_prompts(embedder, embedder, batch.queries)
        (part,) = encoded.parts
        assert {states.dtype for states in (*part.keys, *part.values)} == {torch.bfloat16}
        losses = []
        for _ in range(2):
            gpu.attention.clear()  # of the first step, with what checks the kernels
            losses.append(run_step(embedder, batch, optimizer, gpu, 100)[1]["loss"])
        gpu.phase = "-"
        assert losses[1] < losses[0]
        assert {kind for _, kind in gpu.attention} == {"_varlen_attn", "_varlen_attn_backward"}
        assert all(parameter.dtype == torch.float32 for parameter in embedder.parameters())
