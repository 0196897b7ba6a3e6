"""Sequences one after the other: attention against a loop by hand, and the whole step against rows side by side."""

import copy

import pytest
import torch
from family_models import every_family
from faults import error_about

from rge.common.errors import UserError
from rge.model import varlen
from rge.model.attention import _Kernel
from rge.model.embedding_model import EmbeddingModel
from rge.model.families import family_of
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.model.varlen import KernelError, attend_runs, make_runs, one_by_one, verify, wanted
from rge.objective import Objective
from rge.rollout.generate import generate
from rge.rollout.micro_batches import encode_prompts
from rge.rollout.writer import Rollout
from rge.step.training_step import TrainingStep

CPU = torch.device("cpu")


def random_states(q_lengths, k_lengths, heads=6, key_heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(q_lengths), heads, 8), (sum(k_lengths), key_heads, 8), (sum(k_lengths), key_heads, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
def test_attention_of_runs_by_hand(causal, window):
    """A token and a head at a time: which keys a query sees is counted from the ends of both sequences."""
    q_lengths, k_lengths = [5, 1, 3, 0, 4], [5, 6, 9, 0, 4]
    q, k, v = random_states(q_lengths, k_lengths)
    found = attend_runs(
        q, k, v, make_runs(q_lengths, k_lengths), scale=0.3, causal=causal, window=window, key="k"
    )
    first_q = first_k = 0
    for num_q, num_k in zip(q_lengths, k_lengths, strict=True):
        for place in range(num_q):
            itself = num_k - num_q + place
            seen = [
                j
                for j in range(num_k)
                if not causal or (j <= itself and (window is None or j > itself - window))
            ]
            for head in range(6):
                keys, values = (part[first_k:][seen, head // 3] for part in (k, v))
                weight = (0.3 * keys @ q[first_q + place, head]).softmax(dim=0)
                torch.testing.assert_close(found[first_q + place, head], weight @ values)
        first_q, first_k = first_q + num_q, first_k + num_k


def test_a_kernel_that_aligns_its_mask_at_the_other_end_is_refused():
    """As a library may read "causal" for unequal lengths: the error says by how much, and how to do without."""
    lengths = [3, 2], [7, 5]
    states, runs = random_states(*lengths, dtype=torch.bfloat16), make_runs(*lengths)
    settings = {"scale": 0.3, "causal": True, "window": None}
    assert verify(one_by_one, states, runs, settings, "model.x") < 0.02

    def top_left(q, k, v, runs, **settings):
        parts = zip(
            *(x.split(list(n)) for x, n in ((q, lengths[0]), (k, lengths[1]), (v, lengths[1]))), strict=True
        )
        return torch.cat(
            [
                torch.nn.functional.scaled_dot_product_attention(
                    *(x.transpose(0, 1)[None] for x in part), is_causal=True, scale=0.3, enable_gqa=True
                )[0].transpose(0, 1)
                for part in parts
            ]
        )  # fmt: skip

    with error_about(KernelError, "model.x"):
        verify(top_left, states, runs, settings, "model.x")

    class WrongBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.shapes = q.shape, k.shape, v.shape
            return one_by_one(q, k, v, runs, **settings)

        @staticmethod
        def backward(ctx, grad):
            return tuple(torch.ones(shape, dtype=grad.dtype) for shape in ctx.shapes)

    with error_about(KernelError, "model.x"):
        verify(lambda q, k, v, runs, **_: WrongBackward.apply(q, k, v), states, runs, settings, "model.x")


def test_terms_that_cancel_are_no_reason_to_refuse_a_kernel():
    """Under uniform attention, gradients of values are sums of rounded terms that nearly cancel: every kernel is far off, this one no
    more than ordinary attention. Found on an H100, where a small vision tower was refused."""
    lengths, settings = [512], {"scale": 1e-2, "causal": False, "window": None}
    states, runs = random_states(lengths, lengths, dtype=torch.bfloat16), make_runs(lengths, lengths)

    def low(q, k, v, runs, **_):
        weight = (1e-2 * torch.einsum("thd,uhd->htu", q, k.repeat_interleave(3, dim=1))).softmax(dim=-1)
        return torch.einsum("htu,uhd->thd", weight, v.repeat_interleave(3, dim=1))

    assert verify(low, states, runs, settings, "model.x") > varlen.TOLERANCE[torch.bfloat16]
    with error_about(KernelError, "model.x"):
        verify(
            lambda q, k, v, **given: low(q, k, 1.5 * v, **given) - 0.5 * low(q, k, v.detach(), **given),
            states,
            runs,
            settings,
            "model.x",
        )


def test_an_older_torch(monkeypatch):
    """Its `varlen_attn` lacks two arguments, which the operator has."""
    from torch.nn.attention import varlen as torchs

    given = []

    def of_2_11(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
    ):
        given.append(window_size)
        return query

    monkeypatch.setattr(torchs, "varlen_attn", of_2_11)
    varlen._parameters.cache_clear()
    states, runs = random_states([3, 2], [3, 2], dtype=torch.bfloat16), make_runs([3, 2], [3, 2])
    try:
        varlen._flash(*states, runs, scale=0.3, causal=True, window=None)
        assert given == [(-1, 0)]
        operator = []

        def flash(*sequences, **settings):
            operator.append((sequences[7:], settings))
            return (sequences[0],)

        monkeypatch.setattr(varlen.torch.ops.aten, "_flash_attention_forward", flash)
        seen = torch.tensor([2], dtype=torch.int32)
        varlen._varlen(*states, *[seen] * 2, 1, 4, scale=0.3, window_size=(5, 0), seen_N=seen)
        settings = {"scale": 0.3, "window_size_left": 5, "window_size_right": 0, "seqused_k": seen}
        assert operator == [((0.0, False, False), settings)]
    finally:
        varlen._parameters.cache_clear()


def test_when_it_is_used():
    cuda = torch.device("cuda")
    assert wanted("auto", cuda, torch.bfloat16, "k")
    assert not wanted("auto", cuda, torch.float32, "k")
    assert not wanted("auto", CPU, torch.bfloat16, "k")
    assert wanted("varlen", CPU, torch.float32, "k")
    assert not wanted("sdpa", cuda, torch.bfloat16, "k")
    with error_about(KernelError, "k"):
        wanted("varlen", cuda, torch.float32, "k")


def flat(embedder: EmbeddingModel) -> EmbeddingModel:
    """The same model in the form of a GPU, text and vision."""
    other = copy.deepcopy(embedder)
    other.attention = "varlen"
    for module in other.modules():
        if hasattr(module, "asked"):
            module.asked = "varlen"
    return other


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("once", [True, False])
def test_a_step_and_its_gradients_equal_those_of_rows(lively64, make_batch, roll_out, once):
    """Ragged rows, two and three branches, heads that share keys: losses and gradients, to float64's rounding."""
    embedder, batch = lively64, make_batch(PromptBuilder(lively64.processor))
    results = []
    for form in (embedder, flat(embedder)):
        rationales = roll_out(form, batch)
        report = TrainingStep(form, form, Objective(0.3, 0.7), 100 if once else 2)(
            batch, Rollout(rationales, encode_prompts(form, form, batch.queries) if once else None)
        )
        results.append(([(r.ids, r.forced) for r in rationales], report, dict(form.named_parameters())))
    (tokens, report, expected), (tokens_too, report_too, found) = results
    assert tokens == tokens_too
    assert report_too == pytest.approx(report, rel=1e-9)
    whole = sum(
        float(parameter.grad.square().sum()) for parameter in expected.values() if parameter.grad is not None
    )
    apart = sum(
        float((found[name].grad - parameter.grad).square().sum())
        for name, parameter in expected.items()
        if parameter.grad is not None
    )
    assert apart**0.5 <= 1e-6 * whole**0.5


def test_rows_of_many_branches_and_of_none(lively64, make_prompts):
    prompts = make_prompts(PromptBuilder(lively64.processor), 3)
    emb = lively64.emb_id
    branches = [
        [Branch([7] * number + [emb], read_state=True) for number in range(4)],
        [],
        [Branch([9, emb], predict=True), Branch([emb], read_state=True)],
    ]
    one, other = (form(form.pack(prompts, branches))[0] for form in (lively64, flat(lively64)))
    torch.testing.assert_close(one.state_ND, other.state_ND, rtol=0, atol=1e-12)
    torch.testing.assert_close(one.nll, other.nll)
    direct = [[Branch([emb], sampled=True)]] * 3
    one, other = (form(form.pack(prompts, direct))[0] for form in (lively64, flat(lively64)))
    torch.testing.assert_close(one.log_prob_L, other.log_prob_L)


def test_layers_that_see_a_window(lively_path, backbone_of, make_prompts):
    """Each branch equals transformers' own pass over prompt and branch, which rows cannot say, so `auto` is varlen."""
    backbone = backbone_of(lively_path, dtype="float64")
    text, emb = family_of(backbone.model).decoder(backbone.model), backbone.emb_id
    text.config.layer_types, text.config.sliding_window = ["sliding_attention", "full_attention"], 6
    text.has_sliding_layers = True
    text.layers[0].self_attn.layer_type, text.layers[0].self_attn.sliding_window = "sliding_attention", 6
    stock = copy.deepcopy(backbone.model).eval()
    embedder = EmbeddingModel(backbone).eval()
    assert embedder.attention == "varlen"
    prompts = make_prompts(PromptBuilder(embedder.processor), 4, pictures=False)
    branches = [[Branch([7, 8, 9, emb], read_state=True), Branch([3] * 9 + [emb], read_state=True)]] * 4
    with torch.no_grad():
        states = embedder(embedder.pack(prompts, branches))[0].state_ND
    for row, prompt in enumerate(prompts):
        for number, branch in enumerate(branches[row]):
            ids = torch.cat([prompt.input_ids, torch.tensor(branch.ids)])[None]
            with torch.no_grad():
                hidden = stock(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
            torch.testing.assert_close(states[2 * row + number], hidden / hidden.norm(), rtol=0, atol=1e-9)
    # Writing goes on under the same window.
    rationales = generate(embedder, prompts, max_new_tokens=12, batch_size=4)
    with torch.no_grad():
        again = embedder(
            embedder.pack(prompts, [[Branch([*r.ids, emb], read_state=True)] for r in rationales])
        )[0].state_ND
    torch.testing.assert_close(torch.stack([r.state_D for r in rationales]), again, rtol=0, atol=1e-9)
    embedder.attention = "sdpa"
    with error_about(UserError, ("choice", "model.attn_implementation", ("varlen",))):
        embedder(embedder.pack(prompts, branches))
    backbone.attention = "sdpa"
    with error_about(UserError, ("choice", "model.attn_implementation", ("varlen",))):
        EmbeddingModel(backbone)


def test_attention_dropout_is_refused():
    runs = make_runs([2], [2])
    with pytest.raises(UserError, match="varlen has no attention dropout"):
        _Kernel(1.0, 0.1, False).runs(*random_states([2], [2]), runs)


def test_on_a_gpu_the_first_call_of_a_kind_is_checked(monkeypatch, caplog):
    """Stands in for the device: states that say they are on it, and a kernel that is counted."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    calls = []
    monkeypatch.setattr(varlen, "_verified", set())
    monkeypatch.setattr(varlen, "_flash", lambda *a, **k: (calls.append(k["causal"]), one_by_one(*a, **k))[1])
    states = random_states([4, 2], [4, 2], dtype=torch.bfloat16)
    states[0] = states[0].as_subclass(OnGpu)
    settings = {"scale": 0.3, "key": "model.x"}
    runs = make_runs([4, 2], [4, 2])
    for causal in (True, True, False):
        attend_runs(*states, runs, causal=causal, **settings)
    assert calls == [True, True, True, False, False]  # each kind once more, to be compared
    assert [record.message.split(":")[0] for record in caplog.records] == ["model.x"] * 2
    assert "gradient of keys" in caplog.text
