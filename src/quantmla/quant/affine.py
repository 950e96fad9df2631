"""Group-wise affine integers: value = scale * (code - zero_point).

T tokens, C channels, G groups per token (contiguous channels share a scale).

Two rules for a group's range. `paper` takes [min, max] in float32 and clips the zero point to the
code range, so a group whose values all have one sign is saturated (equations 35 and 36 of the
QuantMLA paper). `hold_zero`, the default, first extends the range to hold 0, so that such groups
survive; its scale is rounded up to float16, as stored, which bounds the error by scale / 2
unless `clip` < 1 lets the codes span only that share of the range (a gain at 2 and 3 bits).
Rounding is half to even. For groups that straddle 0 the two differ only in the scale's rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantmla.quant.format import RangeRule

PAPER_MIN_RANGE = 1e-8
MIN_SCALE = 2.0**-24  # smallest positive float16
MAX_SCALE = 65504.0  # largest float16


class Quantized(NamedTuple):
    codes_TC: Tensor  # uint8, one code per byte
    scale_TG: Tensor  # float32; holds float16 values under `hold_zero`
    zero_point_TG: Tensor  # uint8, the code that represents 0


def round_up_to_half(x: Tensor) -> Tensor:
    """Smallest float16 value that is not less than x, as float32, within [MIN_SCALE, MAX_SCALE]."""
    x = x.float().clamp(MIN_SCALE, MAX_SCALE)
    nearest = x.to(torch.float16)
    above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    chosen = torch.where(nearest.float() < x, above, nearest)
    return chosen.float().clamp(max=MAX_SCALE)


def _scale_and_zero(
    x_TGc: Tensor, bits: int, rule: RangeRule, clip: float
) -> tuple[Tensor, Tensor]:
    """Scale and zero point per group, each [T, G, 1]; differentiable in the scale under `paper`."""
    low, high = x_TGc.amin(-1, keepdim=True), x_TGc.amax(-1, keepdim=True)
    # a tensor: on a GPU torch would multiply by a number's reciprocal, and bytes would differ
    top_code = torch.full_like(high, 2**bits - 1)
    if rule == "paper":
        span = high - low
        halves = high / top_code - low / top_code  # for a range beyond float32's
        scale = torch.where(span.isinf(), halves, span.clamp(min=PAPER_MIN_RANGE) / top_code)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        exact = (high - low) * clip / top_code
        # exactly the float16 value; the step up to it counts as a constant for gradients. Beyond
        # float32's range the difference is NaN: then the scale is the largest, without a gradient
        scale = round_up_to_half(exact.detach()) + (exact - exact.detach()).nan_to_num()
        low = low * clip
    zero = torch.clamp(torch.round(-low / scale), 0, 2**bits - 1)
    return scale, zero


def quantize(
    x_TC: Tensor, bits: int, groups: int, rule: RangeRule = "hold_zero", clip: float = 1.0
) -> Quantized:
    """Codes, scales and zero points of rows of any float dtype, computed in float32."""
    x = x_TC.float().unflatten(-1, (groups, -1))
    scale, zero = _scale_and_zero(x, bits, rule, clip)
    codes = torch.clamp(torch.round(x / scale) + zero, 0, 2**bits - 1)
    return Quantized(
        codes.flatten(-2).to(torch.uint8), scale.squeeze(-1), zero.squeeze(-1).to(torch.uint8)
    )


def dequantize(q: Quantized) -> Tensor:
    """scale * (code - zero_point), float32, [T, C]."""
    groups = q.scale_TG.shape[-1]
    codes = q.codes_TC.float().unflatten(-1, (groups, -1))
    return (q.scale_TG[..., None] * (codes - q.zero_point_TG.float()[..., None])).flatten(-2)


def _round_straight_through(x: Tensor) -> Tensor:
    return x + (torch.round(x) - x).detach()


def fake_quantize(
    x_TC: Tensor, bits: int, groups: int, rule: RangeRule = "hold_zero", clip: float = 1.0
) -> Tensor:
    """dequantize(quantize(x)) of float32 or float64 x; gradients pass through rounding.

    In float32 the values equal the round trip exactly; narrower dtypes could not hold them.
    """
    assert x_TC.dtype in (torch.float32, torch.float64), f"{x_TC.dtype}: convert to float32 first"
    x = x_TC.unflatten(-1, (groups, -1))
    scale, zero = _scale_and_zero(x, bits, rule, clip)
    zero = zero.detach() if rule == "hold_zero" else _straight_zero(x, scale, bits)
    steps = x / scale if rule == "hold_zero" else _finite(x / scale)
    codes = torch.clamp(_round_straight_through(steps) + zero, 0, 2**bits - 1)
    return (scale * (codes - zero)).flatten(-2)


def _straight_zero(x_TGc: Tensor, scale: Tensor, bits: int) -> Tensor:
    low = x_TGc.amin(-1, keepdim=True)
    return torch.clamp(_round_straight_through(_finite(-low / scale)), 0, 2**bits - 1)


def _finite(steps: Tensor) -> Tensor:
    """Infinity, which is no number of steps to round, as the largest number; all clip alike.

    Large values of a narrow group come to it under `paper`; `hold_zero` has no such groups.
    """
    return steps.clamp(-torch.finfo(steps.dtype).max, torch.finfo(steps.dtype).max)
