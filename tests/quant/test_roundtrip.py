"""What a reader sees: content groups, page-centred rope keys, unfinished pages."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_layer import normal

from quantmla.quant.affine import fake_quantize
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.quant.page import pack_pages, unpack_pages
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


@pytest.mark.parametrize("rule", ["hold_zero", "paper"])
@pytest.mark.parametrize("centring", ["page", "none"])
@pytest.mark.parametrize("largest", [1e37, 1.6e38, torch.finfo(torch.bfloat16).max])
@pytest.mark.parametrize("tokens", [64, 70])
def test_keys_whose_sum_is_beyond_float32_are_read_as_their_bytes_are(
    tokens, largest, centring, rule
):
    fmt = replace(parse_format("c4r4", rope_centring=centring), range_rule=rule)
    even, uneven = torch.full((tokens, 64), largest), torch.rand(tokens, 64) * largest
    for k in (even, -even, uneven, uneven - uneven.flip(0)):
        k = k.bfloat16().float().requires_grad_()
        got = read_rope(k, fmt)
        # under the published rule, codes step by a 15th of the range, past float32's end
        assert torch.isfinite(got).all() or (rule == "paper" and largest > 3e38)
        if rule == "hold_zero":  # the other's scale sums gradients of its own size over a group
            (gradient,) = torch.autograd.grad(got.sum(), k)
            assert torch.isfinite(gradient).all()
        if rule == "hold_zero" and centring == "page" and tokens == 64:
            rows = k.detach().bfloat16()[None]
            pages = pack_pages(torch.zeros(1, 64, 64).bfloat16(), rows, fmt)
            assert torch.equal(unpack_pages(pages, 64, 64, fmt)[1][0], got)


def test_the_mean_hands_its_gradient_to_every_key_alike():
    k = biased(8, 64).requires_grad_()
    fmt = parse_format("c4r2")
    weights = normal(9, 64, 64).float()
    (found,) = torch.autograd.grad((weights * read_rope(k, fmt)).sum(), k)
    # the same with a mean whose gradient torch derives
    leaf = k.detach().clone().requires_grad_()
    mean = page_means(leaf.detach()[None])[0] + (leaf.mean(0) - leaf.detach().mean(0))
    read = mean + fake_quantize(leaf - mean, 2, 2, clip=fmt.rope_clip)
    (expected,) = torch.autograd.grad((weights * read).sum(), leaf)
    assert torch.equal(found, expected)
