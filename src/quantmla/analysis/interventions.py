"""Which property of the quantiser's error makes it cheap or dear (paper, Table 6).

The error is replaced by one of the same energy: with random signs, with its rows on other tokens,
or isotropic. Means over draws are known: T A for signs, whose cross terms average out, and T for
isotropic errors. Rows on other tokens keep what is within a token: by the diagonal alone they cost
sum_j mean_k(H_kj) sum_k(e_kj^2) / ||e||^2.

K repetitions, T tokens, C channels of the path.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from quantmla.analysis.curvature import exact_diagonal
from quantmla.analysis.gain import jvp, local_error
from quantmla.analysis.linear import Linear, at_once, linearize
from quantmla.analysis.protocol import Protocol
from quantmla.analysis.statistics import interval, resampled
from quantmla.analysis.subject import PATHS, CachePath, StudyLayer

Draw = Callable[[Tensor, int, torch.Generator], Tensor]  # error [T, C], K -> [K, T, C]


def _signs(error: Tensor, count: int, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, (count, *error.shape), generator=generator, device=generator.device)
    return error * (2 * bits - 1).to(error)


def _tokens(error: Tensor, count: int, generator: torch.Generator) -> Tensor:
    order = torch.rand(count, len(error), generator=generator, device=generator.device)
    return error[order.argsort(-1).to(error.device)]


def _isotropic(error: Tensor, count: int, generator: torch.Generator) -> Tensor:
    size = (count, *error.shape)
    x = torch.randn(size, generator=generator, device=generator.device).to(error)
    return x * (error.square().sum() / x.square().sum((-2, -1), keepdim=True)).sqrt()


KINDS: dict[str, Draw] = {"signs": _signs, "tokens": _tokens, "isotropic": _isotropic}


@torch.no_grad()
def measure(layer: StudyLayer, protocol: Protocol, generator: torch.Generator) -> dict[str, Any]:
    """For each path and kind: gains over the real error's, at every point."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        path: {kind: [] for kind in KINDS} for path in PATHS
    }
    for x in layer.points(protocol.points):
        at = linearize(layer.weights, x, layer.softmax_scale)
        diagonals = exact_diagonal(at)
        for path in PATHS:
            error = local_error(at, path, protocol)
            real = float(_gains(at, path, error[None])[0])
            expected = expectations(getattr(diagonals, path), error)
            for kind, draw in KINDS.items():
                gains = _gains(at, path, draw(error, protocol.repetitions, generator))
                ratios = (gains / real).double()
                point = {
                    "log": float(ratios.log().mean()),
                    "mean": float(ratios.mean()),
                    "expected": expected[kind] / real,
                }
                found[path][kind].append(point)
    return {
        path: {kind: _pooled(points, protocol) | {"points": points} for kind, points in of.items()}
        for path, of in found.items()
    }


def _gains(at: Linear, path: CachePath, errors_KTC: Tensor) -> Tensor:
    """Gain of each error, [K]."""
    parts = [jvp(at, path, some).square().sum((-2, -1)) for some in errors_KTC.split(at_once(at))]
    return torch.cat(parts) / errors_KTC.square().sum((-2, -1))


def expectations(diagonal: Tensor, error: Tensor) -> dict[str, float]:
    """Mean gain of each kind of intervention, from H's diagonal [T, C]."""
    energy = error.square()
    across = (diagonal.mean(0) * energy.sum(0)).sum()
    return {
        "signs": float((diagonal * energy).sum() / energy.sum()),
        "tokens": float(across / energy.sum()),
        "isotropic": float(diagonal.mean()),
    }


def _pooled(points: Sequence[Mapping[str, float]], protocol: Protocol) -> dict[str, Any]:
    """Geometric mean over points with an interval over points, and plain means against theory."""
    logs = torch.tensor([p["log"] for p in points]).double()
    picks = resampled(len(logs), 1, protocol)
    return {
        "ratio": float(logs.mean().exp()),
        "interval": interval(lambda i: logs[i].mean(1).exp(), picks, protocol),
        "mean": fmean(p["mean"] for p in points),
        "expected": fmean(p["expected"] for p in points),
    }


def summarize(layers: Sequence[Mapping[str, Any]], protocol: Protocol) -> dict[str, Any]:
    """Over all layers and points; `agree` counts layers whose mean is on theory's side of 1."""
    found: dict[str, Any] = {}
    for path in PATHS:
        found[path] = {}
        for kind in KINDS:
            of_layers = [layer[path][kind] for layer in layers]
            pooled = _pooled([p for layer in of_layers for p in layer["points"]], protocol)
            agree = sum((x["mean"] > 1) == (x["expected"] > 1) for x in of_layers)
            found[path][kind] = pooled | {"agree": agree, "layers": len(of_layers)}
    return found
