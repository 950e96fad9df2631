"""Folding in float64: outputs stay, and each part of the fold is needed."""

from dataclasses import replace

import pytest
import torch
from tiny import random_transform

from quantmla.errors import UsageError
from quantmla.fuse.layer import fuse_layer
from quantmla.mla.geometry import MlaGeometry
from quantmla.mla.weights import MlaWeights
from quantmla.transform.layer import LayerTransform, identity
from quantmla.verify import attention_inputs, attention_output, random_case, relative_error

GEOMETRY = MlaGeometry(
    hidden_size=40,
    num_heads=3,
    kv_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=12,
    v_head_dim=10,
    q_lora_rank=18,
    norm_eps=1e-6,
    softmax_scale=20**-0.5,
)
EXACT = 1e-12  # float64 rounding through a handful of products


def random_weights(seed: int, g: MlaGeometry = GEOMETRY) -> MlaWeights:
    draw = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64) / shape[-1] ** 0.5

    d, n, r, e, x = (
        g.hidden_size,
        g.num_heads,
        g.kv_lora_rank,
        g.qk_rope_head_dim,
        g.query_width,
    )
    return MlaWeights(
        w_dkv_RD=matrix(r, d),
        b_dkv_R=matrix(r),
        w_kr_ED=matrix(e, d),
        b_kr_E=matrix(e),
        norm_R=0.5 + torch.rand(r, generator=draw, dtype=torch.float64),
        w_uk_NPR=matrix(n, g.qk_nope_head_dim, r),
        w_uv_NVR=matrix(n, g.v_head_dim, r),
        w_uq_NPX=matrix(n, g.qk_nope_head_dim, x),
        w_qr_NEX=matrix(n, e, x),
        b_uq_NP=matrix(n, g.qk_nope_head_dim),
        b_qr_NE=matrix(n, e),
        w_o_DNV=matrix(d, n, g.v_head_dim),
    )


def change(
    fused: MlaWeights, original: MlaWeights, g: MlaGeometry = GEOMETRY, seed: int = 9
) -> float:
    case = random_case(g, 32, seed)
    return relative_error(attention_output(fused, g, case), attention_output(original, g, case))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rotated", [True, False])
def test_outputs_stay(seed: int, rotated: bool):
    g = replace(GEOMETRY, rotated=rotated)
    weights = random_weights(seed, g)
    assert change(fuse_layer(weights, random_transform(24, 6, seed)), weights, g, seed) < EXACT


def test_caches_hold_the_transformed_values():
    weights, transform = random_weights(1), random_transform(24, 6, 1)
    case = random_case(GEOMETRY, 16, 1)
    before = attention_inputs(weights, GEOMETRY, case)
    after = attention_inputs(fuse_layer(weights, transform), GEOMETRY, case)
    unit_TR = before.latent_TR / weights.norm_R
    assert relative_error(after.latent_TR, transform.content.apply(unit_TR)) < EXACT
    assert relative_error(after.k_rope_TE, transform.rope.apply_key(before.k_rope_TE)) < EXACT
    assert relative_error(after.q_rope_SNE, transform.rope.apply_query(before.q_rope_SNE)) < EXACT


def test_identity_changes_nothing():
    weights = random_weights(2)
    fused = fuse_layer(weights, identity(weights.norm_R, 6))
    assert torch.equal(fused.w_dkv_RD, weights.w_dkv_RD)
    assert torch.equal(fused.w_qr_NEX, weights.w_qr_NEX)
    assert relative_error(fused.w_uk_NPR, weights.w_uk_NPR) < 1e-15


@pytest.mark.parametrize(
    "part",
    ["b_dkv_R", "b_kr_E", "b_qr_NE", "norm_R", "w_kr_ED", "w_qr_NEX", "w_uk_NPR", "w_uv_NVR"],
)
def test_every_part_of_the_fold_is_needed(part: str):
    """Left as it was, each part alone changes the output by far more than rounding."""
    weights = random_weights(3)
    fused = fuse_layer(weights, random_transform(24, 6, 3))
    assert change(replace(fused, **{part: getattr(weights, part)}), weights) > 1e-3


def test_weights_without_biases_get_none():
    bare = replace(random_weights(4), b_dkv_R=None, b_kr_E=None, b_uq_NP=None, b_qr_NE=None)
    fused = fuse_layer(bare, random_transform(24, 6, 4))
    assert (fused.b_dkv_R, fused.b_kr_E, fused.b_uq_NP, fused.b_qr_NE) == (None,) * 4
    assert change(fused, bare) < EXACT


def test_float32_weights_are_folded_in_float64():
    single = random_weights(5).to(dtype=torch.float32)
    fused = fuse_layer(single, random_transform(24, 6, 5))
    assert fused.w_o_DNV.dtype == fused.w_uk_NPR.dtype == torch.float64
    assert change(fused, single.to(dtype=torch.float64)) < EXACT


def test_online_rotations_are_refused():
    transform = random_transform(24, 6, 0)._replace(online_rope_EE=torch.eye(12).double())
    with pytest.raises(UsageError, match=r"an online rope rotation .* cannot be fused"):
        fuse_layer(random_weights(0), transform)


def test_transforms_of_other_sizes_are_refused():
    for rank, pairs in ((20, 6), (24, 5)):
        with pytest.raises(UsageError, match=f"rank {rank} with {pairs} rope pairs does not fit"):
            fuse_layer(random_weights(0), random_transform(rank, pairs, 0))


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_scales_that_cannot_be_undone_are_refused(value: float):
    good = random_transform(24, 6, 0)
    scale, gain = good.content.scale_R.clone(), good.rope.gain_F.clone()
    scale[2] = gain[1] = value
    for bad in (
        LayerTransform(replace(good.content, scale_R=scale), good.rope),
        LayerTransform(good.content, replace(good.rope, gain_F=gain)),
    ):
        with pytest.raises(UsageError, match="a scale that is zero or not finite"):
            fuse_layer(random_weights(0), bad)
