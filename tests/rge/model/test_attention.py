"""Attention over flat tokens: kernels, heads that share keys, and what is left out because nobody reads it."""

import pytest
import torch

from rge.model.attention import NAMES, Pass, _Kernel, install
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel, Packed
from rge.model.families import family_of
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder


@pytest.fixture
def packed(lively, make_prompts):
    """Four rows, two branches each: one read at its end only, one predicted."""
    prompts = make_prompts(PromptBuilder(lively.processor), 4)
    emb = lively.emb_id
    branches = [
        [Branch([7] * row + [emb], read_state=True), Branch([3, 5, emb], predict=True)] for row in range(4)
    ]
    return lively.pack(prompts, branches)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("masked", [True, False])
def test_the_kernel_equals_softmax_by_hand(plain, heads, key_heads, masked):
    generator = torch.Generator().manual_seed(0)
    B, T, U, d = 2, 5, 8 if masked else 5, 4
    q = torch.randn(B, T, heads, d, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(B, U, key_heads, d, generator=generator, dtype=torch.float64) for _ in range(2))
    if masked:
        seen = torch.rand(B, 1, T, U, generator=generator) < 0.6
        seen[..., 0] = True
    else:
        seen = torch.ones(T, U, dtype=torch.bool).tril().expand(B, 1, T, U)
    bias = torch.zeros(B, 1, T, U, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    found = _Kernel(0.3, 0.0, plain)(q, k, v, bias if masked else None)
    for row in range(B):
        for head in range(heads):
            shared = head * key_heads // heads
            scores = 0.3 * q[row, :, head] @ k[row, :, shared].T + bias[row, 0]
            torch.testing.assert_close(found[row, :, head], scores.softmax(dim=-1) @ v[row, :, shared])


def test_eager_equals_sdpa(lively, lively_path, packed):
    eager = EmbeddingModel(load_backbone(lively_path, attn_implementation="eager")).eval()
    assert family_of(eager.model).decoder(eager.model).config._attn_implementation == NAMES["eager"]
    with torch.no_grad():
        one, other = lively(packed)[0], eager(packed)[0]
    torch.testing.assert_close(one.state_ND, other.state_ND, atol=2e-6, rtol=0)
    torch.testing.assert_close(one.nll, other.nll, rtol=1e-6, atol=0)


def test_the_last_layer_computes_what_is_read(lively, packed):
    """Rows that enter the MLP: all tokens in the first layer, in the last those whose state is read."""
    rows = {}

    def count(name):
        return lambda module, args: rows.__setitem__(name, args[0].shape[1])

    layers = family_of(lively.model).decoder(lively.model).layers
    handles = [
        layer.mlp.gate_proj.register_forward_pre_hook(count(name))
        for name, layer in (("first", layers[0]), ("last", layers[-1]))
    ]
    with torch.no_grad():
        lively(packed)
        num_tokens = len(packed.prompts.input_ids_T) + len(packed.tails.input_ids_T)
        # Of each row: one state, and three predictions (the prompt's last token, then two of the oracle).
        assert rows == {"first": num_tokens, "last": 4 * (1 + 3)}
        lively(Packed(packed.prompts, None))
        assert rows == {"first": len(packed.prompts.input_ids_T), "last": 0}
    for handle in handles:
        handle.remove()


def test_what_is_left_out_changes_nothing(lively, packed, monkeypatch):
    """The same states and gradients as with every token computed in every layer."""

    def run():
        lively.zero_grad(set_to_none=True)
        readout = lively(packed)[0]
        (readout.state_ND[:, 0].sum() + readout.nll).backward()
        return readout, {name: p.grad.clone() for name, p in lively.named_parameters()}

    readout, gradients = run()
    build = Pass.__init__

    def read_all(self, *args):
        build(self, *args)
        self.read_R = torch.arange(self.num_tokens)

    monkeypatch.setattr(Pass, "__init__", read_all)
    whole, expected = run()
    torch.testing.assert_close(readout.state_ND, whole.state_ND, atol=2e-6, rtol=0)
    torch.testing.assert_close(readout.nll, whole.nll, rtol=1e-6, atol=0)
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


def test_installing_twice_is_installing_once(lively, packed):
    with torch.no_grad():
        expected = lively(packed)[0].state_ND
        hooks = len(family_of(lively.model).decoder(lively.model).layers[-1].mlp._forward_hooks)
        install(family_of(lively.model).decoder(lively.model))
        assert len(family_of(lively.model).decoder(lively.model).layers[-1].mlp._forward_hooks) == hooks == 1
        assert torch.equal(lively(packed)[0].state_ND, expected)
