from dataclasses import replace

import pytest
import torch
from synthetic_layer import synthetic_layer

from quantmla.errors import UsageError
from quantmla.method import quarot
from quantmla.method.layer import Sample
from quantmla.quant.format import parse_format
from quantmla.transform.layer import read_rope_key
from quantmla.transform.orthogonal import hadamard

LAYER = synthetic_layer()
FORMAT = parse_format("c4r4", group_size=16)


def fit(fmt=FORMAT, layer=LAYER):
    return quarot.fit(layer, fmt, quarot.Options(), torch.Generator()).transform


def test_both_rotations_are_hadamard_without_signs_or_scales():
    content, rope, online = fit()
    assert torch.equal(content.rotation_RR, hadamard(32))
    assert (content.scale_R == 1).all()
    assert (rope.gain_F == 1).all()
    assert online is not None
    assert torch.equal(online, hadamard(16))


def test_outliers_are_spread_over_channels():
    unit = LAYER.held_out.unit_latent_BSR.flatten(0, 1).double()

    def peak(x_TR: torch.Tensor) -> float:
        return float(x_TR.abs().amax(-1).mean() / x_TR.square().mean().sqrt())

    assert peak(fit().content.apply(unit)) < 0.8 * peak(unit)


def test_the_online_rotation_turns_the_key_and_is_undone_when_read():
    key = LAYER.held_out.k_rope_BSE.double()
    fine = replace(FORMAT, rope_bits=8, rope_clip=1.0)
    read = read_rope_key(fit(), key, fine)
    assert 0 < (read - key).norm() < 0.01 * key.norm()


def test_bf16_rope_keys_need_no_online_rotation_and_then_it_can_be_fused():
    sixteen = parse_format("c4r16")
    assert fit(sixteen).online_rope_EE is None
    assert quarot.why_not_fused(sixteen) is None
    reason = quarot.why_not_fused(FORMAT)
    assert reason is not None
    assert "after RoPE" in reason
    assert "eval" in reason


def test_a_rank_that_is_no_power_of_two_is_refused():
    small = Sample(*(x[..., :12] for x in LAYER.train))
    weights = replace(LAYER.weights, norm_R=torch.ones(12))
    with pytest.raises(UsageError, match="size 12 needs a power of two"):
        fit(layer=replace(LAYER, weights=weights, train=small))
