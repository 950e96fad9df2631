"""Ranks and resampling against cases worked out by hand."""

import math

import pytest
import torch
from random_layer import normal

from quantmla.analysis.protocol import Protocol
from quantmla.analysis.statistics import geometric_mean, interval, ranks, resampled, spearman


def test_ties_share_their_mean_rank():
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 7.0])).tolist() == [2.5, 1.0, 2.5, 4.0]


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 25, 400], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        # without ties 1 - 6 sum d^2 / (n (n^2 - 1)): here d = 1, 1, 0, 0, 0
        ([1, 2, 3, 4, 5], [2, 1, 3, 4, 5], 1 - 6 * 2 / (5 * 24)),
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_spearman(x: list[float], y: list[float], expected: float | None):
    found = spearman(x, y)
    assert found == expected if expected is None else found == pytest.approx(expected, abs=1e-12)


def test_resampling_stays_within_strata():
    picks = resampled(12, 3, Protocol(resamples=50))
    assert picks.shape == (50, 12)
    for stratum in range(3):
        part = picks[:, 4 * stratum : 4 * stratum + 4]
        assert bool(((part >= 4 * stratum) & (part < 4 * stratum + 4)).all())
    assert len(picks.unique(dim=0)) > 40


def test_the_interval_of_a_mean_is_about_that_of_the_normal_law():
    x, protocol = normal(3, 400), Protocol(resamples=4000)
    low, high = interval(lambda i: x[i].mean(1), resampled(400, 1, protocol), protocol)
    half = 1.96 * float(x.std(correction=0)) / 20
    # 4,000 draws give a 2.5 % quantile with a standard error of 0.04 of the mean's own
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)
    assert low < float(x.mean()) < high


def test_geometric_mean():
    assert geometric_mean([1.0, 8.0]) == pytest.approx(math.sqrt(8))
