"""How much more an error of one path costs than an equally large one of the other (paper, Table 4).

The direction is that of the quantiser's own error, scaled in each sequence to the same share of the
cache; the response is the output's normalised squared error over the cache's, after o_proj.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from quantmla.analysis.protocol import Protocol
from quantmla.analysis.statistics import interval, resampled
from quantmla.analysis.subject import PATHS, CachePath, StudyLayer, quantiser_error, scaled_to
from quantmla.objective import Activations, attention_output

FIELDS: dict[CachePath, str] = {"content": "unit_latent_BSR", "rope": "k_rope_BSE"}


@torch.no_grad()
def measure(layer: StudyLayer, protocol: Protocol, generator: torch.Generator) -> dict[str, Any]:
    """Mean responses of both paths, their ratio, and the responses of every sequence."""
    del generator  # nothing is drawn
    found: dict[CachePath, list[float]] = {path: [] for path in PATHS}
    for x in layer.cached_batches(protocol.batch_size):
        for path, responses in zip(PATHS, _responses(layer, x, protocol), strict=True):
            found[path] += responses.tolist()
    return {
        **_ratio(found["content"], found["rope"], layer.sequences, protocol),
        "by_sequence": found,
    }


def _responses(layer: StudyLayer, x: Activations, protocol: Protocol) -> list[Tensor]:
    """One number for each sequence, for the content and for the rope path."""
    weights, fmt = layer.cached_weights, protocol.direction_format()
    target = attention_output(weights, x, layer.softmax_scale)
    energy = target.square().sum((-2, -1))
    responses = []
    for path, name in FIELDS.items():
        rows = getattr(x, name)
        error = scaled_to(quantiser_error(rows, path, fmt), rows, protocol.matched_nmse)
        changed = attention_output(weights, x._replace(**{name: rows + error}), layer.softmax_scale)
        nmse = (changed - target).square().sum((-2, -1)) / energy
        responses.append((nmse / protocol.matched_nmse).double().cpu())
    return responses


def _ratio(
    content: Sequence[float], rope: Sequence[float], sequences: int, protocol: Protocol
) -> dict[str, Any]:
    """Means, and their ratio with an interval over sequences drawn anew within each cell."""
    c, r = torch.tensor(content).double(), torch.tensor(rope).double()
    picks = resampled(len(c), len(c) // sequences, protocol)
    return {
        "content": float(c.mean()),
        "rope": float(r.mean()),
        "ratio": float(r.mean() / c.mean()),
        "interval": interval(lambda i: r[i].mean(1) / c[i].mean(1), picks, protocol),
    }


def summarize(layers: Sequence[Mapping[str, Any]], protocol: Protocol) -> dict[str, Any]:
    """The model's ratio: mean over layers of the rope response over that of the content one."""
    means = {
        path: torch.tensor([layer["by_sequence"][path] for layer in layers]).double().mean(0)
        for path in PATHS
    }
    content, rope = means["content"].tolist(), means["rope"].tolist()
    return {
        **_ratio(content, rope, protocol.sequences, protocol),
        "median_layer_ratio": median(layer["ratio"] for layer in layers),
        "sequences": len(content),
        "cache_nmse": protocol.matched_nmse,
    }
