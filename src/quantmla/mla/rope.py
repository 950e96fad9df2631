"""Orders of the rope channels, and the transforms that commute with the rotation.

E rope channels, F = E/2 pairs. Inside this package rope channels are *interleaved*: pair i is
channels (2i, 2i+1), pair 0 turns fastest, so channels are in order of falling frequency. Families
that keep *half*-split channels (pair i is channels i and i + F) convert at the border.
"""

from typing import Literal

import torch
from torch import Tensor

RopeOrder = Literal["interleaved", "half"]


def half_to_interleaved(x_E: Tensor, dim: int = -1) -> Tensor:
    """(0..F-1, F..2F-1) to (0, F, 1, F+1, ...) along `dim`."""
    x = x_E.movedim(dim, -1)
    x = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return x.movedim(-1, dim)


def interleaved_to_half(x_E: Tensor, dim: int = -1) -> Tensor:
    """Inverse of `half_to_interleaved`."""
    x = x_E.movedim(dim, -1)
    x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return x.movedim(-1, dim)


def to_interleaved(x: Tensor, order: RopeOrder, dim: int = -1) -> Tensor:
    return x if order == "interleaved" else half_to_interleaved(x, dim)


def from_interleaved(x: Tensor, order: RopeOrder, dim: int = -1) -> Tensor:
    return x if order == "interleaved" else interleaved_to_half(x, dim)


def turn_pairs(x_E: Tensor, angle_F: Tensor, gain_F: Tensor | float = 1.0) -> Tensor:
    """Each pair turned by its angle (radians) and multiplied by its gain; leading shape broadcasts.

    As complex numbers: (a + ib) * gain * exp(i angle). This is the whole family of linear maps
    that commute with every rotation RoPE applies (distinct frequencies), so it folds into weights.
    """
    a, b = x_E[..., 0::2], x_E[..., 1::2]
    cos, sin = torch.cos(angle_F) * gain_F, torch.sin(angle_F) * gain_F
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def rotate(x_TE: Tensor, positions_T: Tensor, inv_freq_F: Tensor) -> Tensor:
    """RoPE itself on interleaved channels; `x_TE` may have more leading dimensions."""
    return turn_pairs(x_TE, positions_T[:, None].to(inv_freq_F.dtype) * inv_freq_F)
