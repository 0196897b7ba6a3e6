"""What data preparation says of a split with few training queries."""

import re

from data_prep.rmir.results.report import about_split


def rows(*scores: float, threshold: float = 0.9) -> list[dict]:
    return [{"tsr": score, "split": "test" if score > threshold else "train"} for score in scores]


def test_a_split_with_few_training_queries_names_a_threshold_that_makes_more():
    scores = [0.9 + number / 1000 for number in range(-1, 9)]  # 2 training and 8 test queries
    said = about_split(rows(*scores), 0.9)
    threshold = float(re.search(r"split.tsr_threshold=([\d.]+)", said)[1])
    assert sum(score > threshold for score in scores) == 2
    assert about_split(rows(*scores, threshold=threshold), threshold) is None


def test_a_split_that_no_threshold_changes_names_none():
    assert "split.tsr_threshold=" not in about_split(rows(1.0, 1.0, 1.0), 0.9)


def test_a_usual_split_is_not_worth_a_word():
    assert about_split(rows(0.5, 0.6, 0.95), 0.9) is None
