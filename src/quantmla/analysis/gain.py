"""What makes one direction of error cost more than another (paper, section 2 and Table 5).

G(e) = ||J e||^2 / ||e||^2 is the gain of an error direction. With H = J^T J, T = mean H_ii is what
a random direction gets, A = sum_i H_ii e_i^2 / (T ||e||^2) says whether the error lies where the
output looks, O what is left: errors that add up or cancel. G = T A + O, in the cache's coordinates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantmla.analysis import predictor
from quantmla.analysis.curvature import Diagonal, exact_diagonal, probed_diagonal
from quantmla.analysis.linear import Linear, jvp_content, jvp_rope, linearize, vjp
from quantmla.analysis.protocol import Protocol
from quantmla.analysis.subject import (
    PATHS,
    CachePath,
    StudyLayer,
    cached,
    quantiser_error,
    scaled_to,
    with_cached,
)
from quantmla.mla.attention import attention_expanded, causal_mask


@torch.no_grad()
def measure(layer: StudyLayer, protocol: Protocol, generator: torch.Generator) -> dict[str, Any]:
    """The gain model of both paths at every point."""
    points = []
    for x in layer.points(protocol.points):
        at = linearize(layer.weights, x, layer.softmax_scale)
        exact = exact_diagonal(at)
        used = exact
        if protocol.probes:
            used = probed_diagonal(at, protocol.probes, generator)
        points.append({path: _gain(at, path, (used, exact), protocol) for path in PATHS})
    return {"points": points}


def local_error(at: Linear, path: CachePath, protocol: Protocol) -> Tensor:
    """The quantiser's error direction, as small as the gain study wants it."""
    rows = cached(at.x, path)
    error = quantiser_error(rows, path, protocol.direction_format())
    return scaled_to(error, rows, protocol.local_nmse)


def jvp(at: Linear, path: CachePath, rows_KTC: Tensor) -> Tensor:
    return (jvp_content if path == "content" else jvp_rope)(at, rows_KTC)


def _gain(
    at: Linear, path: CachePath, diagonals: tuple[Diagonal, Diagonal], protocol: Protocol
) -> dict[str, float]:
    error = local_error(at, path, protocol)
    energy = error.square().sum()
    first_order = jvp(at, path, error[None])
    gain = float(first_order.square().sum() / energy)
    used, exact = (getattr(diagonal, path) for diagonal in diagonals)
    trace, allocated = (float(x) for x in _trace_and_allocated(used, error))
    found = {
        "gain": gain,
        "finite_gain": _finite_gain(at, path, error),
        "trace": trace,
        "allocation": allocated / trace,
        "cross": gain - allocated,
    }
    exact_trace, exact_allocated = (float(x) for x in _trace_and_allocated(exact, error))
    # O from H e itself, which knows nothing of the gain
    curved = vjp(at, first_order)[PATHS.index(path)][0]
    off_diagonal = float((error * (curved - exact * error)).sum() / energy)
    found["identity_error"] = abs(gain - exact_allocated - off_diagonal) / gain
    if protocol.probes:
        found["trace_error"] = trace / exact_trace - 1
        found["allocated_error"] = allocated / exact_allocated - 1
    return found


def _trace_and_allocated(diagonal: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """T, and T A = sum_i H_ii e_i^2 / ||e||^2."""
    return diagonal.mean(), (diagonal * error.square()).sum() / error.square().sum()


def _finite_gain(at: Linear, path: CachePath, error: Tensor) -> float:
    """The same ratio for the error as large as it is."""
    tokens = len(error)
    mask_ST = causal_mask(tokens, tokens, error.device)
    before, after = (
        attention_expanded(at.weights, x, at.softmax_scale, mask_ST)
        for x in (at.x, with_cached(at.x, path, cached(at.x, path) + error))
    )
    return float((after - before).square().sum() / error.square().sum())


def summarize(layers: Sequence[Mapping[str, Any]], protocol: Protocol) -> dict[str, Any]:
    """The predictor's record on layers that it was not fitted on, and checks of the identity."""
    del protocol
    points = [[predictor.Point.of(point) for point in layer["points"]] for layer in layers]
    values = [point[path] for layer in layers for point in layer["points"] for path in PATHS]
    errors = {
        key: max(abs(v[key]) for v in values)
        for key in ("identity_error", "trace_error", "allocated_error")
        if key in values[0]
    }
    return {**predictor.record(points), "largest": errors}
