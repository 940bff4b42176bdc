"""Diversity: counts by hand."""

from __future__ import annotations

import math

import pytest

from adjust_dlm.eval.table import distinct_n, repeat_coverage, repeated_share, token_entropy
from adjust_dlm.types import InputError


def test_distinct_n_by_hand() -> None:
    texts = [[1, 2, 1, 2], [2, 1], [3]]
    assert distinct_n(texts, 1) == 3 / 7
    assert distinct_n(texts, 2) == 2 / 4  # 12 21 12 | 21
    assert distinct_n(texts, 3) == 2 / 2
    assert math.isnan(distinct_n(texts, 5))
    assert distinct_n([[1, 2], [3, 4]], 2) == 1  # 2 3 is no bigram: texts do not run into each other


def test_repeat_coverage_by_hand() -> None:
    assert repeat_coverage([1, 2, 3, 4], 4) == 0  # once is no repetition
    assert repeat_coverage([1, 2, 3, 4, 9, 1, 2, 3, 4, 8], 4) == 8 / 10
    assert repeat_coverage([7] * 6, 4) == 1  # overlapping occurrences count each token once
    assert repeat_coverage([1, 2, 3, 4, 5, 6, 7, 8] * 2, 4) == 8 / 16
    # Of two repeated 2-grams the one that covers more: 1 2 three times, 5 6 twice.
    assert repeat_coverage([5, 6, 1, 2, 0, 1, 2, 9, 1, 2, 5, 6], 2) == 6 / 12
    assert repeat_coverage([], 4) == 0


def test_token_entropy_by_hand() -> None:
    assert token_entropy([[1, 2, 3, 4], [5, 5, 5, 5], []]) == pytest.approx(
        math.log(4) / 2
    )  # the empty one is left out
    assert token_entropy([[1, 1, 1, 2]]) == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert token_entropy([[0, 1], [0, 1]]) == pytest.approx(math.log(2))  # of each text, not of all together
    assert math.isnan(token_entropy([[]]))


def test_repeated_share_by_hand() -> None:
    texts = [[7] * 8, list(range(20)), [1, 2, 3, 4, 9, 1, 2, 3, 4, 8], []]
    assert repeated_share(texts) == 2 / 4
    assert repeated_share(texts, above=0.8) == 1 / 4  # above, not from


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="n is 0"):
        distinct_n([[1]], 0)
    with pytest.raises(InputError, match="no texts"):
        repeated_share([])
