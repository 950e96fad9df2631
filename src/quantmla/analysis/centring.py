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
    totals: dict[str, Tensor] = {}
    page_size = FORMATS["plain"].page_size
    for x in layer.batches(protocol.batch_size):
        key = x.k_rope_BSE
        _add(totals, "energy", by_pair(key))
        _add(totals, "page_mean", mean_by_pair(key, page_size))
        errors = {name: quantiser_error(key, "rope", fmt) for name, fmt in FORMATS.items()}
        for name, error in errors.items():
            _add(totals, f"error_{name}", by_pair(error))
        _add(totals, "score_error", _score_energies(x, [*errors.values(), key]))
        _add(totals, "output_error", _output_energies(layer, x, list(errors.values())))
    tokens = layer.sample.k_rope_BSE.shape[0] * layer.sample.k_rope_BSE.shape[1]
    found: dict[str, Any] = {
        "page_mean_share": float(totals["page_mean"].sum() / totals["energy"].sum())
    }
    for what in ("score_error", "output_error"):
        energies = totals.pop(what)
        found[what] = dict(zip(FORMATS, (energies[:-1] / energies[-1]).tolist(), strict=True))
    return found | {"pairs": {name: (total / tokens).tolist() for name, total in totals.items()}}


def _add(totals: dict[str, Tensor], name: str, more: Tensor) -> None:
    totals[name] = totals[name] + more if name in totals else more


def _score_energies(x: Activations, rows: Sequence[Tensor]) -> Tensor:
    """Of row-centred positional scores, for each of some key-like rows [B, S, E]."""
    queries = summarize_queries(x.q_rope_BSNE)
    energies = [positional_energy(one, queries, row_centred=True) for one in rows]
    return torch.stack(energies).double().cpu()


def _output_energies(layer: StudyLayer, x: Activations, errors: Sequence[Tensor]) -> Tensor:
    """Of the output's change under each error, and last of the output itself."""
    target = attention_output(layer.weights, x, layer.softmax_scale)
    energies = []
    for error in errors:
        read = x._replace(k_rope_BSE=x.k_rope_BSE + error)
        changed = attention_output(layer.weights, read, layer.softmax_scale) - target
        energies.append(changed.square().sum())
    return torch.stack([*energies, target.square().sum()]).double().cpu()


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
