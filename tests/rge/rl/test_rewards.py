"""Every reward by hand, on one small case; masks by identity; a judge that answers, fails midway and is down."""

import math
import re

import forked
import pytest
import torch
import torch.nn.functional as F
from faults import error_about
from paths import ROOT, WORKERS

from rge.calls.local_server import Answer, LocalServer, chat
from rge.common.errors import UserError
from rge.rl import judge
from rge.rl.config import RewardConfig
from rge.rl.rewards import REWARDS, Rollouts, evaluate, find_reward, problems, reward

TAU = 0.1
WORDS = {1: "a", 2: "key", 3: "opens", 4: "Schlüssel", 5: "鍵", 9: "<emb>"}


@pytest.fixture
def group(tmp_path):
    """Two queries, three rationales each, five candidates; scores are what the states make them, in float64.

    Query 0: candidates 0 and 1 are right, 3 is its labelled negative. Query 1: 2 is right, nothing is labelled.
    """
    generator = torch.Generator().manual_seed(1)
    state = F.normalize(torch.randn(2, 3, 6, generator=generator, dtype=torch.float64), dim=-1)
    candidate = F.normalize(torch.randn(5, 6, generator=generator, dtype=torch.float64), dim=-1)
    right, labelled = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)
    right[0, [0, 1]] = right[1, 2] = labelled[0, 3] = True
    return Rollouts(
        state_BKD=state, candidate_VCD=candidate[None], seen_as_B=torch.zeros(2).long(), right_BC=right, labelled_BC=labelled,
        ids=[[(1, 2), (1, 2, 3, 3), ()], [(4,), (5, 1), (2, 2, 2)]],
        oracle_ids=[[1, 2, 3, 9], [2, 9]], query_ids=[[3], [1, 3]],
        forced_BK=torch.tensor([[False, True, False], [False, False, False]]),
        direct_BK=torch.tensor([[False, False, True], [False, False, True]]),
        temperature=TAU, cap=6, decode=lambda ids: " ".join(WORDS[one] for one in ids if one != 9), folder=tmp_path,
    )  # fmt: skip


def value(group, name, **options):
    config = RewardConfig(name, options=options)
    return evaluate(config, find_reward(config), group)


def by_hand(group, function):
    """(2, 3) of a function of one state's scores, the right columns, the wrong ones, and query and rationale."""
    rows = []
    for row in range(2):
        right = group.right_BC[row].nonzero().flatten().tolist()
        wrong = [column for column in range(5) if column not in right]
        rows.append(
            [
                function([float(q @ c) for c in group.candidate_VCD[0]], right, wrong, row, number)
                for number, q in enumerate(group.state_BKD[row])
            ]
        )
    return torch.tensor(rows, dtype=torch.float64)


def rank(scores, right, wrong):
    best = max(scores[column] for column in right)
    return 1 + sum(scores[column] >= best for column in wrong)


def mean(scores, columns):
    return sum(scores[column] for column in columns) / len(columns)


def test_rank_hit_and_margin(group):
    torch.testing.assert_close(value(group, "rank"), by_hand(group, lambda s, r, w, *_: 1 / rank(s, r, w)))
    torch.testing.assert_close(
        value(group, "hit"), by_hand(group, lambda s, r, w, *_: float(rank(s, r, w) == 1))
    )

    def margin(scores, right, *_):
        return math.log(sum(math.exp(scores[c] / TAU) for c in right)) - math.log(
            sum(math.exp(score / TAU) for score in scores)
        )

    torch.testing.assert_close(value(group, "margin"), by_hand(group, margin))
    direct = by_hand(group, margin)[:, 2:]
    torch.testing.assert_close(value(group, "gain_over_direct"), by_hand(group, margin) - direct)
    assert REWARDS["gain_over_direct"].needs_direct


