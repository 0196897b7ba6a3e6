"""The byte recipe of `rge.identity.set_fingerprint`, repeated by hand."""

import hashlib

import numpy as np
import pytest

from rge.identity.set_fingerprint import set_fingerprint

QRELS = [("q2", "b", 1), ("q1", "a", 2), ("q1", "é", 1)]


def test_recipe_by_hand():
    text = (
        '["query","q1"]\n["query","q2"]\n["corpus","a"]\n["corpus","b"]\n["corpus","é"]\n'
        '["qrels","q1","a",2]\n["qrels","q1","é",1]\n["qrels","q2","b",1]\n'
    )
    assert set_fingerprint(["q2", "q1"], ["b", "é", "a"], QRELS) == hashlib.sha256(text.encode()).hexdigest()


def test_order_does_not_matter_and_numpy_gains_are_integers():
    one = set_fingerprint(["q1", "q2"], ["a", "b", "é"], QRELS)
    other = set_fingerprint(["q2", "q1"], ["é", "b", "a"], [(q, c, np.int64(g)) for q, c, g in QRELS[::-1]])
    assert one == other


def test_every_table_counts():
    tables = [{}, *({name: [("q1", "b")]} for name in ("negatives", "excluded", "candidates"))]
    prints = {set_fingerprint(["q1", "q2"], ["a", "b", "é"], QRELS, **table) for table in tables}
    assert len(prints) == 4


@pytest.mark.parametrize("gain", [1.0, True, "1", None])
def test_gain_must_be_an_integer(gain):
    with pytest.raises(ValueError):
        set_fingerprint(["q"], ["a"], [("q", "a", gain)])


def test_ids_must_be_strings():
    with pytest.raises(ValueError):
        set_fingerprint(["q"], [7], [("q", "a", 1)])
