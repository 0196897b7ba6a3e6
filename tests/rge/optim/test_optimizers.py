"""Schedules by hand, and that optimizers decay, save and load what they should."""

import copy

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rge.optim.config import LrScaleConfig, OptimConfig, StageConfig
from rge.optim.muon import Muon, orthogonal
from rge.optim.optimizers import learning_rate, make_optimizer, set_learning_rate

SHAPE = {"lr": 2.0, "warmup_steps": 4, "min_lr_ratio": 0.1}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [0.5, 1.0, 1.5, 2.0, 2.0, 1.7, 1.4, 1.1, 0.8, 0.5]),
    ],
)
def test_rates_by_hand(schedule, expected):
    found = [learning_rate(step, 10, StageConfig(schedule=schedule, **SHAPE)) for step in range(10)]
    assert found == pytest.approx(expected)


def test_cosine_falls_from_the_peak_to_the_floor():
    rates = [learning_rate(step, 10, StageConfig(**SHAPE)) for step in range(11)]
    assert rates[4] == 2.0
    assert rates[7] == pytest.approx(2.0 * 0.55)  # half way between the peak and the floor
    assert rates[10] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_a_schedule_without_warmup_starts_at_the_peak():
    assert learning_rate(0, 1, StageConfig(lr=3.0)) == 3.0
    # A warm-up as long as the run never divides by zero.
    assert learning_rate(4, 5, StageConfig(lr=3.0, warmup_steps=5, schedule="linear")) == 3.0


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(5, 4)
        self.conv = torch.nn.Conv1d(4, 4, 1)
        self.norm = torch.nn.LayerNorm(4)
        self.linear = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)

    def loss(self):
        hidden = self.conv(self.embed(torch.arange(5)).T).T
        return self.frozen(self.linear(self.norm(hidden))).square().sum()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_vectors_are_not_decayed_and_frozen_weights_do_not_move(name):
    net = Net()
    optimizer = make_optimizer(net, OptimConfig(name=name, betas=(0.9, 0.99), weight_decay=0.5), 0.1)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    before = copy.deepcopy(net.state_dict())
    optimizer.step()
    for key, value in net.state_dict().items():
        # Without a gradient only decay moves a weight: by the factor 1 - lr * decay.
        decayed = value.ndim >= 2 and not key.startswith("frozen")
        torch.testing.assert_close(value, before[key] * (0.95 if decayed else 1.0))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_reloaded_optimizer_goes_on_bit_for_bit(name, tmp_path):
    def take(net, optimizer, first, last):
        for step in range(first, last):
            set_learning_rate(optimizer, 0.1 / (step + 1))
            optimizer.zero_grad()
            net.loss().backward()
            optimizer.step()

    def fresh():
        net = Net()
        return net, make_optimizer(net, OptimConfig(name=name, betas=(0.9, 0.99), weight_decay=0.5), 0.1)

    whole, optimizer = fresh()
    take(whole, optimizer, 0, 6)
    net, optimizer = fresh()
    take(net, optimizer, 0, 3)
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    net, optimizer = fresh()
    saved = torch.load(tmp_path / "state.pt")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    take(net, optimizer, 3, 6)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, net.state_dict()[key]), key


def test_every_trained_weight_is_in_exactly_one_group():
    net = Net()
    for name in ("adamw", "muon"):
        optimizer = make_optimizer(net, OptimConfig(name=name, betas=(0.9, 0.99), weight_decay=0.5), 0.1)
        grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        assert sorted(grouped) == sorted(
            id(parameter) for parameter in net.parameters() if parameter.requires_grad
        )


