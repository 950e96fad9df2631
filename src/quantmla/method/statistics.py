"""Scales from magnitudes, shared by the methods that start from or stop at them (paper, 37)."""

import torch
from torch import Tensor

from quantmla.method.layer import Sample

QUANTILE = 0.999
MAX_LOG_SCALE = 2.0
MAX_ROWS = 65_536  # of a channel's magnitudes; torch's quantile has a size limit


def _magnitudes(rows_TC: Tensor) -> Tensor:
    """99.9th percentile of each channel's absolute value."""
    step = max(1, len(rows_TC) // MAX_ROWS)
    return torch.quantile(rows_TC[::step].float().abs(), QUANTILE, dim=0)


def _log_scales(magnitude_C: Tensor, alpha: float) -> Tensor:
    """alpha * (mean log a - log a), clipped: even magnitudes at alpha 1, unit scales at 0."""
    log_a = magnitude_C.clamp(min=1e-8).log()
    return (alpha * (log_a.mean() - log_a)).clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE)


def content_log_scale(sample: Sample, alpha: float) -> Tensor:
    """Per channel of the unit latent, [R]."""
    return _log_scales(_magnitudes(sample.unit_latent_BSR.flatten(0, 1)), alpha)


def rope_log_gain(sample: Sample, alpha: float) -> Tensor:
    """Per pair of the rope key, [F]: both channels share the larger magnitude."""
    magnitude_E = _magnitudes(sample.k_rope_BSE.flatten(0, 1))
    return _log_scales(magnitude_E.unflatten(0, (-1, 2)).amax(-1), alpha)
