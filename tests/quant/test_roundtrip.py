"""What a reader sees: content groups, page-centred rope keys, unfinished pages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_layer import normal

from quantmla.quant.affine import fake_quantize
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.quant.roundtrip import page_means, read_content, read_rope

FMT = CacheFormat()


def biased(seed, tokens, channels=64):
    return (0.5 * normal(seed, tokens, channels) + 4 * normal(seed + 1, channels)).float()


@given(st.integers(0, 2**31), st.integers(1, 200))
def test_every_page_is_centred_by_its_own_mean(seed, tokens):
    k = biased(seed, tokens).bfloat16().float()
    got = read_rope(k, FMT)
    for start in range(0, tokens, 64):
        page = k[start : start + 64]
        mean = page.double().mean(0).float().half().float()
        expected = mean + fake_quantize(page - mean, 4, 2)
        assert torch.equal(got[start : start + 64], expected)


def test_centring_lowers_the_error_of_biased_keys():
    k = biased(3, 640)
    centred = (read_rope(k, FMT) - k).square().sum()
    plain = (read_rope(k, parse_format("c4r4", rope_centring="none")) - k).square().sum()
    assert centred < plain / 5


def test_sixteen_bits_are_left_alone():
    x = normal(0, 70, 64)
    assert read_content(x, parse_format("c16r16")) is x
    assert read_rope(x, parse_format("c16r16")) is x


def test_the_two_paths_have_scales_of_their_own():
    generator = torch.Generator().manual_seed(0)
    k = torch.rand(128, 64, generator=generator) * 2 - 1
    fmt = parse_format("c4r4", rope_centring="none")
    error = (read_rope(k, fmt) - k).norm() / k.norm()
    assert error < 0.05 * 1.5  # 15 steps over [-1, 1]: 1 / (15 sqrt 3) * sqrt 3 = 0.067
    latent = 0.03 * normal(1, 128, 512).float()
    relative = [(read_content(x, fmt) - x).norm() / x.norm() for x in (latent, 0.01 * latent)]
    assert relative[0] == pytest.approx(relative[1].item(), rel=0.02)


@pytest.mark.parametrize("tokens", [64, 100])
def test_gradients_reach_every_key(tokens):
    k = biased(5, tokens).double().requires_grad_()
    read_rope(k, FMT).square().sum().backward()
    assert torch.isfinite(k.grad).all()
    assert (k.grad != 0).float().mean() > 0.95


def test_no_tokens_and_leading_dimensions():
    assert read_rope(torch.zeros(0, 64), FMT).shape == (0, 64)
    k = biased(6, 2 * 128).view(2, 128, 64)
    assert torch.equal(read_rope(k, FMT)[1], read_rope(k[1], FMT))


def test_means_are_float16_values_whatever_the_order_of_summation():
    k = biased(7, 64).bfloat16().float()[None]
    mean = page_means(k)
    assert torch.equal(mean, mean.half().float())
    assert torch.equal(mean, page_means(k[:, torch.randperm(64)]))
