"""Caches and queries of any size for measurements: real packed pages, repeated."""

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels.problem import DecodeQuery
from quantmla.quant.format import CacheFormat
from quantmla.quant.page import pack_pages

DISTINCT_PAGES = 512
WINDOW_PAGE = 64
RANK, ROPE = 512, 64


def packed_pool(num_pages: int, rank: int, rope: int, fmt: CacheFormat) -> Tensor:
    """Pages of random rows, uint8; not random bytes, whose scales would be NaN."""
    shape = (DISTINCT_PAGES, fmt.page_size)
    latent = torch.randn(*shape, rank, device="cuda").to(torch.bfloat16)
    k_rope = torch.randn(*shape, rope, device="cuda").to(torch.bfloat16)
    distinct = pack_pages(latent, k_rope, fmt)
    return distinct[torch.randint(DISTINCT_PAGES, (num_pages,), device="cuda")]


def _shuffled_table(batch: int, width: int) -> Tensor:
    return torch.randperm(batch * width, device="cuda").to(torch.int32).view(batch, width)


def synthetic_cache(context: int, batch: int, fmt: CacheFormat, window_width: int = 4) -> CacheView:
    """Every sequence `context` tokens long, pages in random order, window and sinks in bf16.

    Four window pages are a ring that holds the longest window, 191 tokens.
    """
    rank, rope = RANK, ROPE
    width = -(-context // fmt.page_size)
    window_pages = batch * (window_width + 1)
    window = torch.randn(window_pages, WINDOW_PAGE, rank + rope, device="cuda")
    return CacheView(
        fmt=fmt,
        kv_lora_rank=rank,
        pages_JY=packed_pool(batch * width, rank, rope, fmt),
        block_table_BJ=_shuffled_table(batch, width),
        lengths_B=torch.full((batch,), context, dtype=torch.int32, device="cuda"),
        window_pages_JMC=window.to(torch.bfloat16),
        window_table_BW=_shuffled_table(batch, window_width),
        sink_pages_B=torch.arange(
            batch * window_width, window_pages, dtype=torch.int32, device="cuda"
        ),
    )


def synthetic_query(batch: int, query_len: int, heads: int) -> DecodeQuery:
    """Queries whose scores spread about 1."""
    shape = (batch, query_len, heads)
    latent = torch.randn(*shape, RANK, device="cuda").to(torch.bfloat16)
    k_rope = torch.randn(*shape, ROPE, device="cuda").to(torch.bfloat16)
    return DecodeQuery(latent, k_rope, (RANK + ROPE) ** -0.5)
