"""Bytes of whole pages: equal to the round trip for every format, and fixed for a fixed tensor."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from make import FORMATS, digest, fixed_rows
from random_layer import normal

from quantmla.errors import UsageError
from quantmla.quant.format import BITS, CacheFormat, paper_format, parse_format
from quantmla.quant.layout import page_layout
from quantmla.quant.page import pack_pages, unpack_pages
from quantmla.quant.roundtrip import read_content, read_rope

GOLDEN = Path(__file__).parent.parent / "golden" / "pages.json"


def rows(seed, pages=2, rank=128, channels=32, size=1.0):
    latent = (size * normal(seed, pages, 64, rank)).bfloat16()
    k_rope = size * (normal(seed + 1, pages, 64, channels) + 3 * normal(seed + 2, channels))
    return latent, k_rope.bfloat16()


@pytest.mark.parametrize("content", BITS)
@pytest.mark.parametrize("rope", BITS)
@pytest.mark.parametrize("centring", ["page", "none"])
def test_bytes_decode_to_the_round_trip(content, rope, centring):
    fmt = parse_format(f"c{content}r{rope}", rope_centring=centring)
    for seed, size in ((0, 1.0), (1, 1e-8), (2, 1e-4), (3, 1e4), (4, 1e30)):
        latent, k_rope = rows(10 * content + rope + 1000 * seed, size=size)
        got_latent, got_rope = unpack_pages(pack_pages(latent, k_rope, fmt), 128, 32, fmt)
        assert torch.equal(got_latent, read_content(latent.float(), fmt))
        assert torch.equal(got_rope.flatten(0, 1), read_rope(k_rope.float().flatten(0, 1), fmt))


@given(st.integers(0, 2**31))
def test_a_page_depends_on_its_own_tokens_alone(seed):
    latent, k_rope = rows(seed, pages=3)
    together = pack_pages(latent, k_rope, CacheFormat())
    alone = pack_pages(latent[1:2], k_rope[1:2], CacheFormat())
    assert torch.equal(together[1:2], alone)


def test_without_rope_channels():
    latent, _ = rows(5)
    empty = torch.empty(2, 64, 0, dtype=torch.bfloat16)
    got, rope = unpack_pages(pack_pages(latent, empty, CacheFormat()), 128, 0, CacheFormat())
    assert torch.equal(got, read_content(latent.float(), CacheFormat()))
    assert rope.shape == (2, 64, 0)


def test_padding_bytes_are_zero():
    fmt = parse_format("c3r3", page_size=8)
    latent, k_rope = (x[:, :8] for x in rows(6))
    pages, layout = pack_pages(latent, k_rope, fmt), page_layout(128, 32, fmt)
    used = torch.zeros(layout.page_bytes, dtype=torch.bool)
    for plane in layout[:5]:
        used[plane] = True
    assert (~used).any()
    assert pages[:, ~used].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_only_bf16_is_taken(dtype):
    latent, k_rope = rows(7)
    with pytest.raises(UsageError, match=f"latent is {dtype}"):
        pack_pages(latent.to(dtype), k_rope, CacheFormat())
    with pytest.raises(UsageError, match=f"k_rope is {dtype}"):
        pack_pages(latent, k_rope.to(dtype), CacheFormat())


def test_the_published_rule_has_no_bytes():
    with pytest.raises(UsageError, match="'paper' has no byte layout"):
        pack_pages(*rows(8), paper_format("c4r4"))


def test_pages_of_another_size_are_refused():
    fmt = CacheFormat()
    pages = pack_pages(*rows(9), fmt)
    with pytest.raises(UsageError, match=f"needs uint8 of {pages.shape[1]}"):
        unpack_pages(pages[:, :-1], 128, 32, fmt)


@pytest.mark.parametrize("name", FORMATS)
def test_golden_bytes(name):
    """A change here changes the cache's bytes: raise the format's version, note it in CHANGELOG."""
    golden = json.loads(GOLDEN.read_text())[name]
    pages = pack_pages(*fixed_rows(), parse_format(name))
    assert pages.shape[1] == golden["page_bytes"]
    assert digest(pages) == golden["sha256"]
    assert pages[0, :16].tolist() == golden["first_bytes"]


def test_nan_stays_visible_and_in_its_own_tokens():
    latent, k_rope = rows(11)
    latent[0, 3, 5] = float("nan")
    got, rope = unpack_pages(pack_pages(latent, k_rope, CacheFormat()), 128, 32, CacheFormat())
    bad = torch.isnan(got)
    assert bad[0, 3, :64].all()  # the group that shares its scale
    assert bad.sum() == 64
    assert torch.isfinite(rope).all()
