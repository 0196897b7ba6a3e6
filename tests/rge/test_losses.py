"""Losses against values worked out by hand and against loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from faults import error_about

from rge.common.errors import UserError
from rge.losses import (
    CONTRASTIVE_LOSSES,
    Labels,
    Teacher,
    contrastive_losses,
    hit_at_1,
    info_nce,
    kl,
    margin_mse,
    rationale_nll,
    register_loss,
)
from rge.objective import Objective


def unit_rows(rows: int, width: int, seed: int) -> torch.Tensor:
    return F.normalize(
        torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1
    )


def columns(B: int, C: int, chosen: list[list[int]]) -> torch.Tensor:
    mask = torch.zeros(B, C, dtype=torch.bool)
    for row, places in enumerate(chosen):
        mask[row, places] = True
    return mask


def test_hand_value():
    """I_2 against I_2 at tau=1: -log(e / (e + 1)) = log(1 + 1/e), twice."""
    eye, nothing = torch.eye(2), torch.zeros(2, 2, dtype=torch.bool)
    loss = info_nce(eye, eye, eye.bool(), nothing, temperature=1.0)
    assert loss.item() == pytest.approx(2 * math.log(1 + math.exp(-1)))
    # tau = 1/2 doubles the similarities.
    loss = info_nce(eye, eye, eye.bool(), nothing, temperature=0.5)
    assert loss.item() == pytest.approx(2 * math.log(1 + math.exp(-2)))


def test_ignored_columns_are_as_if_absent():
    q, c = unit_rows(2, 8, 0), unit_rows(5, 8, 1)
    positive = columns(2, 5, [[0], [1]])
    ignored = columns(2, 5, [[3], [3]])
    kept = [0, 1, 2, 4]
    expected = info_nce(q, c[kept], positive[:, kept], ignored[:, kept], temperature=0.1)
    assert info_nce(q, c, positive, ignored, temperature=0.1).item() == pytest.approx(
        expected.item(), rel=1e-12
    )
    assert info_nce(q, c, positive, torch.zeros_like(ignored), temperature=0.1) > expected


@pytest.mark.parametrize("temperature", [0.03, 1.0])
def test_matches_loops_with_several_positives(temperature):
    q, c = unit_rows(3, 6, 0), unit_rows(7, 6, 1)
    positives, others = [[0, 2], [1], [3, 4, 5]], [[6], [], [0]]
    expected = 0.0
    for row in range(3):
        negatives = [j for j in range(7) if j not in positives[row] and j not in others[row]]
        for column in positives[row]:
            top = math.exp(float(q[row] @ c[column]) / temperature)
            rest = sum(math.exp(float(q[row] @ c[j]) / temperature) for j in negatives)
            expected += -math.log(top / (top + rest)) / len(positives[row])
    loss = info_nce(q, c, columns(3, 7, positives), columns(3, 7, others), temperature=temperature)
    assert loss.item() == pytest.approx(expected, rel=1e-10)


def test_gradient_matches_finite_differences():
    q, c = unit_rows(3, 4, 2).requires_grad_(), unit_rows(6, 4, 3).requires_grad_()
    positive, ignored = columns(3, 6, [[0], [1, 2], [5]]), columns(3, 6, [[4], [], [0, 1, 2, 3, 4]])
    assert torch.autograd.gradcheck(lambda a, b: info_nce(a, b, positive, ignored, temperature=0.5), (q, c))


def test_a_query_without_negatives_has_no_loss_and_no_gradient():
    q, c = unit_rows(1, 4, 0).requires_grad_(), unit_rows(2, 4, 1).requires_grad_()
    loss = info_nce(q, c, columns(1, 2, [[0]]), columns(1, 2, [[1]]), temperature=0.03)
    loss.backward()
    assert loss.item() == 0
    assert not q.grad.any()
    assert not c.grad.any()


def test_cold_temperature_neither_overflows_nor_underflows():
    q = torch.tensor([[1.0, 0.0]], requires_grad=True)
    c = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    loss = info_nce(q, c, columns(1, 2, [[0]]), columns(1, 2, [[]]), temperature=1e-3)
    loss.backward()
    assert loss.item() == pytest.approx(2000.0)
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [0, -0.1])
def test_rejects_a_temperature_that_is_not_positive(temperature):
    with pytest.raises(ValueError):
        info_nce(
            torch.eye(2), torch.eye(2), torch.eye(2).bool(), torch.zeros(2, 2).bool(), temperature=temperature
        )


def test_rejects_a_query_without_positive():
    with pytest.raises(ValueError):
        info_nce(
            torch.eye(2), torch.eye(2), columns(2, 2, [[0], []]), torch.zeros(2, 2).bool(), temperature=1.0
        )


def test_rejects_a_positive_that_is_ignored():
    with pytest.raises(ValueError):
        info_nce(torch.eye(2), torch.eye(2), torch.eye(2).bool(), columns(2, 2, [[0], []]), temperature=1.0)


def test_hit_at_1_loses_ties_and_passes_over_ignored_columns():
    q = torch.tensor([[1.0, 0.0]] * 5)
    c = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    positive = columns(5, 4, [[0], [0], [2], [2], [3, 0]])
    ignored = columns(5, 4, [[], [1], [0, 1], [0], [1]])
    # tie with column 1: miss; tie ignored: hit; best two ignored: hit; one better left: miss; best positive counts: hit
    assert hit_at_1(q, c, positive, ignored).item() == 3
    for row, hit in enumerate([0, 1, 1, 0, 1]):
        assert hit_at_1(q[row : row + 1], c, positive[row : row + 1], ignored[row : row + 1]).item() == hit


@pytest.fixture
def head():
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(6, 11, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(11, 6, generator=generator))
    return layer


def test_nll_of_uniform_logits_is_log_vocabulary(head):
    hidden = torch.zeros(3, 6, dtype=torch.float64)
    assert rationale_nll(hidden, head, torch.tensor([0, 4, 10])).item() == pytest.approx(3 * math.log(11))


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 8])
def test_nll_in_chunks_matches_loops(head, chunk_tokens):
    hidden = torch.randn(
        7, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True
    )
    label = torch.tensor([0, 3, 3, 10, 5, 1, 2])
    expected = sum(-torch.log_softmax(head(hidden[n]), dim=0)[label[n]] for n in range(7))
    expected.backward()
    gradient, head_gradient = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad = head.weight.grad = None
    loss = rationale_nll(hidden, head, label, chunk_tokens=chunk_tokens)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(hidden.grad, gradient)
    torch.testing.assert_close(head.weight.grad, head_gradient)


def test_nll_of_no_tokens_is_zero_and_part_of_the_graph(head):
    hidden = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
    loss = rationale_nll(hidden[:0], head, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()
    assert not head.weight.grad.any()


def test_nll_in_bfloat16_is_summed_in_float32():
    head = torch.nn.Linear(4, 5, dtype=torch.bfloat16)
    loss = rationale_nll(torch.ones(6, 4, dtype=torch.bfloat16), head, torch.arange(6) % 5, chunk_tokens=2)
    assert loss.dtype == torch.float32


def test_nll_rejects_unequal_lengths(head):
    with pytest.raises(ValueError):
        rationale_nll(torch.zeros(3, 6, dtype=torch.float64), head, torch.tensor([0, 1]))


def nested(*tensors, **settings):
    return contrastive_losses(*tensors[:2], Labels(*tensors[2:]), terms={"info_nce": 1.0}, **settings)[
        "contrastive_loss"
    ]


def test_nested_losses_are_the_mean_over_the_sizes():
    q, c = unit_rows(3, 8, 0).requires_grad_(), unit_rows(5, 8, 1)
    positive, ignored = columns(3, 5, [[0], [1], [2, 3]]), columns(3, 5, [[4], [], []])
    expected = 0.0
    for size in (8, 4, 1):
        # Cosines of the first components, worked out without normalising first.
        score = torch.stack([F.cosine_similarity(row[None, :size], c[:, :size]) for row in q])
        unit = F.normalize(q[:, :size], dim=-1) @ F.normalize(c[:, :size], dim=-1).T
        torch.testing.assert_close(score, unit)
        if size == 8:  # embeddings come at unit norm; only a cut one is normalised again
            score = q @ c.T
        for row in range(3):
            others = [j for j in range(5) if not positive[row, j] and not ignored[row, j]]
            for column in positive[row].nonzero().flatten().tolist():
                terms = torch.exp(score[row, [column, *others]] / 0.2)
                expected = expected - torch.log(terms[0] / terms.sum()) / int(positive[row].sum()) / 3
    found = nested(q, c, positive, ignored, temperature=0.2, sizes=[4, 1])
    torch.testing.assert_close(found, expected)
    [gradient] = torch.autograd.grad(found, q, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, q)[0])
    whole = nested(q, c, positive, ignored, temperature=0.2, sizes=[])
    assert torch.equal(whole, info_nce(q, c, positive, ignored, temperature=0.2))
    for wrong in ([8], [9], [4, 4]):
        with pytest.raises(ValueError):
            nested(q, c, positive, ignored, temperature=0.2, sizes=wrong)


@pytest.mark.parametrize("value", [torch.ones(3), 1.0])
def test_a_loss_that_is_not_a_sum_is_named(monkeypatch, value):
    monkeypatch.setitem(CONTRASTIVE_LOSSES._entries, "each", lambda *_, temperature: value)
    masks = columns(3, 5, [[0], [1], [2]]), columns(3, 5, [[], [], []])
    with pytest.raises(UserError, match=r"loss\.terms: each must return a scalar tensor"):
        contrastive_losses(
            unit_rows(3, 8, 0), unit_rows(5, 8, 1), Labels(*masks), terms={"each": 1.0}, temperature=0.2
        )


@pytest.mark.parametrize("name", ["lm", "rl", "contrastive", "contrastive_loss"])
def test_a_loss_may_not_be_called_as_another_figure_of_the_log(name):
    with error_about(UserError, name, "reserved"):
        register_loss(name)(lambda *_, **__: None)


def test_every_loss_of_the_log_is_a_reserved_name(monkeypatch):
    monkeypatch.setitem(CONTRASTIVE_LOSSES._entries, "mine", info_nce)
    objective = Objective(1.0, 1.0, terms={"info_nce": 0.5, "mine": 0.5}, direct=0.2)
    positive = torch.eye(2, 3, dtype=torch.bool)
    states = unit_rows(4, 4, 0)
    figures = objective.contrastive(
        states, unit_rows(3, 4, 1), Labels(positive, torch.zeros_like(positive))
    ).figures
    logged = {name.removeprefix("loss_") for name in figures if name.startswith("loss_")}
    assert logged - {"info_nce", "mine"} == set(CONTRASTIVE_LOSSES.reserved) - {
        "lm",
        "rl",
        "contrastive_loss",
    }


def test_losses_are_named_and_weighed():
    @register_loss("spread")
    def spread(q_BD, c_CD, positive_BC, ignored_BC, *, temperature):
        return (q_BD @ c_CD.T / temperature).logsumexp(dim=1).sum()

    try:
        q, c = unit_rows(3, 8, 0), unit_rows(5, 8, 1)
        masks = columns(3, 5, [[0], [1], [2]]), columns(3, 5, [[4], [], []])
        terms = {"info_nce": 1.0, "spread": 0.25}
        found = contrastive_losses(q, c, Labels(*masks), terms=terms, temperature=0.2)
        assert torch.equal(found["info_nce"], info_nce(q, c, *masks, temperature=0.2))
        assert torch.equal(found["spread"], spread(q, c, *masks, temperature=0.2))
        torch.testing.assert_close(found["contrastive_loss"], found["info_nce"] + 0.25 * found["spread"])
        with error_about(UserError, "info_nce", "kl", "margin_mse", "spread"):
            contrastive_losses(q, c, Labels(*masks), terms={"spred": 1.0}, temperature=0.2)
    finally:
        del CONTRASTIVE_LOSSES._entries["spread"]


NAN = float("nan")


def judged():
    """Three queries, eight candidates: two positives and two negatives; one of each; a positive without a negative."""
    q, c = unit_rows(3, 6, 0).requires_grad_(), unit_rows(8, 6, 1).requires_grad_()
    scores = torch.full((3, 8), NAN)
    scores[0, [0, 1, 2, 3]] = torch.tensor([0.9, 0.4, 0.3, 0.05])
    scores[1, [4, 5]] = torch.tensor([0.7, 0.8])
    scores[2, 6] = 0.6
    return q, c, columns(3, 8, [[0, 1], [4], [6]]), columns(3, 8, []), scores


def test_margin_mse_is_the_mean_over_pairs_of_a_loop():
    q, c, positive, ignored, scores = judged()
    loss = margin_mse(q, c, positive, ignored, temperature=0.1, teacher=Teacher(scores, 1.0, 0.5))
    cosine, expected = q @ c.T, torch.zeros(())
    for row, (right, wrong) in enumerate([([0, 1], [2, 3]), ([4], [5])]):
        pairs = [(a, b) for a in right for b in wrong]
        for a, b in pairs:
            apart = cosine[row, a] - cosine[row, b] - 0.5 * (scores[row, a] - scores[row, b]).double()
            expected = expected + apart.square() / len(pairs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (q, c)), torch.autograd.grad(expected, (q, c)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_kl_is_that_of_a_loop_over_the_scored_targets():
    q, c, positive, ignored, scores = judged()
    loss = kl(q, c, positive, ignored, temperature=0.1, teacher=Teacher(scores, 0.2, 1.0))
    expected = torch.zeros(())
    for row, places in enumerate([[0, 1, 2, 3], [4, 5]]):
        log_q = (q[row] @ c[places].T / 0.1).log_softmax(0)
        p = (scores[row, places].double() / 0.2).softmax(0)
        expected = expected + (p * (p.log() - log_q)).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (q, c)), torch.autograd.grad(expected, (q, c)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss", [kl, margin_mse])
def test_a_batch_without_scores_adds_nothing_but_stays_in_the_graph(loss):
    q, c, positive, ignored, scores = judged()
    value = loss(q, c, positive, ignored, temperature=0.1, teacher=Teacher(scores * NAN, 1.0, 1.0))
    value.backward()
    assert value.item() == 0
    assert not q.grad.any()


def test_distillation_is_that_of_sentence_transformers():
    """Two queries, each with a positive and three negatives of its own, by their losses on given embeddings."""
    losses = pytest.importorskip("sentence_transformers.losses")
    from sentence_transformers.util import pairwise_cos_sim

    class Given(torch.nn.Module):
        def forward(self, features):
            return {"sentence_embedding": features["embedding"]}

    q, c = unit_rows(2, 6, 0).float(), unit_rows(8, 6, 1).float()
    own = [[0, 1, 2, 3], [4, 5, 6, 7]]
    scores = torch.full((2, 8), NAN)
    labels = torch.rand(2, 4, generator=torch.Generator().manual_seed(2))
    for row, places in enumerate(own):
        scores[row, places] = labels[row]
    positive, nothing = columns(2, 8, [[0], [4]]), columns(2, 8, [])
    groups = [{"embedding": q}, *({"embedding": c[[own[0][n], own[1][n]]]} for n in range(4))]
    theirs = losses.MarginMSELoss(Given(), similarity_fct=pairwise_cos_sim)(
        groups, labels[:, :1] - labels[:, 1:]
    )
    ours = margin_mse(q, c, positive, nothing, temperature=1.0, teacher=Teacher(scores, 1.0, 1.0))
    assert ours.item() / 2 == pytest.approx(theirs.item(), rel=1e-5)
    theirs = losses.DistillKLDivLoss(Given(), similarity_fct=pairwise_cos_sim, temperature=0.5)(
        groups, labels
    )
    ours = kl(q, c, positive, nothing, temperature=0.5, teacher=Teacher(scores, 0.5, 1.0))
    assert ours.item() / 2 * 0.5**2 == pytest.approx(theirs.item(), rel=1e-5)