@pytest.mark.parametrize("tied", [True, False])
def test_muon_leaves_embeddings_and_the_output_matrix_to_adamw(tied):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=12, num_hidden_layers=1, tie_word_embeddings=tied, **sizes)
    )
    by_muon = {
        id(each) for each in make_optimizer(model, OptimConfig(name="muon"), 0.1).param_groups[0]["params"]
    }
    named = {name for name, parameter in model.named_parameters() if id(parameter) in by_muon}
    layer = [name for name, each in model.model.layers.named_parameters() if each.ndim == 2]
    assert named == {f"model.layers.{name}" for name in layer}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_slow_parameters_take_their_share_of_the_rate(name):
    moved = {}
    for ratio in (1.0, 0.25):
        net = Net()
        before = copy.deepcopy(net.state_dict())
        parts = {"vision": list(net.linear.parameters())}
        settings = OptimConfig(name=name, betas=(0.9, 0.99), lr_scale=LrScaleConfig(vision=ratio))
        optimizer = make_optimizer(net, settings, 1.0, parts)
        set_learning_rate(optimizer, 0.1)
        net.loss().backward()
        optimizer.step()
        moved[ratio] = {key: value - before[key] for key, value in net.state_dict().items()}
    for key in moved[1.0]:
        factor = 0.25 if key.startswith("linear") else 1.0
        torch.testing.assert_close(moved[0.25][key], moved[1.0][key] * factor)


def test_orthogonal_keeps_the_singular_vectors_and_levels_the_values():
    generator = torch.Generator().manual_seed(0)
    matrices = [
        torch.randn(*shape, generator=generator)
        for shape in ((6, 4), (4, 6), (5, 5), (6, 4), (12, 4), (4, 9))
    ]
    for matrix, found in zip(matrices, orthogonal(matrices), strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        core = left.T @ found @ right.T
        torch.testing.assert_close(core, core.diagonal().diag(), atol=1e-5, rtol=0)
        big = values > values[0] * 0.05  # five iterations do not lift what is nearly zero
        assert bool(((core.diagonal() > 0.6) & (core.diagonal() < 1.25))[big].all())


def test_muon_steps_as_pytorchs_does_to_its_rounding():
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 8), (8, 24), (8, 8), (16, 8), (8, 12)]
    ours = [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in shapes]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    start = [parameter.detach().clone() for parameter in ours]
    optimizers = [
        Muon([{"params": ours}], lr=0.02, weight_decay=0.1),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for own, other, before in zip(ours, theirs, start, strict=True):
        # PyTorch's products are in bfloat16: three digits.
        assert (own - other).norm() < 0.02 * (other - before).norm()


def test_muon_takes_a_kernel_as_the_matrix_that_it_multiplies_patches_by():
    torch.manual_seed(0)
    kernel = torch.nn.Parameter(torch.randn(6, 3, 1, 2, 2))
    matrix = torch.nn.Parameter(kernel.detach().flatten(1))
    optimizer = Muon([{"params": [kernel]}, {"params": [matrix]}], lr=0.02, weight_decay=0.1)
    for _ in range(3):
        kernel.grad = torch.randn(6, 3, 1, 2, 2)
        matrix.grad = kernel.grad.flatten(1)
        optimizer.step()
    torch.testing.assert_close(kernel.flatten(1), matrix)


def test_kernels_go_to_muon():
    net = Net()
    optimizer = make_optimizer(net, OptimConfig(name="muon"), 0.1)
    net.loss().backward()
    optimizer.step()
    assert "momentum_buffer" in optimizer.state[net.conv.weight]
    assert "exp_avg" in optimizer.state[net.embed.weight]  # a table of vectors is no matrix of a layer


def test_muon_moves_matrices_along_an_orthogonal_update_and_the_rest_as_adamw_does():
    updates = {}
    for name in ("adamw", "muon"):
        net = Net()
        before = copy.deepcopy(net.state_dict())
        config = OptimConfig(name=name, betas=(0.9, 0.99))
        optimizer = make_optimizer(net, config, 0.1)
        net.loss().backward()
        optimizer.step()
        updates[name] = {key: net.state_dict()[key] - before[key] for key in before}
    for key in ("embed.weight", "norm.weight", "linear.bias"):
        assert torch.equal(updates["muon"][key], updates["adamw"][key])
    # The normalised input makes the gradient's rank 3 of 4.
    muon, adamw = (torch.linalg.svdvals(updates[name]["linear.weight"]) for name in ("muon", "adamw"))
    assert muon[0] / muon[2] < 2 < adamw[0] / adamw[2]


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError):
        make_optimizer(Net(), OptimConfig(name="sgd"), 0.1)
