"""SmoothQuant adapted to latent attention (QuantMLA paper, D.2; SmoothQuant: arXiv 2211.10438).

Per-channel content scales and pair-tied rope gains from magnitudes, with reciprocal consumers; the
exponent of each path is the one with the least held-out attention-output error. No gradients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantmla.method.layer import Fitted, Layer, always_fused, held_out_errors, off_device
from quantmla.method.statistics import content_magnitudes, log_scales, rope_magnitudes
from quantmla.quant.format import CacheFormat
from quantmla.transform.layer import ContentTransform, LayerTransform, RopeTransform

PUBLISHED_FORMAT = True
CALIBRATION = {"num_sequences": 128, "held_out_sequences": 32, "sequence_length": 2048}
why_not_fused = always_fused
ALPHAS = (0.125, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """None."""


def fit(layer: Layer, fmt: CacheFormat, options: Options, generator: torch.Generator) -> Fitted:
    """Searches both exponents, each with the other path exact."""
    del options, generator
    rank = len(layer.weights.norm_R)
    eye = torch.eye(rank, device=layer.device)

    def transform(scale_R: Tensor, gain_F: Tensor) -> LayerTransform:
        moved = scale_R.to(layer.device), gain_F.to(layer.device)
        angle = torch.zeros_like(moved[1])
        return LayerTransform(ContentTransform(eye, moved[0]), RopeTransform(angle, moved[1]))

    content, rope = content_magnitudes(layer.train), rope_magnitudes(layer.train)
    tried = []
    for alpha in ALPHAS:
        pair = (log_scales(content, alpha).exp(), log_scales(rope, alpha).exp())
        tried.append((pair, held_out_errors(layer, transform(*pair), fmt)))
    scale_R = min(tried, key=lambda t: t[1].content_output)[0][0]
    gain_F = min(tried, key=lambda t: t[1].rope_output)[0][1]
    return Fitted(off_device(transform(scale_R, gain_F)))
