"""FP8 weights with one scale per block: value = code * scale_inv.

O rows, I columns, A row blocks, B column blocks; blocks at the lower and right edge may be cut off
(576 rows are four and a half blocks of 128). Codes are e4m3, scales are multipliers in spite of
their name `weight_scale_inv`.
"""

import torch
from torch import Tensor

from quantmla.errors import require

SCALE_SUFFIX = "_scale_inv"  # after the weight's name
LARGEST = 448.0  # of e4m3fn


def num_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _spread(scale_AB: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """Each block's scale repeated over its elements, [O, I]."""
    rows = scale_AB.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def _largest(x_OI: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude in each block, [A, B]."""
    blocks = num_blocks(tuple(x_OI.shape), block)
    padded = x_OI.new_zeros(blocks[0] * block[0], blocks[1] * block[1])
    padded[: x_OI.shape[0], : x_OI.shape[1]] = x_OI.abs()
    return padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax((1, 3))


def dequantize_blocks(codes_OI: Tensor, scale_AB: Tensor, block: tuple[int, int]) -> Tensor:
    """float64 values. Raises for scales that are not one per block."""
    expected = num_blocks(tuple(codes_OI.shape), block)
    require(
        tuple(scale_AB.shape) == expected,
        f"FP8 scales of shape {tuple(scale_AB.shape)} do not fit a weight of shape "
        f"{tuple(codes_OI.shape)}: blocks of {block} need {expected}",
    )
    return codes_OI.double() * _spread(scale_AB.double(), tuple(codes_OI.shape), block)


def quantize_blocks(
    x_OI: Tensor,
    block: tuple[int, int],
    *,
    power_of_two: bool = False,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Codes, and scales as they are stored: the largest magnitude of a block becomes 448.

    `power_of_two` rounds scales up to powers of two, for checkpoints whose scales are ue8m0.
    """
    scale_AB = (_largest(x_OI.double(), block) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    if power_of_two:
        scale_AB = torch.exp2(torch.ceil(torch.log2(scale_AB)))
    scale_AB = scale_AB.to(scale_dtype)
    scaled = x_OI.double() / _spread(scale_AB.double(), tuple(x_OI.shape), block)
    return scaled.clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn), scale_AB


def requantize_blocks(
    x_OI: Tensor, old: tuple[Tensor, Tensor], block: tuple[int, int], *, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """New codes and scales for `x`; blocks that the old ones hold exactly stay as they are."""
    old_codes, old_scale = old
    codes, scale = quantize_blocks(
        x_OI, block, power_of_two=power_of_two, scale_dtype=old_scale.dtype
    )
    changed_AB = _largest(x_OI.double() - dequantize_blocks(old_codes, old_scale, block), block) > 0
    changed_OI = _spread(changed_AB, tuple(x_OI.shape), block)
    bits = torch.where(changed_OI, codes.view(torch.uint8), old_codes.view(torch.uint8))
    return bits.view(torch.float8_e4m3fn), torch.where(changed_AB, scale, old_scale)
