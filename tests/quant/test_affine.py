"""The quantiser: error bounds, both range rules, and the published equations written anew."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_layer import generator, normal

from quantmla.quant.affine import (
    MAX_SCALE,
    MIN_SCALE,
    Quantized,
    dequantize,
    fake_quantize,
    quantize,
    round_up_to_half,
)
from quantmla.quant.format import CLIP_BY_BITS

BITS = pytest.mark.parametrize("bits", [2, 3, 4, 8])
seeds = st.integers(0, 2**31)
# groups of 8 whose ranges go from below the smallest float16 scale to far above the largest step
moderate = st.floats(-60000, 60000, width=32)
tiny = st.floats(-(2.0**-20), 2.0**-20, width=32)
rows = st.lists(st.one_of(moderate, tiny), min_size=16, max_size=16)
tiny_rows = st.lists(tiny, min_size=16, max_size=16)
rows = st.one_of(rows, tiny_rows)


def bound(scale, bits):
    """scale / 2, and the rounding of x / scale and of the range in float32 (each at most 2^-24).

    The code is rounded from x / scale, of at most 2^bits - 1 in size, with one relative rounding;
    the range was rounded twice and x / scale once more where the zero point clips a code.
    """
    return scale * (0.5 + 4 * (2**bits - 1) * 2.0**-24)


@BITS
@given(rows)
def test_hold_zero_error_is_at_most_half_a_step(bits, values):
    x = torch.tensor(values, dtype=torch.float32).view(1, 16)
    q = quantize(x, bits, 2)
    error = (dequantize(q).double() - x.double()).abs().view(2, 8)
    assert (error <= bound(q.scale_TG.double().view(2, 1), bits)).all()


@BITS
@given(rows)
def test_hold_zero_scales_are_float16_and_zero_is_exact(bits, values):
    x = torch.tensor([[0.0, *values[1:]]])
    q = quantize(x, bits, 2)
    assert torch.equal(q.scale_TG, q.scale_TG.half().float())
    assert (q.scale_TG >= MIN_SCALE).all()
    assert dequantize(q)[0, 0] == 0


@BITS
@given(seeds)
def test_requantizing_at_the_same_scale_returns_the_same_codes(bits, seed):
    x = normal(seed, 5, 64).float()
    q = quantize(x, bits, 4)
    back = dequantize(q).unflatten(-1, (4, -1))
    codes = torch.round(back / q.scale_TG[..., None]) + q.zero_point_TG[..., None]
    assert torch.equal(codes.flatten(-2).to(torch.uint8), q.codes_TC)


@BITS
@pytest.mark.parametrize("rule", ["hold_zero", "paper"])
@given(seeds, st.sampled_from([1e-9, 1e-3, 1.0, 1e4]))
def test_fake_quantize_is_the_round_trip_bit_for_bit(bits, rule, seed, size):
    x = (size * (normal(seed, 7, 64) + 0.3)).float()
    assert torch.equal(fake_quantize(x, bits, 4, rule), dequantize(quantize(x, bits, 4, rule)))


def paper_equations(x, bits):
    """Equations (35) and (36) in NumPy float32, one group at a time."""
    top = 2**bits - 1
    out = np.empty_like(x)
    for i, group in enumerate(x):
        span = np.maximum(np.float32(group.max() - group.min()), np.float32(1e-8))
        scale = np.float32(span / np.float32(top))
        zero = np.clip(np.rint(np.float32(-group.min() / scale)), 0, top)
        code = np.clip(np.rint(group / scale) + zero, 0, top)
        out[i] = scale * np.float32(code - zero)
    return out


@BITS
@given(seeds, st.floats(-6, 6))
def test_paper_rule_is_the_published_equations(bits, seed, shift):
    x = (normal(seed, 9, 64) + shift).float()
    assert np.array_equal(
        dequantize(quantize(x, bits, 1, "paper")).numpy(), paper_equations(x.numpy(), bits)
    )


@given(seeds)
def test_rules_agree_on_groups_that_straddle_zero_but_for_the_rounding_of_the_scale(seed):
    x = normal(seed, 9, 64).float()
    x[:, 0], x[:, 1] = x.abs().amax(-1), -x.abs().amax(-1)
    hold, paper = quantize(x, 4, 1), quantize(x, 4, 1, "paper")
    step = 2.0**-10  # of float16, relative
    assert (hold.scale_TG >= paper.scale_TG).all()
    assert (hold.scale_TG <= paper.scale_TG * (1 + step)).all()


def nmse(x, bits, rule):
    error = dequantize(quantize(x, bits, x.shape[-1] // 64, rule)).double() - x.double()
    return (error.square().sum() / x.double().square().sum()).item()


def test_one_signed_groups_saturate_under_paper_and_survive_under_hold_zero():
    x = (torch.randn(4000, 64, generator=generator(0)) + 5).float()
    # Published trap: 0.039 against 0.0008. Over 4,000 groups the figures are firm to a few percent.
    assert nmse(x, 4, "paper") == pytest.approx(0.039, rel=0.1)
    assert nmse(x, 4, "hold_zero") == pytest.approx(0.0008, rel=0.1)


def test_gaussian_groups_of_64_have_the_known_error():
    x = torch.randn(4000, 64, generator=generator(1))
    for rule in ("paper", "hold_zero"):
        assert nmse(x, 4, rule) == pytest.approx(0.00831, rel=0.02)
        assert nmse(x, 2, rule) == pytest.approx(0.2090, rel=0.02)


@pytest.mark.parametrize("value", [3.0, -3.0, 1e-5, 60000.0])
def test_constant_groups_survive_under_hold_zero(value):
    q = quantize(torch.full((1, 64), value), 4, 1)
    step = q.scale_TG.item()
    assert abs(dequantize(q)[0, 0].item() - value) <= bound(step, 4)
    assert step <= abs(value) / 15 * (1 + 2**-10) + MIN_SCALE  # one step of float16 above


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_default_clip_ratios_gain_and_stay_above_the_best_for_normal_groups(bits):
    # learned groups have lighter tails than normal ones: they want a ratio between that best and 1
    x = torch.randn(4000, 64, generator=generator(2))
    clips = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
    error = {
        clip: (dequantize(quantize(x, bits, 1, clip=clip)) - x).square().mean().item()
        for clip in clips
    }
    default = CLIP_BY_BITS.get(bits, 1.0)
    assert error[default] <= error[1.0]
    assert default >= min(clips, key=error.__getitem__) - 0.05


@BITS
@given(seeds, st.floats(0.3, 1.0))
def test_clipping_keeps_the_bound_within_the_range_that_codes_span(bits, seed, clip):
    x = normal(seed, 6, 64).float()
    q = quantize(x, bits, 1, clip=clip)
    back, scale = dequantize(q).double(), q.scale_TG.double()
    zero = q.zero_point_TG.double()
    low, high = -zero * scale, (2**bits - 1 - zero) * scale
    inside = (x >= low) & (x <= high)
    assert ((back - x).abs() <= bound(scale, bits))[inside].all()
    assert torch.equal(back[~inside], torch.clamp(x.double(), low, high)[~inside])


def test_constant_groups_vanish_under_paper():
    assert dequantize(quantize(torch.full((1, 64), 3.0), 4, 1, "paper")).abs().max() < 1e-7


def test_zero_groups_stay_zero_under_both_rules():
    for rule in ("paper", "hold_zero"):
        assert dequantize(quantize(torch.zeros(2, 64), 2, 1, rule)).abs().max() == 0


@pytest.mark.parametrize("size", [1.6e38, 3.3e38])
def test_a_range_beyond_float32_saturates_and_is_no_nan(size):
    x = torch.tensor([[size, -size, 1.0, 0.0] * 4], dtype=torch.float32)
    q = quantize(x, 4, 1)
    assert torch.equal(q.scale_TG, torch.tensor([[MAX_SCALE]]))
    assert torch.isfinite(dequantize(q)).all()
    assert torch.equal(fake_quantize(x, 4, 1), dequantize(q))


def test_values_beyond_the_largest_scale_saturate_there():
    x = torch.tensor([[3e38, -1.0, 0.0, 1.0]])
    q = quantize(x, 4, 1)
    assert q.scale_TG.item() == MAX_SCALE
    assert dequantize(q)[0].tolist() == [15 * MAX_SCALE, 0, 0, 0]


@given(st.floats(0, 65504))
def test_round_up_to_half_is_the_least_float16_that_is_not_less(value):
    x = torch.tensor(value, dtype=torch.float32)
    up = round_up_to_half(x)
    half = np.float16(up.item())
    assert float(half) == up.item()
    assert up >= x
    below = float(np.nextafter(half, np.float16(-np.inf)))
    assert below < x.item() or up.item() == MIN_SCALE


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, 2**-24),
        (2**-25, 2**-24),
        (2**-24, 2**-24),
        (1.5 * 2**-24, 2**-23),  # float16 is subnormal here: steps of 2^-24
        (2**-14 * (1 + 2**-12), 2**-14 * (1 + 2**-10)),
        (1.0, 1.0),
        (1.0 + 2**-20, 1.0 + 2**-10),
        (65503.0, 65504.0),
        (65504.0, 65504.0),
        (65519.0, 65504.0),
        (1e30, 65504.0),
        (math.inf, 65504.0),
    ],
)
def test_round_up_to_half_at_the_edges(value, expected):
    assert round_up_to_half(torch.tensor(value)).item() == expected


@pytest.mark.parametrize("rule", ["hold_zero", "paper"])
def test_gradients_pass_through_rounding(rule):
    x = normal(3, 4, 64).requires_grad_()
    y = fake_quantize(x, 4, 1, rule)
    y.sum().backward()
    # Inside the range d(s (round(x/s) + z - z)) / dx is 1; what the scale adds is the rounding
    # error of each code, at most 1/2, times d(scale), which only the two extreme values receive.
    inner = (x > x.amin(-1, keepdim=True)) & (x < x.amax(-1, keepdim=True))
    assert torch.allclose(x.grad[inner], torch.ones(int(inner.sum()), dtype=torch.float64))


def test_narrow_dtypes_are_refused_by_fake_quantize():
    with pytest.raises(AssertionError, match="float32"):
        fake_quantize(torch.zeros(1, 64, dtype=torch.bfloat16), 4, 1)


def test_quantized_holds_one_code_per_byte():
    q = quantize(normal(0, 3, 64), 3, 2)
    assert isinstance(q, Quantized)
    assert q.codes_TC.dtype == q.zero_point_TG.dtype == torch.uint8
    assert q.scale_TG.shape == q.zero_point_TG.shape == (3, 2)
    assert q.codes_TC.max() <= 7
