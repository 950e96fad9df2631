"""No transform: what the quantiser does alone, page means and rope groups included."""

from dataclasses import dataclass

import torch

from quantmla.method.layer import Fitted, Layer, always_fused
from quantmla.quant.format import CacheFormat
from quantmla.transform.layer import identity

PUBLISHED_FORMAT = False
CALIBRATION = {"num_sequences": 1, "held_out_sequences": 1, "sequence_length": 128}
why_not_fused = always_fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """None."""


def fit(layer: Layer, fmt: CacheFormat, options: Options, generator: torch.Generator) -> Fitted:
    """The identity, whatever the layer and format."""
    del fmt, options, generator
    return Fitted(identity(layer.weights.norm_R.cpu(), layer.train.k_rope_BSE.shape[-1] // 2))