@pytest.mark.parametrize("among", ["batch", "labelled"])
def test_ndcg(group, among):
    def ndcg(scores, right, wrong, row, _):
        against = wrong if among == "batch" else [c for c in wrong if group.labelled_BC[row, c]]
        order = sorted([*right, *against], key=lambda c: -scores[c])
        dcg = sum(1 / math.log2(2 + place) for place, c in enumerate(order) if c in right)
        return dcg / sum(1 / math.log2(2 + place) for place in range(len(right)))

    torch.testing.assert_close(value(group, "ndcg", among=among), by_hand(group, ndcg))
    with error_about(UserError, ("choice", "rl.rewards: ndcg's among", ("batch", "labelled"))):
        value(group, "ndcg", among="all")


def test_ties_count_against_the_right_answer(group):
    same = group.__class__(
        **{**vars_of(group), "candidate_VCD": group.candidate_VCD[:, :1].expand(-1, 5, -1)}
    )
    assert value(same, "rank").tolist() == [[1 / 4] * 3, [1 / 5] * 3]
    assert not value(same, "hit").any()
    # Query 0's right answers stand behind three wrong ones, one after the other.
    expected = (1 / math.log2(5) + 1 / math.log2(6)) / (1 + 1 / math.log2(3))
    assert value(same, "ndcg")[0, 0] == pytest.approx(expected)


