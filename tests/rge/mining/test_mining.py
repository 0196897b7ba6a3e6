"""Mining against a loop that scores every pair, with repeated contents, shared identities and equal questions."""

import numpy as np
import pytest

from rge.common.errors import UserError
from rge.common.schema import Record
from rge.mining import search
from rge.mining.config import MiningRules
from rge.mining.rules import limits, order
from rge.mining.search import Groups, exact_scores, merged, nearest
from rge.mining.table import RecordTable
from rge.vectors.contents import content_digest

DIM = 12


def unit(rows, seed):
    x = np.random.default_rng(seed).standard_normal((rows, DIM), dtype=np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def record(number, positives, negatives=(), text=None):
    def target(name, identity=None, text=None):
        return {"id": name, "text": text or f"text of {name}"} | ({"identity": identity} if identity else {})

    return Record.model_validate(
        {
            "id": f"r{number}",
            "group": f"g{number}",
            "source": "s",
            "split": "train",
            "query": {"text": text or f"question {number}"},
            "positives": [target(*one) for one in positives],
            "negatives": [target(*one) for one in negatives],
        }
    )


def records(count, seed=0):
    """Some targets share an identity, some a text under two ids, some records a question; some have negatives."""
    rng = np.random.default_rng(seed)
    names = [f"t{number:04d}" for number in rng.permutation(count)]
    made = []
    for number in range(count):
        chosen = [names[place] for place in rng.choice(count, 1 + number % 3, replace=False)]
        positives = [
            (name, f"same {int(name[1:]) // 2}" if int(name[1:]) % 7 == 0 else None) for name in chosen
        ]
        if number % 11 == 0:
            positives.append((f"copy of {chosen[0]}", None, f"text of {chosen[0]}"))
        right = {name for name, *_ in positives}
        negatives = (
            [(name, None) for name in rng.choice(names, 2) if name not in right] if number % 5 == 0 else []
        )
        asked = f"question {number - 1}" if number % 13 == 12 else None
        made.append(record(number, positives, negatives, asked))
    return made


def brute_force(made, vectors_of, query_of, rules):
    """Every candidate of every query in one plain loop; names, not rows."""
    texts, names = {}, {}
    for one in made:
        for target in (*one.positives, *one.negatives):
            texts[target.text] = min(texts.get(target.text, target.id), target.id)
            names.setdefault(target.text, set()).update({target.id, target.identity or target.id})
    changed = True
    while changed:  # names that hang together
        changed = False
        by_name = {}
        for own in names.values():
            for name in own:
                by_name.setdefault(name, set()).update(own)
        for own in names.values():
            more = set().union(*(by_name[name] for name in own))
            changed |= more != own
            own |= more
    pool = sorted(texts, key=lambda text: (texts[text], text))
    pool_CD = np.stack([vectors_of[text] for text in pool]).astype(np.float64)
    found = {}
    for query in dict.fromkeys(one.query.text for one in made):
        of_query = [one for one in made if one.query.text == query]
        right = [target.text for one in of_query for target in one.positives]
        own = {target.text for one in of_query for target in one.negatives}
        right_names = set().union(*(names[text] for text in right))
        score_C = (query_of[query].astype(np.float64) * pool_CD).sum(axis=1).astype(np.float32)
        score = dict(zip(pool, score_C, strict=True))
        lowest = min(score[text] for text in right)
        limits = []
        if rules.relative_margin is not None:
            limits.append(np.float32(lowest - rules.relative_margin * abs(lowest)))
        if rules.absolute_margin is not None:
            limits.append(np.float32(lowest - rules.absolute_margin))
        if rules.max_score is not None:
            limits.append(np.float32(rules.max_score))
        wrong = [text for text in pool if not names[text] & right_names and text not in own]
        wrong = [text for text in wrong if all(score[text] <= limit for limit in limits)]
        wrong.sort(key=lambda text: (-score[text], texts[text]))
        found[query] = [(texts[text], score[text]) for text in wrong[rules.range[0] - 1 :][: rules.num]]
    return found


def mined(made, rules, *, parts=1, query_of=None, vectors_of=None):
    table = RecordTable(made, content_digest)
    query_QD = np.stack([query_of[query.item.text] for query in table.queries])
    candidate_CD = np.stack([vectors_of[target.text] for target in table.targets])
    most = limits(rules, table.lowest_positive(query_QD, candidate_CD))
    ends = [len(candidate_CD) * part // parts for part in range(parts + 1)]
    found = merged(
        [
            nearest(query_QD, candidate_CD[a:b], table.groups(), most, depth=rules.depth(), first_row=a)
            for a, b in zip(ends, ends[1:], strict=False)
        ]
    )
    names = {}
    for place, query in enumerate(table.queries):
        rows = found.row_QK[place][found.row_QK[place] >= 0]
        taken = order(rules, len(rows), query.digest)[: rules.num]
        names[query.item.text] = [
            (table.targets[rows[at]].id, found.score_QK[place, at]) for at in taken.tolist()
        ]
    return names, found


def embedded(made):
    texts = sorted({target.text for one in made for target in (*one.positives, *one.negatives)})
    asked = sorted({one.query.text for one in made})
    vectors_of = dict(zip(texts, unit(len(texts), 1), strict=True))
    vectors_of[texts[5]] = vectors_of[texts[9]] = vectors_of[texts[20]]  # ties, which the ids decide
    query_of = dict(zip(asked, unit(len(asked), 2), strict=True))
    for one in made:  # as after training: a query is nearer to its answers
        near = query_of[one.query.text] + vectors_of[one.positives[0].text]
        query_of[one.query.text] = near / np.linalg.norm(near)
    return {"vectors_of": vectors_of, "query_of": query_of}


@pytest.mark.parametrize(
    "rules",
    [
        MiningRules(num=5),
        MiningRules(num=5, relative_margin=None, range=(3, 50)),
        MiningRules(num=3, relative_margin=0.2, absolute_margin=0.1, max_score=0.5),
    ],
)
def test_the_lists_are_those_of_a_loop_over_all_pairs(rules, monkeypatch):
    made = records(240)
    monkeypatch.setattr(search, "QUERY_ROWS", 50)
    monkeypatch.setattr(search, "CANDIDATE_ROWS", 64)
    vectors = embedded(made)
    found, _ = mined(made, rules, **vectors)
    assert found == brute_force(made, vectors["vectors_of"], vectors["query_of"], rules)
    assert sum(map(len, found.values())) > 100


@pytest.mark.slow
def test_of_two_thousand_records():
    made, rules = records(2000), MiningRules(num=8)
    vectors = embedded(made)
    found, _ = mined(made, rules, **vectors)
    assert found == brute_force(made, vectors["vectors_of"], vectors["query_of"], rules)


def test_blocks_and_division_of_the_pool_change_nothing(monkeypatch):
    made, rules = records(300), MiningRules(num=6, choose="sampled", range=(2, 30))
    vectors = embedded(made)
    whole, at_once = mined(made, rules, **vectors)
    monkeypatch.setattr(search, "CANDIDATE_ROWS", 17)
    monkeypatch.setattr(search, "SPARE", 1)
    parts, in_parts = mined(made, rules, parts=3, **vectors)
    assert whole == parts
    assert {name: of.tolist() for name, of in at_once.dropped_Q.items()} == {
        name: of.tolist() for name, of in in_parts.dropped_Q.items()
    }


def test_near_ties_beyond_the_fetched_are_found(monkeypatch):
    """Many candidates within float32 rounding: the order of exact scores decides, not that of the product."""
    query = unit(1, 0)
    near = np.repeat(unit(1, 3), 400, axis=0)
    near[:, 0] += np.arange(400, dtype=np.float32)[::-1] * 1e-8  # most equal after rounding
    monkeypatch.setattr(search, "SPARE", 1)
    groups = Groups(np.arange(400), [[]], [[]])
    found = nearest(query, near, groups, {}, depth=4)
    score = exact_scores(np.repeat(query, 400, axis=0), near)
    assert found.row_QK[0].tolist() == np.lexsort((np.arange(400), -score))[:4].tolist()


def test_only_allowed_rows_are_found():
    candidate = unit(50, 1)
    allowed = np.arange(50) % 2 == 0
    found = nearest(
        unit(3, 0),
        candidate,
        Groups(np.arange(50), [[0], [], [2]], [[], [4], []]),
        {},
        depth=50,
        allowed_C=allowed,
    )
    assert [sorted(row[row >= 0].tolist()) for row in found.row_QK] == [
        [row for row in range(0, 50, 2) if row != hidden] for hidden in (0, 4, 2)
    ]


def test_a_choice_from_a_range_depends_on_the_query_alone():
    rules = MiningRules(num=3, choose="sampled", range=(3, 20))
    assert order(rules, 40, "a").tolist() == order(rules, 40, "a").tolist() != order(rules, 40, "b").tolist()
    assert sorted(order(rules, 40, "a").tolist()) == list(range(2, 20))
    assert sorted(order(rules, 10, "a").tolist()) == list(range(2, 10))
    assert order(rules, 1, "a").tolist() == []


def test_rules_that_leave_too_few_ranks_are_refused():
    with pytest.raises(UserError):
        MiningRules(num=8, range=(10, 12)).check()
    MiningRules(num=3, range=(10, 12)).check()


def test_a_relative_margin_lowers_a_negative_score_too():
    most = limits(MiningRules(relative_margin=0.1), np.array([0.5, -0.5], np.float32))
    assert most["relative_margin"].tolist() == pytest.approx([0.45, -0.55])
