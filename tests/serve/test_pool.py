"""Pools beside the torch cache: the same bytes, the same rows, however tokens come and go."""

import pytest
import torch

from quantmla.cache.paged import PagedCache
from quantmla.errors import UsageError
from quantmla.kernels.problem import DecodeQuery
from quantmla.mla.partial import attend
from quantmla.quant.format import parse_format
from quantmla.serve.pool import PagePool

RANK, ROPE = 32, 16
FMT = parse_format("c4r4", group_size=16, page_size=16, recent_window=32)


class Pair:
    """A pool and a PagedCache that are told the same."""

    def __init__(self, batch: int):
        self.pool = PagePool(FMT, RANK, ROPE, batch, torch.device("cpu"), "reference")
        self.paged = PagedCache(FMT, RANK, ROPE, batch)
        self.paged.keep_past = True
        self.paged.keep_past = True
        self.generator = torch.Generator().manual_seed(0)

    def append(self, size: int, counts: list[int] | None = None) -> None:
        batch = len(self.pool.lengths)
        latent = torch.randn(batch, size, RANK, generator=self.generator).bfloat16()
        k_rope = torch.randn(batch, size, ROPE, generator=self.generator).bfloat16() + 1
        for cache in (self.pool, self.paged):
            cache.append(latent, k_rope, counts)

    def check(self) -> None:
        assert self.pool.lengths == self.paged.lengths == self.pool.lengths_B.tolist()
        for mine, wanted in zip(self.pool.read(), self.paged.read(), strict=True):
            assert torch.equal(mine, wanted.bfloat16())
        for b, length in enumerate(self.pool.lengths):
            packed = self.paged.pages(b)
            assert torch.equal(self.pool.pages(b)[: len(packed)], packed)
            assert len(self.pool.tables[b]) == length // FMT.page_size


@pytest.mark.parametrize("sizes", [[200], [1] * 90, [7, 100, 1, 1, 90, 3], [16, 16, 5, 11, 160]])
def test_bytes_and_rows_are_those_of_the_torch_cache(sizes):
    pair = Pair(2)
    for i, size in enumerate(sizes):
        # the second sequence is shorter: left padding in the first chunk
        pair.append(size, [size, max(1, size - 5)] if i == 0 else None)
        pair.check()


def test_a_long_chunk_after_a_page_in_parts_loses_none_of_its_rows():
    pair = Pair(3)
    pair.append(40, [40, 33, 16])
    pair.append(300, [300, 40, 299])
    pair.check()


def test_pools_and_tables_grow():
    pair = Pair(1)
    for _ in range(6):
        pair.append(150)
    pair.check()
    assert len(set(pair.pool.tables[0])) == 900 // 16
    assert pair.pool.allocated_bytes() >= pair.pool.pages(0).nbytes


def test_crop_and_append_again():
    pair = Pair(2)
    pair.append(120, [120, 77])
    for tokens, size in ((5, 40), (20, 3), (2, 40), (16, 1)):
        for cache in (pair.pool, pair.paged):
            cache.crop(tokens)
        pair.check()
        pair.append(size)
        pair.check()


def test_a_crop_beyond_the_window_pages_is_refused():
    pair = Pair(1)
    pair.append(200)
    with pytest.raises(
        UsageError, match="cropping 200 tokens to 100 needs bf16 rows from token 64"
    ):
        pair.pool.crop(100)
    pair.check()  # nothing happened
    pair.pool.crop(200)
    assert pair.pool.lengths == [0]
    assert sorted(pair.pool.free) == list(range(len(pair.pool.pages_JY)))


def test_selected_sequences_share_pages_and_part_ways():
    pair = Pair(2)
    pair.append(70, [70, 52])
    for cache in (pair.pool, pair.paged):
        cache.select([1, 0, 0])
    pair.check()
    assert pair.pool.tables[1] == pair.pool.tables[2]
    for _ in range(40):
        pair.append(1)
    pair.check()
    assert pair.pool.tables[1][:4] == pair.pool.tables[2][:4]
    assert pair.pool.tables[1][4:] != pair.pool.tables[2][4:]
    before = len(pair.pool.free)
    for cache in (pair.pool, pair.paged):
        cache.select([0])
    pair.check()
    assert len(pair.pool.free) > before
    for cache in (pair.pool, pair.paged):
        cache.clear()
    pair.append(33)
    pair.check()


def test_decode_is_attention_over_what_read_gives():
    pair = Pair(2)
    pair.append(90, [90, 61])
    query = torch.randn(2, 3, 4, RANK + ROPE, generator=pair.generator, dtype=torch.float64)
    got = pair.pool.decode(DecodeQuery(query[..., :RANK], query[..., RANK:], 0.1))
    rows = torch.cat(pair.paged.read(), dim=-1).double()
    for b, length in enumerate(pair.pool.lengths):
        keys = rows[b, 90 - length :]
        scores = 0.1 * torch.einsum("snc,tc->nst", query[b], keys)
        late = torch.arange(length) > torch.arange(length - 3, length)[:, None]
        part = attend(scores.masked_fill(late, -torch.inf)[None], keys[None, :, :RANK])
        assert torch.allclose(got.out_BSNR[b], part.out_BSNR[0], atol=1e-12)


def test_a_batch_of_another_size_is_refused():
    pair = Pair(2)
    with pytest.raises(UsageError, match="a batch of 3 cannot be appended to a cache of 2"):
        pair.pool.append(torch.zeros(3, 1, RANK).bfloat16(), torch.zeros(3, 1, ROPE).bfloat16())
