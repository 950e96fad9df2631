"""Exact parts of the real error's effect, and how the two paths' errors add up.

Parts of one error are not orthogonal: the shares of a squared norm are those of the parts and of
twice the products between them. They sum to 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from quantmla.analysis.protocol import Protocol
from quantmla.analysis.subject import PATHS, StudyLayer, cached, quantiser_error, with_cached
from quantmla.mla.attention import Inputs, attention_absorbed, causal_mask, split_error


@torch.no_grad()
def measure(layer: StudyLayer, protocol: Protocol, generator: torch.Generator) -> dict[str, Any]:
    """Mean shares over the points, in float64, for content, rope and both paths quantised."""
    del generator  # nothing is drawn
    return _mean([_point(layer, x, protocol) for x in _double(layer, protocol)])


def _double(layer: StudyLayer, protocol: Protocol) -> Iterator[Inputs]:
    for x in layer.points(protocol.points):
        yield Inputs(*(part.double() for part in x))


def _point(layer: StudyLayer, x: Inputs, protocol: Protocol) -> dict[str, dict[str, float]]:
    weights = layer.weights.to(dtype=torch.float64)
    mask_ST = causal_mask(len(x.latent_TR), len(x.latent_TR), layer.device)
    target = attention_absorbed(weights, x, layer.softmax_scale, mask_ST)
    read = {"content": x, "rope": x, "both": x}
    for path in PATHS:
        rows = cached(x, path)
        rows = rows + quantiser_error(rows.float(), path, protocol.direction_format()).double()
        for name in (path, "both"):
            read[name] = with_cached(read[name], path, rows)
    found, changes = {}, {}
    for name, inputs in read.items():
        parts = split_error(weights, x, inputs, layer.softmax_scale, mask_ST)
        changes[name] = sum(parts, torch.zeros_like(target))
        found[name] = shares(parts._asdict(), changes[name])
        found[name]["nmse"] = float(changes[name].square().sum() / target.square().sum())
    beyond = changes["both"] - changes["content"] - changes["rope"]
    together = {"content": changes["content"], "rope": changes["rope"], "beyond": beyond}
    return found | {"joint": shares(together, changes["both"])}


def shares(parts: Mapping[str, Tensor], whole: Tensor) -> dict[str, float]:
    """Of ||whole||^2, for parts that sum to it: theirs, and twice their products pair by pair."""
    energy = whole.square().sum()
    found = {name: float(part.square().sum() / energy) for name, part in parts.items()}
    for one, two in combinations(parts, 2):
        found[f"{one}_{two}"] = float(2 * (parts[one] * parts[two]).sum() / energy)
    return found


def _mean(points: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    return {
        name: {key: fmean(point[name][key] for point in points) for key in of}
        for name, of in points[0].items()
    }


def summarize(layers: Sequence[Mapping[str, Any]], protocol: Protocol) -> dict[str, Any]:
    """Means over layers."""
    del protocol
    return _mean(layers)
