"""Whether trace and allocation predict which path's error costs more, and by how much.

log(G_P / G_C) is predicted by log(T_P / T_C) + log(A_P / A_C) + gamma, where gamma stands for the
cross terms and is one number. It is fitted on every second layer and judged on the others.
Controls: the trace alone (no allocation), and gamma alone, that is, equal gains but for a constant.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from quantmla.analysis.statistics import spearman

PUBLISHED_GAMMA = -0.0749614410  # of the paper, fixed on DeepSeek-V2-Lite


class Point(NamedTuple):
    """Logarithms of rope over content, for one layer and one input."""

    gain: float  # finite: what is predicted
    first_order: float
    trace: float
    allocation: float

    @staticmethod
    def of(point: Mapping[str, Mapping[str, float]]) -> "Point":
        def log_ratio(key: str) -> float:
            return math.log(point["rope"][key] / point["content"][key])

        return Point(*map(log_ratio, ("finite_gain", "gain", "trace", "allocation")))


MODELS: dict[str, Callable[[Point], float]] = {
    "full": lambda p: p.trace + p.allocation,
    "trace_only": lambda p: p.trace,
    "cache_error_only": lambda p: 0.0,
}


def record(layers: Sequence[Sequence[Point]]) -> dict[str, Any]:
    """Of our gamma on the layers that were left out, and of the published one on all layers."""
    every = [point for layer in layers for point in layer]
    first_order = spearman([p.first_order for p in every], [p.gain for p in every])
    found: dict[str, Any] = {
        "published_gamma": {"gamma": PUBLISHED_GAMMA, **_judged(every, PUBLISHED_GAMMA)},
        "first_order_spearman": first_order,
    }
    fitted_on, judged_on = list(range(0, len(layers), 2)), list(range(1, len(layers), 2))
    if not judged_on:  # one layer alone leaves nothing to judge on
        return {"gamma": None, **_judged([], 0.0), "fitted_on": fitted_on, "judged_on": []} | found
    gamma = fmean(p.gain - MODELS["full"](p) for i in fitted_on for p in layers[i])
    judged = _judged([p for i in judged_on for p in layers[i]], gamma)
    return {"gamma": gamma, **judged, "fitted_on": fitted_on, "judged_on": judged_on} | found


def with_own_gamma(layers: Sequence[Sequence[Point]], name: str) -> dict[str, Any]:
    """The record of one of MODELS with a gamma fitted to it, as a control may have."""
    fitted_on = [p for layer in layers[::2] for p in layer]
    gamma = fmean(p.gain - MODELS[name](p) for p in fitted_on)
    judged_on = [p for layer in layers[1::2] for p in layer]
    return {
        "gamma": gamma,
        "points": len(judged_on),
        "models": {name: _errors(judged_on, MODELS[name], gamma)},
    }


def _judged(points: Sequence[Point], gamma: float) -> dict[str, Any]:
    return {
        "points": len(points),
        "models": {name: _errors(points, model, gamma) for name, model in MODELS.items()},
    }


def _errors(
    points: Sequence[Point], model: Callable[[Point], float], gamma: float
) -> dict[str, float | None]:
    """Rank correlation and absolute log errors of one model."""
    if not points:
        return {"spearman": None, "median_log_error": None, "mean_log_error": None}
    predicted, actual = [model(p) + gamma for p in points], [p.gain for p in points]
    misses = [abs(a - b) for a, b in zip(predicted, actual, strict=True)]
    return {
        "spearman": spearman(predicted, actual),
        "median_log_error": median(misses),
        "mean_log_error": fmean(misses),
    }
