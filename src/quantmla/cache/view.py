"""One layer's cache as kernels see it: borrowed tensors, whoever owns them.

B sequences, J pages or page numbers, Y page bytes, W window page numbers, M tokens of a window
page, C = R + E channels of a token (R latent rank, E rope channels, interleaved), L page_size.

Token t of a sequence of `length` tokens is read from exactly one of three places:

- the first `num_sink_tokens`: row t of its sink page, if it has one;
- t < packed_length: its packed page, `block_table_BJ[b, t // L]`;
- all others: the bf16 window, row t % M of window page `window_table_BW[b, (t // M) % width]`.

A window table as wide as the sequence is indexed by the token's absolute page; a narrower one is a
ring. It must reach every token from packed_length on, and those of an append that is under way
together with the tokens before them in their page. Sink pages lie in the same pool as window pages;
an engine that keeps window page 0 alive gives `window_table_BW[:, 0]`.

Only entries that a token needs are read: others, and rows past `length`, may hold anything.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantmla.quant.format import CacheFormat
from quantmla.quant.layout import PageLayout, page_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheView:
    """Packed pages, bf16 rows and the tables that say where a sequence's tokens are."""

    fmt: CacheFormat
    kv_lora_rank: int  # R
    pages_JY: Tensor  # uint8; any stride between pages, pools beyond 2**31 elements too
    block_table_BJ: Tensor  # int32
    lengths_B: Tensor  # int32, on the pool's device: tokens cached, those of the query included
    window_pages_JMC: Tensor  # bfloat16; any stride between pages and between rows
    window_table_BW: Tensor  # int32; below 0: the row is kept nowhere (append drops it)
    sink_pages_B: Tensor  # int32; below 0: no bf16 sinks, the first tokens are read like others
    window_start_B: Tensor | None = None  # int32, multiples of L: tokens before it have no bf16 row

    @property
    def qk_rope_head_dim(self) -> int:
        return self.window_pages_JMC.shape[-1] - self.kv_lora_rank

    @property
    def window_page_size(self) -> int:
        """M: tokens of a window page."""
        return self.window_pages_JMC.shape[1]

    @property
    def layout(self) -> PageLayout:
        return page_layout(self.kv_lora_rank, self.qk_rope_head_dim, self.fmt)

    def with_pools(self, pages_JY: Tensor, window_pages_JMC: Tensor) -> "CacheView":
        """Another layer's cache, with the same tables."""
        return replace(self, pages_JY=pages_JY, window_pages_JMC=window_pages_JMC)

    def packed_length_B(self) -> Tensor:
        """Tokens before this one are read packed (sinks apart): `fmt.first_recent` of each length.

        A reused prefix whose bf16 rows are gone is read packed up to `window_start_B`.
        """
        assert self.fmt.recent_window is not None, "an unprotected format has no packed length"
        size = self.fmt.page_size
        old = (self.lengths_B - self.fmt.recent_window).clamp(min=0)
        packed = old // size * size
        return packed if self.window_start_B is None else torch.maximum(packed, self.window_start_B)

    def sinks_B(self) -> Tensor:
        """Tokens at the start that are read from the sink page, for each sequence."""
        sinks = self.lengths_B.clamp(max=self.fmt.num_sink_tokens)
        return torch.where(self.sink_pages_B >= 0, sinks, torch.zeros_like(sinks))
