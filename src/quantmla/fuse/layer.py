"""Folding of one layer's transform into its weights.

R latent rank, E rope channels (interleaved), F = E/2 pairs, N heads, P content head dim, V value
head dim, D hidden size, X query input width.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quantmla.errors import UsageError, require
from quantmla.mla.rope import turn_pairs
from quantmla.mla.weights import MlaWeights
from quantmla.transform.layer import LayerTransform


def fuse_layer(weights: MlaWeights, transform: LayerTransform) -> MlaWeights:
    """Weights, float64, whose caches hold the transformed latent and rope key; outputs stay.

    The rotation passes through the RMS norm into the down-projection and its bias, the scale takes
    the place of the norm's weight, and the up-projection undoes both and takes over the old norm's
    weight. Angles and gains turn the rope rows of keys and, inversely, of queries. Raises
    UsageError for an online rope rotation, which no weight can hold, and for another layer's sizes.
    """
    w = weights.to(dtype=torch.float64)
    _check(w, transform)
    rotation_RR, scale_R = (
        transform.content.rotation_RR.double(),
        transform.content.scale_R.double(),
    )
    angle_F, gain_F = transform.rope.angle_F.double(), transform.rope.gain_F.double()
    undo_RR = w.norm_R[:, None] * rotation_RR / scale_R

    def key(x_E: Tensor) -> Tensor:
        return turn_pairs(x_E, angle_F, gain_F)

    def query(x_E: Tensor) -> Tensor:
        return turn_pairs(x_E, angle_F, 1 / gain_F)

    return replace(
        w,
        w_dkv_RD=rotation_RR.T @ w.w_dkv_RD,
        b_dkv_R=None if w.b_dkv_R is None else w.b_dkv_R @ rotation_RR,
        w_kr_ED=key(w.w_kr_ED.T).T,
        b_kr_E=None if w.b_kr_E is None else key(w.b_kr_E),
        norm_R=scale_R,
        w_uk_NPR=w.w_uk_NPR @ undo_RR,
        w_uv_NVR=w.w_uv_NVR @ undo_RR,
        w_qr_NEX=query(w.w_qr_NEX.mT).mT,
        b_qr_NE=None if w.b_qr_NE is None else query(w.b_qr_NE),
    )


def _check(w: MlaWeights, transform: LayerTransform) -> None:
    content, rope, online = transform
    require(
        online is None,
        "an online rope rotation works after RoPE and cannot be fused into weights",
        UsageError,
    )
    rank, pairs = w.norm_R.shape[0], w.w_kr_ED.shape[0] // 2
    given = content.rotation_RR.shape[0], rope.angle_F.numel()
    require(
        given == (rank, pairs) and content.rotation_RR.shape[1] == rank,
        f"a transform of rank {given[0]} with {given[1]} rope pairs "
        f"does not fit a layer of rank {rank} with {pairs}",
        UsageError,
    )
    scale, gain = content.scale_R, rope.gain_F
    usable = bool(torch.isfinite(scale).all() and torch.isfinite(gain).all())
    usable = usable and bool((scale != 0).all() and (gain > 0).all())
    require(
        usable,
        "a transform has a scale that is zero or not finite",
        UsageError,
    )
