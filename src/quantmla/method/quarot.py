"""QuaRot adapted to latent attention (QuantMLA paper, D.2; QuaRot: arXiv 2404.00456).

A Hadamard rotation of the unit latent, folded into the weights, and one of the rope key and query
after RoPE, which no weights can hold: it runs online. No signs, nothing is learned.
"""

from dataclasses import dataclass

import torch

from quantmla.method.layer import Fitted, Layer
from quantmla.quant.format import CacheFormat
from quantmla.transform.layer import ContentTransform, LayerTransform, identity
from quantmla.transform.orthogonal import hadamard

PUBLISHED_FORMAT = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """None."""


def fit(layer: Layer, fmt: CacheFormat, options: Options, generator: torch.Generator) -> Fitted:
    """Hadamard matrices of both paths' sizes, which must be powers of two."""
    del options, generator
    rank, channels = len(layer.weights.norm_R), layer.train.k_rope_BSE.shape[-1]
    plain = identity(layer.weights.norm_R.cpu(), channels // 2)
    ones = torch.ones(rank, dtype=torch.float64)
    online = hadamard(channels) if channels and fmt.rope_bits < 16 else None
    return Fitted(LayerTransform(ContentTransform(hadamard(rank), ones), plain.rope, online))
