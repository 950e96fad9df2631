"""Block scales against a loop over single elements."""

import pytest
import torch

from quantmla.checkpoint.block_fp8 import (
    dequantize_blocks,
    num_blocks,
    quantize_blocks,
    requantize_blocks,
)
from quantmla.errors import QuantMLAError

BLOCK = (128, 128)
SHAPE = (576, 200)  # four and a half blocks by one and a part


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_values_are_code_times_the_scale_of_their_block():
    codes = random(0, *SHAPE).mul(50).float().to(torch.float8_e4m3fn)
    scale = random(1, 5, 2).abs().float()
    x = dequantize_blocks(codes, scale, BLOCK)
    for row, column in ((0, 0), (127, 127), (128, 128), (511, 199), (512, 0), (575, 199)):
        expected = float(codes[row, column].double()) * float(scale[row // 128, column // 128])
        assert float(x[row, column]) == expected


@pytest.mark.parametrize("shape", [SHAPE, (128, 128), (1, 1), (129, 127)])
def test_round_trip_is_within_the_spacing_of_e4m3(shape: tuple[int, int]):
    x = random(2, *shape) * torch.exp(3 * random(3, *shape))  # wide range within a block
    codes, scale = quantize_blocks(x, BLOCK)
    assert tuple(scale.shape) == num_blocks(shape, BLOCK)
    assert scale.dtype == torch.float32
    back = dequantize_blocks(codes, scale, BLOCK)
    # 3 fraction bits: half a step is 2**-4 relative, 2**-10 absolute among subnormals; the scale
    # and the code pass through float32
    bound = x.abs() / 16 + 2**-10 * float(scale.max())
    assert bool(((back - x).abs() <= bound * (1 + 1e-6)).all())
    nmse = float((back - x).square().sum() / x.square().sum())
    assert nmse < 2**-8 / 3 * 1.5  # worst binade: half a step, uniform


def test_scales_of_another_shape_are_refused():
    codes = torch.zeros(SHAPE).to(torch.float8_e4m3fn)
    for wrong in ((576,), (4, 2), (5, 1), (2, 5)):
        with pytest.raises(
            QuantMLAError, match=r"do not fit a weight of shape \(576, 200\).*\(5, 2\)"
        ):
            dequantize_blocks(codes, torch.ones(wrong), BLOCK)


def test_unchanged_blocks_keep_their_bytes():
    codes = random(4, *SHAPE).mul(20).float().to(torch.float8_e4m3fn)
    scale = random(5, 5, 2).abs().float()  # not the scales that quantize_blocks would choose
    x = dequantize_blocks(codes, scale, BLOCK)
    same_codes, same_scale = requantize_blocks(x, (codes, scale), BLOCK)
    assert torch.equal(same_codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(same_scale, scale)
    x[:128, :128] *= 3.7
    new_codes, new_scale = requantize_blocks(x, (codes, scale), BLOCK)
    assert torch.equal(new_scale != scale, torch.tensor([[True, False]] + [[False, False]] * 4))
    assert torch.equal(new_codes[128:].view(torch.uint8), codes[128:].view(torch.uint8))
    error = (dequantize_blocks(new_codes, new_scale, BLOCK) - x).norm() / x.norm()
    assert error < 2**-4


def test_powers_of_two_where_the_checkpoint_has_them():
    x = random(6, *SHAPE)
    codes, scale = quantize_blocks(x, BLOCK, power_of_two=True)
    assert torch.equal(torch.exp2(torch.round(torch.log2(scale))), scale)
    assert float(codes.double().abs().max()) <= 448
    assert (dequantize_blocks(codes, scale, BLOCK) - x).norm() / x.norm() < 2**-4


def test_zero_blocks_stay_zero():
    codes, scale = quantize_blocks(torch.zeros(SHAPE, dtype=torch.float64), BLOCK)
    assert bool(torch.isfinite(scale).all() and (scale > 0).all())
    assert float(dequantize_blocks(codes, scale, BLOCK).abs().max()) == 0
