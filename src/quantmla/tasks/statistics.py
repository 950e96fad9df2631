"""Means with standard errors, and two methods compared on the same items.

n items; scores are floats, one per item, in the same order for both methods.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

RESAMPLES = 10_000
CHUNK = 500  # resamples drawn at once


class Mean(NamedTuple):
    """A mean; `stderr` is the sample deviation over sqrt(n), None for a single item."""

    score: float
    stderr: float | None


class Paired(NamedTuple):
    """b against a. `interval` holds 95 % of the bootstrap's mean differences.

    Scores of 0 and 1: `test` is McNemar's exact test, and the counts say on how many items one is
    right alone. Others: the bootstrap's two-sided share, and no counts.
    """

    difference: float
    interval: tuple[float, float]
    test: str
    p: float
    only_a: int | None
    only_b: int | None


def mean(scores: Sequence[float]) -> Mean:
    n = len(scores)
    average = math.fsum(scores) / n
    if n < 2:
        return Mean(average, None)
    squares = math.fsum((score - average) ** 2 for score in scores)
    return Mean(average, math.sqrt(squares / (n - 1) / n))


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided p of so uneven a split, if disagreements went either way with even odds."""
    n, least = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, k) for k in range(least + 1))
    return min(1.0, float(2 * tail / 2**n))


def bootstrap(differences: Sequence[float], seed: int = 0) -> list[float]:
    """Sorted means of RESAMPLES draws with replacement."""
    values = torch.tensor(differences, dtype=torch.float64)
    draw = torch.Generator().manual_seed(seed)
    means = [
        values[torch.randint(len(values), (CHUNK, len(values)), generator=draw)].mean(1)
        for _ in range(RESAMPLES // CHUNK)
    ]
    found: list[float] = torch.cat(means).sort().values.tolist()
    return found


def compare(a: Sequence[float], b: Sequence[float]) -> Paired:
    """b against a on the same items."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    means = bootstrap(differences)
    low, high = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]
    average = math.fsum(differences) / len(differences)
    if {*a, *b} <= {0.0, 1.0}:
        only_a, only_b = differences.count(-1.0), differences.count(1.0)
        p = mcnemar(only_a, only_b)
        return Paired(average, (low, high), "mcnemar", p, only_a, only_b)
    below, above = sum(m <= 0 for m in means), sum(m >= 0 for m in means)
    p = min(1.0, 2 * min(below, above) / RESAMPLES)
    return Paired(average, (low, high), "bootstrap", p, None, None)
