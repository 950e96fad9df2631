"""The transforms of one layer: what learning produces, fusing consumes and evaluation can simulate.

T tokens, R latent rank, E rope channels (interleaved), F = E/2 pairs. Tensors are float64 on CPU
unless a learner holds them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantmla.mla.rope import turn_pairs
from quantmla.quant.format import CacheFormat
from quantmla.quant.roundtrip import read_content, read_rope


@dataclass(frozen=True, slots=True)
class ContentTransform:
    """stored_TR = unit_latent_TR @ rotation_RR * scale_R.

    The unit latent is RMS-normalised, before kv_a_layernorm's weight. The rotation is orthogonal,
    so it passes through the norm into kv_a_proj_with_mqa; the scale becomes kv_a_layernorm.weight.
    """

    rotation_RR: Tensor
    scale_R: Tensor  # positive, except that the identity keeps the signs of the trained weight

    def apply(self, unit_latent_TR: Tensor) -> Tensor:
        return unit_latent_TR @ self.rotation_RR * self.scale_R

    def invert(self, stored_TR: Tensor) -> Tensor:
        return (stored_TR / self.scale_R) @ self.rotation_RR.T


@dataclass(frozen=True, slots=True)
class RopeTransform:
    """One angle (radians) and one positive gain per frequency pair; commutes with RoPE.

    Keys become turn_pairs(k, angle, gain), queries turn_pairs(q, angle, 1 / gain): scores stay.
    """

    angle_F: Tensor
    gain_F: Tensor

    def apply_key(self, k_rope_TE: Tensor) -> Tensor:
        return turn_pairs(k_rope_TE, self.angle_F, self.gain_F)

    def apply_query(self, q_rope_TE: Tensor) -> Tensor:
        return turn_pairs(q_rope_TE, self.angle_F, 1 / self.gain_F)

    def invert_key(self, k_rope_TE: Tensor) -> Tensor:
        return turn_pairs(k_rope_TE, -self.angle_F, 1 / self.gain_F)


class LayerTransform(NamedTuple):
    content: ContentTransform
    rope: RopeTransform
    # orthogonal, after RoPE, on keys and queries: cannot be fused
    online_rope_EE: Tensor | None = None


def identity(norm_R: Tensor, num_pairs: int) -> LayerTransform:
    """The checkpoint as it is: the cache holds unit latents times kv_a_layernorm's weight."""
    norm = norm_R.double()
    eye = torch.eye(len(norm), dtype=torch.float64, device=norm.device)
    ones = torch.ones(num_pairs, dtype=torch.float64, device=norm.device)
    return LayerTransform(ContentTransform(eye, norm), RopeTransform(torch.zeros_like(ones), ones))


def read_unit_latent(
    transform: ContentTransform, unit_latent_TR: Tensor, fmt: CacheFormat
) -> Tensor:
    """The unit latent as a reader recovers it: transform, quantise, undo."""
    return transform.invert(read_content(transform.apply(unit_latent_TR), fmt))


def read_rope_key(transform: LayerTransform, k_rope_TE: Tensor, fmt: CacheFormat) -> Tensor:
    """The rotated rope key as a reader recovers it; T starts at a page's first token."""
    stored = transform.rope.apply_key(k_rope_TE)
    online = transform.online_rope_EE
    if online is None:
        return transform.rope.invert_key(read_rope(stored, fmt))
    return transform.rope.invert_key(read_rope(stored @ online, fmt) @ online.T)