def test_two_copies_of_a_right_answer_take_two_places(group):
    """A batch often holds a target twice; its copies' embeddings may be equal to the last bit."""
    candidate = torch.eye(5, dtype=torch.float64)[[0, 0, 1, 2, 3]]
    state = torch.zeros(2, 3, 5, dtype=torch.float64)
    state[:, 0, 0] = 1.0  # both copies first
    state[:, 1, :2] = torch.tensor([0.6, 0.8])  # one wrong candidate above both
    state[:, 2, :3] = torch.tensor([0.6, 0.8, 0.0])
    right = torch.tensor([[True, True, False, False, False]] * 2)
    twice = group.__class__(
        **vars_of(group) | {"candidate_VCD": candidate[None], "state_BKD": state, "right_BC": right}
    )
    behind = (1 / math.log2(3) + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    assert value(twice, "ndcg")[0].tolist() == pytest.approx([1, behind, behind])
    gap = 0.6 - 0.8 / 3
    assert value(twice, "ume_r1")[0].tolist() == pytest.approx([1, gap / 2, gap / 2])  # one of the top two


def vars_of(group):
    return {name: getattr(group, name) for name in group.__dataclass_fields__}


def test_format(group):
    assert value(group, "format").tolist() == [[1, 0, 1], [1, 1, 1]]
    assert value(group, "format", script="latin").tolist() == [[1, 0, 1], [1, 0, 1]]
    assert value(group, "format", script="CJK").tolist() == [[0, 0, 1], [0, 0, 0]]


def test_length_and_oracle_overlap(group):
    assert value(group, "length").tolist() == [[-2, -4, 0], [-1, -2, -3]]
    # Oracle a key opens: two of two and two of three; a key opens opens: three of four and of three; nothing.
    expected = [[2 * 2 / 5, 2 * 3 / 7, 0], [0, 0, 2 * 1 / 4]]
    torch.testing.assert_close(value(group, "oracle_overlap"), torch.tensor(expected, dtype=torch.float64))
    assert REWARDS["oracle_overlap"].needs_oracle


def test_published_rewards(group):
    def ume(scores, right, wrong, *_):
        top = sorted(range(5), key=lambda c: -scores[c])[: len(right)]
        return len(set(top) & set(right)) / len(right) * (mean(scores, right) - mean(scores, wrong))

    torch.testing.assert_close(value(group, "ume_r1"), by_hand(group, ume))

    def embed_rl(scores, right, wrong, *_):
        weights = [math.exp(scores[c] / 0.05) for c in wrong]
        hard = sum(weight * scores[c] for weight, c in zip(weights, wrong, strict=True)) / sum(weights)
        return (rank(scores, right, wrong) == 1) * (mean(scores, right) - hard)

    torch.testing.assert_close(value(group, "embed_rl"), by_hand(group, embed_rl))

    def grace(scores, right, wrong, row, number):
        labelled = [c for c in wrong if group.labelled_BC[row, c]]
        negative = mean(scores, labelled) if labelled else max(scores[c] for c in wrong)
        own = group.state_BKD[row]
        alike = sum(float(own[number] @ own[other]) for other in range(3) if other != number) / 2
        others = mean(scores, [c for c in wrong if c not in labelled])
        return (mean(scores, right) - negative + 0.2 * alike - 0.2 * others) / 0.1

    torch.testing.assert_close(value(group, "grace"), by_hand(group, grace))


def test_without_a_wrong_candidate_a_gap_has_no_number(group):
    alone = group.__class__(**{**vars_of(group), "right_BC": torch.ones(2, 5, dtype=torch.bool)})
    assert value(alone, "margin").tolist() == [[0, 0, 0], [0, 0, 0]]
    assert value(alone, "rank").tolist() == [[1, 1, 1], [1, 1, 1]]
    assert value(alone, "ume_r1").isnan().all()


def test_the_example_in_the_docs(group, monkeypatch):
    """docs/rl.md, as it is printed."""
    page = (ROOT / "docs" / "rl.md").read_text(encoding="utf-8")
    (example,) = [
        block for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "@reward" in block
    ]
    monkeypatch.setattr(REWARDS, "_entries", {name: REWARDS[name] for name in REWARDS})
    exec(compile(example, "docs/rl.md", "exec"), {"__name__": "my_rewards"})
    # "a key" / "a key opens opens" / nothing; "Schlüssel" / "鍵 a" / "key key key"
    torch.testing.assert_close(value(group, "short_words"), torch.tensor([[1, 1, 0], [0, 1, 1]]).double())
    torch.testing.assert_close(value(group, "short_words", most=3)[0], torch.tensor([1, 0.5, 0]).double())


def test_ones_own_reward(group):
    @reward("second_word")
    def second_word(group, word: int = 2):
        """Whether the second token is the word."""
        return torch.tensor([[float(ids[1:2] == (word,)) for ids in row] for row in group.ids])

    try:
        assert value(group, "second_word").tolist() == [[1, 1, 0], [0, 0, 1]]
        assert value(group, "second_word", word=1).tolist() == [[0, 0, 0], [0, 1, 0]]
    finally:
        del REWARDS._entries["second_word"]


# ---------------------------------------------------------------------------------------------------------------- judge


def endpoint_of(server, **more):
    return {
        "name": "judge-1",
        "base_url": server.url,
        "max_retries": 0,
        "backoff_s": 0.01,
        "reasks": 0,
        **more,
    }


@pytest.fixture(autouse=True)
def forget_callers():
    judge._caller.cache_clear()


def test_a_judge_is_asked_once_for_each_rationale(group):
    asked = []

    async def answer(path, body):
        asked.append(body["messages"][-1]["content"])
        return chat("8/10" if "key" in str(asked[-1]).split("Reasoning:")[-1] else "2")

    with LocalServer(answer) as server:
        found = value(group, "judge", endpoint=endpoint_of(server))
        assert found.tolist() == [[0.8, 0.8, 0.0], [0.2, 0.2, 0.8]]
        assert len(asked) == 5  # an empty rationale needs no judge
        assert "Query:\nopens" in str(asked).replace("\\n", "\n")
        assert "Reference reasoning:\na key opens" in str(asked).replace("\\n", "\n")
    # Kept: the server is gone, and another process asks again.
    judge._caller.cache_clear()
    assert value(group, "judge", endpoint=endpoint_of(server)).tolist() == found.tolist()


def test_one_process_calls_the_judge_for_all(tmp_path):
    asked = []

    async def answer(path, body):
        asked.append(str(body["messages"][-1]["content"]))
        return chat(asked[-1].split("Reasoning:")[-1].strip(" \\n'}]"))

    with LocalServer(answer) as server:
        done = forked.run_pair(WORKERS / "judge.py", tmp_path, server.url)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (first, callers), (second, others) = (torch.load(tmp_path / f"marks_{rank}.pt") for rank in range(2))
    torch.testing.assert_close(first, torch.tensor([[0.8, 0.3]]))
    torch.testing.assert_close(second, torch.tensor([[0.8, 0.3], [0.8, 0.4]]))
    assert (callers, others) == (1, 0)
    assert len(asked) == 4  # what both processes ask is asked once


def test_a_judge_that_fails_midway_has_no_number_for_those(group):
    async def answer(path, body):
        if "Schl" in str(body):
            return Answer({"error": {"message": "overloaded"}}, status=500)
        return chat("none of these" if "鍵" in str(body) else "10")

    with LocalServer(answer) as server:
        found = value(group, "judge", endpoint=endpoint_of(server))
    assert found[0].tolist() == [1.0, 1.0, 0.0]
    assert found[1].isnan().tolist() == [True, True, False]


def test_a_mark_that_is_cut_off_or_empty_is_none(group):
    """The 1 may be the beginning of 10; without content there is no answer, and nothing to keep."""
    ill = [True]

    async def answer(path, body):
        if not ill[0]:
            return chat("10")
        return chat("1", stop="length") if "Schl" in str(body) else chat("")

    with LocalServer(answer) as server:
        endpoint = endpoint_of(server)
        found = value(group, "judge", endpoint=endpoint)
        assert found.isnan().sum() == 5
        ill[0] = False
        judge._caller.cache_clear()
        assert (value(group, "judge", endpoint=endpoint) == 1).sum() >= 3, "these are asked again"


def test_a_judge_whose_budget_is_spent_ends_the_run(group):
    async def answer(path, body):
        return chat("5", input_tokens=1000)

    with LocalServer(answer) as server, pytest.raises(UserError, match="budget"):
        value(group, "judge", endpoint=endpoint_of(server, input_price=1000.0, budget=0.001, concurrency=1))


def test_a_wrong_endpoint_is_found_before_anything_runs():
    for endpoint, key in [
        ({"name": "m", "mode": "batch"}, "mode"),
        ({"name": "m", "base_url": "ftp://x"}, "rl.rewards: endpoint of judge.base_url"),
        ({"base_url": "http://x"}, "name"),
        ({"name": "m", "temprature": 1}, "temprature"),
    ]:
        with error_about(UserError, key):
            find_reward(RewardConfig("judge", options={"endpoint": endpoint}))
    with error_about(UserError, "rl.rewards", "options"):
        find_reward(RewardConfig("judge"))


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("return group.state_BKD.sum(dim=(1, 2))", "shape"),
        ("return group.no_such_field", "no_such_field"),
        ("return [[1.0]]", "list"),
    ],
)
def test_a_reward_of_ones_own_is_called_once_before_training(tmp_path, monkeypatch, body, word):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"own_reward_{word}"
    (tmp_path / f"{name}.py").write_text(
        f"def good(group):\n    return group.state_BKD[..., 0] * len(group.texts)\n\n\ndef bad(group):\n    {body}\n"
    )
    assert list(problems([RewardConfig(f"{name}:good")])) == []
    [problem] = problems([RewardConfig(f"{name}:good"), RewardConfig(f"{name}:bad")])
    assert f"{name}:bad" in problem
    assert word in problem


def test_all_rewards_pass_on_what_is_made_up(monkeypatch):
    calls = []
    monkeypatch.setattr("rge.rl.judge._caller", lambda *asked: calls.append(asked))
    endpoint = {"name": "m", "base_url": "http://127.0.0.1:9/v1"}
    options = {"judge": {"endpoint": endpoint}}
    known = [
        RewardConfig(name, options=options.get(name, {}))
        for name in REWARDS
        if REWARDS[name].function.__module__.startswith("rge.")
    ]
    assert len(known) > 5
    assert [one for one in problems(known) if "judge" not in one] == []
    assert calls == []
