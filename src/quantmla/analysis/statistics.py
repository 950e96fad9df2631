"""Ranks, and intervals by resampling.

M observations, W resamples.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantmla.analysis.protocol import Protocol


def ranks(values: Tensor) -> Tensor:
    """Ranks from 1, ties sharing their mean."""
    below = (values[:, None] > values).sum(1)
    equal = (values[:, None] == values).sum(1)
    return below.double() + (equal + 1) / 2


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation; None where one of the two has no order."""
    a, b = ranks(torch.tensor(x).double()), ranks(torch.tensor(y).double())
    a, b = a - a.mean(), b - b.mean()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size > 0 else None


def resampled(count: int, strata: int, protocol: Protocol) -> Tensor:
    """Indices [W, M] drawn with replacement within `strata` equal runs of `count` observations."""
    each = count // strata
    assert each * strata == count
    draw = torch.Generator().manual_seed(protocol.seed)
    within = torch.randint(0, each, (protocol.resamples, strata, each), generator=draw)
    return (within + each * torch.arange(strata)[:, None]).flatten(1)


def interval(
    statistic: Callable[[Tensor], Tensor], indices_WM: Tensor, protocol: Protocol
) -> list[float]:
    """Percentile bootstrap; `statistic` takes index sets [W, M] to [W] values."""
    values = statistic(indices_WM)
    tail = (1 - protocol.confidence) / 2
    edges = torch.tensor([tail, 1 - tail], dtype=values.dtype)
    low, high = torch.quantile(values, edges).tolist()
    return [low, high]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))
