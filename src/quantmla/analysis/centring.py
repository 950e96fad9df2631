"""What storing a page's mean does to rope keys: by frequency pair, and by layer.

B sequences, S tokens, E rope channels, F pairs (fastest first).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantmla.analysis.protocol import Protocol
from quantmla.analysis.statistics import geometric_mean, spearman
from quantmla.analysis.subject import StudyLayer, quantiser_error
from quantmla.objective import (
    Activations,
    attention_output,
    positional_energy,
    summarize_queries,
)
from quantmla.quant.format import CacheFormat, paper_format, parse_format

FORMATS: dict[str, CacheFormat] = {
    "plain": paper_format("c4r4").unprotected(),
    "centred": parse_format("c4r4", rope_bands=1).unprotected(),
    "banded": parse_format("c4r4").unprotected(),  # centred, in two bands: what is shipped
}


def by_pair(x_BSE: Tensor) -> Tensor:
    """Squared length of each pair, summed over tokens, [F]."""
    return x_BSE.double().square().flatten(0, -2).sum(0).unflatten(0, (-1, 2)).sum(-1).cpu()


def mean_by_pair(k_rope_BSE: Tensor, page_size: int) -> Tensor:
    """Energy of the page means, counted once for each of their tokens, [F]; whole pages only."""
    whole = k_rope_BSE.shape[1] // page_size * page_size
    pages = k_rope_BSE[:, :whole].double().unflatten(1, (-1, page_size))
    return by_pair(pages.mean(2)) * page_size


@torch.no_grad()
def measure(layer: StudyLayer, protocol: Protocol, generator: torch.Generator) -> dict[str, Any]:
    """Mean squares per token by pair, and normalised errors of scores and output by format."""
    del generator  # nothing is drawn
    pairs: dict[str, Tensor] = {}
    totals: dict[str, dict[str, float]] = {}
    page_size = FORMATS["plain"].page_size
    for x in layer.batches(protocol.batch_size):
        key = x.k_rope_BSE
        _add(pairs, {"energy": by_pair(key), "page_mean": mean_by_pair(key, page_size)})
        for name, fmt in FORMATS.items():
            error = quantiser_error(key, "rope", fmt)
            _add(pairs, {f"error_{name}": by_pair(error)})
            for what, value in _errors(layer, x, error).items():
                of = totals.setdefault(what, dict.fromkeys(FORMATS, 0.0) | {"all": 0.0})
                of[name] += value[0]
                of["all"] += value[1] / len(FORMATS)
    tokens = layer.sample.k_rope_BSE.shape[0] * layer.sample.k_rope_BSE.shape[1]
    return {
        "pairs": {name: (total / tokens).tolist() for name, total in pairs.items()},
        "page_mean_share": float(pairs["page_mean"].sum() / pairs["energy"].sum()),
        **{what: {name: of[name] / of["all"] for name in FORMATS} for what, of in totals.items()},
    }


def _add(totals: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, x in more.items():
        totals[name] = totals[name] + x if name in totals else x


def _errors(layer: StudyLayer, x: Activations, error: Tensor) -> dict[str, tuple[float, float]]:
    """Energies of the error and of what it is an error of: row-centred scores, and output."""
    queries = summarize_queries(x.q_rope_BSNE)
    target = attention_output(layer.weights, x, layer.softmax_scale)
    read = x._replace(k_rope_BSE=x.k_rope_BSE + error)
    changed = attention_output(layer.weights, read, layer.softmax_scale) - target
    scores = [
        float(positional_energy(rows, queries, row_centred=True)) for rows in (error, x.k_rope_BSE)
    ]
    return {
        "score_error": (scores[0], scores[1]),
        "output_error": (float(changed.square().sum()), float(target.square().sum())),
    }


def summarize(layers: Sequence[Mapping[str, Any]], protocol: Protocol) -> dict[str, Any]:
    """By how much errors fall (geometric means over layers), and which layers gain most."""
    del protocol
    found: dict[str, Any] = {}
    for what in ("score_error", "output_error"):
        found[what] = {
            name: geometric_mean([layer[what]["plain"] / layer[what][name] for layer in layers])
            for name in ("centred", "banded")
        }
    gains = [layer["score_error"]["plain"] / layer["score_error"]["centred"] for layer in layers]
    order = sorted(range(len(gains)), key=lambda i: -gains[i])
    shares = [layer["page_mean_share"] for layer in layers]
    return found | {
        "by_gain": order,
        "page_mean_share": sum(shares) / len(shares),
        "share_gain_spearman": spearman(shares, gains),
    }
