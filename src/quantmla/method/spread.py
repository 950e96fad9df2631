"""How large the cache's channels are: what a group of channels has to share one grid over.

B sequences, S tokens; R latent rank, F frequency pairs.
"""

from typing import TypedDict

import torch
from torch import Tensor

from quantmla.method.layer import Layer, on_device
from quantmla.transform.layer import LayerTransform

DIGITS = 4  # significant, that are kept


class Spread(TypedDict):
    """Root mean square over held-out tokens, by latent channel and by frequency pair."""

    content: list[float]
    rope: list[float]


@torch.no_grad()
def cached_spread(layer: Layer, transform: LayerTransform) -> Spread:
    """Of the rows that a cache holds under `transform`, before they are quantised."""
    moved = on_device(transform, layer.device)
    content, rope = [], []
    for x in layer.batches(layer.held_out, 1):
        content.append(moved.content.apply(x.unit_latent_BSR).double().square().mean((0, 1)))
        key_BSE = moved.rope.apply_key(x.k_rope_BSE)
        if moved.online_rope_EE is not None:
            key_BSE = key_BSE @ moved.online_rope_EE
        rope.append(key_BSE.double().square().unflatten(-1, (-1, 2)).sum(-1).mean((0, 1)))
    return Spread(content=_root_mean(content), rope=_root_mean(rope))


def _root_mean(squares: list[Tensor]) -> list[float]:
    values = torch.stack(squares).mean(0).sqrt().tolist()
    return [float(f"{value:.{DIGITS}g}") for value in values]
