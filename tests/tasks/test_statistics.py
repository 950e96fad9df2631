"""Against values worked out by hand and by brute force."""

import itertools
import math

import pytest

from quantmla.tasks.statistics import compare, mcnemar, mean


def test_mean_and_its_error():
    assert mean([1.0, 0.0, 0.0, 1.0]) == (0.5, pytest.approx(math.sqrt(1 / 3 / 4)))
    assert mean([0.25]) == (0.25, None)


def test_mcnemar_is_the_share_of_splits_as_uneven():
    for only_a, only_b in itertools.product(range(5), range(5)):
        n = only_a + only_b
        splits = [sum(bits) for bits in itertools.product((0, 1), repeat=n)]
        uneven = [abs(2 * s - n) >= abs(only_a - only_b) for s in splits]
        assert mcnemar(only_a, only_b) == pytest.approx(sum(uneven) / len(splits))


def test_accuracies_are_compared_by_mcnemar():
    a = [1.0] * 12 + [0.0] * 8
    b = [1.0] * 4 + [0.0] * 15 + [1.0]
    found = compare(a, b)
    assert (found.test, found.only_a, found.only_b) == ("mcnemar", 8, 1)
    assert found.difference == pytest.approx(-7 / 20)
    assert found.p == pytest.approx(2 * (1 + 9) / 2**9)
    assert found.interval[0] < found.difference < found.interval[1] < 0


def test_other_scores_by_the_bootstrap():
    a = [i / 100 for i in range(100)]
    noise = [(-1) ** i * 0.1 for i in range(100)]
    same = compare(a, [x + e for x, e in zip(a, noise, strict=True)])
    assert same.test == "bootstrap"
    assert same.only_a is None
    # the mean of 100 differences of +-0.1 has standard deviation 0.01
    assert same.interval == (pytest.approx(-0.0196, abs=0.003), pytest.approx(0.0196, abs=0.003))
    assert same.p > 0.8
    assert compare(a, [x + 0.03 + e for x, e in zip(a, noise, strict=True)]).p < 0.02


def test_the_same_scores_are_no_difference():
    found = compare([0.5, 0.25], [0.5, 0.25])
    assert (found.difference, found.interval, found.p) == (0, (0, 0), 1)
