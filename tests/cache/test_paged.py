import pytest
import torch

from quantmla.cache.paged import PagedCache
from quantmla.errors import UnsupportedModel, UsageError
from quantmla.quant.format import CacheFormat, paper_format, parse_format
from quantmla.quant.layout import bf16_row_bytes, page_layout
from quantmla.quant.page import unpack_pages
from quantmla.quant.roundtrip import read_content, read_rope

R, E = 128, 64


def rows(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    latent = torch.randn(1, tokens, R, generator=g)
    k_rope = torch.randn(1, tokens, E, generator=g) + 3 * torch.randn(E, generator=g)
    return latent.bfloat16(), k_rope.bfloat16()


def filled(fmt: CacheFormat, chunks: list[int], seed: int = 0) -> PagedCache:
    latent, k_rope = rows(sum(chunks), seed)
    cache = PagedCache(fmt, R, E, batch=1)
    at = 0
    for size in chunks:
        cache.append(latent[:, at : at + size], k_rope[:, at : at + size])
        at += size
    return cache


FORMATS = [
    parse_format("c4r4"),
    parse_format("c2r4", recent_window=0, num_sink_tokens=0),
    parse_format("c3r8", recent_window=100, num_sink_tokens=7),
    parse_format("c16r4", page_size=32),
    parse_format("c8r16"),
    parse_format("c4r4").unprotected(),
    parse_format("c2r2").unprotected(),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bytes_do_not_depend_on_how_tokens_arrived(fmt):
    whole = filled(fmt, [300])
    for chunks in ([1, 127, 172], [1] * 300, [64, 64, 172], [299, 1]):
        other = filled(fmt, chunks)
        assert torch.equal(whole.pages(0), other.pages(0))
        for a, b in zip(whole.read(), other.read(), strict=True):
            assert torch.equal(a, b)
    assert whole.pages(0).shape[0] > 0


@pytest.mark.parametrize("length", [1, 4, 63, 64, 65, 128, 191, 192, 193, 300])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_token_is_read_once_and_in_the_right_form(fmt, length):
    latent, k_rope = rows(length)
    seen = filled(fmt, [length]).read()
    # independent of the cache: the round trip of every token, then the exact ones put back
    want = [read_content(latent[0].float(), fmt), read_rope(k_rope[0].float(), fmt)]
    if fmt.recent_window is not None:
        exact = (
            torch.arange(length)
            >= max(0, length - fmt.recent_window) // fmt.page_size * fmt.page_size
        )
        exact |= torch.arange(length) < fmt.num_sink_tokens
        want = [
            torch.where(exact[:, None], plain[0].float(), read)
            for plain, read in zip((latent, k_rope), want, strict=True)
        ]
    for got, expected in zip(seen, want, strict=True):
        assert torch.equal(got[0], expected)


def test_sequences_of_different_lengths_end_together():
    fmt = parse_format("c4r4", recent_window=64)
    latent, k_rope = rows(200)
    short = PagedCache(fmt, R, E, batch=1)
    short.append(latent[:, 30:], k_rope[:, 30:])
    both = PagedCache(fmt, R, E, batch=2)
    both.append(latent.expand(2, -1, -1), k_rope.expand(2, -1, -1), counts=[200, 170])
    assert both.lengths == [200, 170]
    for joint, alone in zip(both.read(), short.read(), strict=True):
        assert torch.equal(joint[1, 30:], alone[0])
        assert not joint[1, :30].any()
    assert torch.equal(both.pages(1), short.pages(0))


@pytest.mark.parametrize("counts", [[7, 2], [-1, 2], [2], [2, 2, 2]])
def test_counts_that_a_chunk_cannot_give_are_refused(counts):
    latent, k_rope = rows(5)
    cache = PagedCache(parse_format("c4r4"), R, E, batch=2)
    with pytest.raises(UsageError, match=r"are not 2 numbers of 0 to 5, the rows of the chunk"):
        cache.append(latent.expand(2, -1, -1), k_rope.expand(2, -1, -1), counts=counts)
    assert cache.lengths == [0, 0]


def test_allocated_bytes_are_the_packed_rows_and_the_window():
    fmt = parse_format("c4r4")
    length = 64 * 20 + 128 + 5
    cache = filled(fmt, [length])
    layout = page_layout(R, E, fmt)
    window = 128 + 5 + fmt.num_sink_tokens
    assert cache.allocated_bytes() == 20 * layout.page_bytes + window * bf16_row_bytes(R, E)
    decoded = filled(fmt, [1] * length)
    assert decoded.allocated_bytes() == cache.allocated_bytes()
    bf16 = length * bf16_row_bytes(R, E)
    assert cache.allocated_bytes() < 0.45 * bf16


def test_beams_share_pages_and_then_go_their_own_way():
    fmt = parse_format("c4r4", recent_window=64)
    cache = filled(fmt, [300])
    alone = cache.allocated_bytes()
    cache.select([0, 0, 0])
    assert cache.allocated_bytes() == alone
    latent, k_rope = rows(3, seed=5)
    cache.append(latent[0][:, None], k_rope[0][:, None])
    read = cache.read()[0]
    assert torch.equal(read[0, :-1], read[2, :-1])
    assert torch.equal(read[:, -1], latent[0].float())


@pytest.mark.parametrize("fmt", [parse_format("c4r4"), parse_format("c4r4").unprotected()], ids=str)
def test_crop_undoes_what_was_appended_while_the_past_was_kept(fmt):
    latent, k_rope = rows(400)
    cache = PagedCache(fmt, R, E, batch=1)
    cache.append(latent[:, :191], k_rope[:, :191])
    cache.keep_past = True
    cache.append(latent[:, 191:391], k_rope[:, 191:391])
    cache.crop(200)
    fresh = PagedCache(fmt, R, E, batch=1)
    fresh.append(latent[:, :191], k_rope[:, :191])
    assert torch.equal(cache.pages(0), fresh.pages(0))
    assert cache.allocated_bytes() == fresh.allocated_bytes()
    for a, b in zip(cache.read(), fresh.read(), strict=True):
        assert torch.equal(a, b)


def test_crop_that_needs_lost_rows_is_refused():
    cache = filled(parse_format("c4r4"), [192])
    with pytest.raises(UsageError, match="activate_past_recording"):
        cache.crop(1)
    kept = filled(parse_format("c4r4"), [193])
    kept.crop(1)
    assert kept.lengths == [192]


def test_other_dtypes_are_refused():
    cache = PagedCache(parse_format("c4r4"), R, E, batch=1)
    latent, k_rope = rows(3)
    for bad in (latent.half(), latent.float()):
        with pytest.raises(UsageError, match=r"takes torch\.bfloat16"):
            cache.append(bad, k_rope)
    with pytest.raises(UsageError, match=r"k_rope is torch\.float16"):
        cache.append(latent, k_rope.half())


def test_formats_without_bytes_and_sizes_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="no byte layout"):
        PagedCache(paper_format("c4r4"), R, E, batch=1)
    with pytest.raises(UnsupportedModel, match="group_size"):
        PagedCache(parse_format("c4r4"), 96, E, batch=1)
    with pytest.raises(UsageError, match="batch of 2"):
        PagedCache(parse_format("c4r4"), R, E, batch=1).append(
            *(x.expand(2, -1, -1) for x in rows(2))
        )


def test_pages_hold_what_is_read():
    fmt = parse_format("c4r4", recent_window=0, num_sink_tokens=0)
    cache = filled(fmt, [256])
    latent, k_rope = unpack_pages(cache.pages(0), R, E, fmt)
    assert torch.equal(cache.read()[0][0], latent.flatten(0, 1))
    assert torch.equal(cache.read()[1][0], k_rope.flatten(0, 1))


def test_clear_forgets_everything():
    cache = filled(parse_format("c4r4"), [300])
    cache.clear()
    assert cache.lengths == [0]
    assert cache.allocated_bytes() == 0
