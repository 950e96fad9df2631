"""How one layer's tokens lie in an engine's pool, whose pages all have the same bytes.

Two groups of pages share the pool: packed pages of `page_size` tokens, and window pages, which hold
as many bf16 rows (a power of two, M) as fit into the same bytes. M divides page_size, so that a
window never begins within a window page.
"""

from dataclasses import dataclass

from quantmla.errors import UsageError, require
from quantmla.quant.format import CacheFormat
from quantmla.quant.layout import bf16_row_bytes, page_layout
from quantmla.quant.page import require_byte_layout
from quantmla.serve.settings import MAX_DRAFTS

SHORT_CHUNK = 64  # longest part of a prompt that is attended to as a decode is
MOST_PIECES = 3  # of such parts that one step attends to, one after the other


def short_chunk(recent_window: int) -> int:
    """Longest chunk whose queries may all read what the last of them does.

    Each then still has half of the recent window in bf16 before it.
    """
    return min(SHORT_CHUNK, max(1, recent_window // 2))


def divided_chunk(fmt: CacheFormat) -> int:
    """Longest chunk that is attended to in pieces of `short_chunk` tokens, as if each was a step.

    Nothing of one without context is packed yet where its last piece ends, so that it makes no
    difference whether such a chunk is attended to in this way or as a prompt.
    """
    assert fmt.recent_window is not None
    longest = MOST_PIECES * short_chunk(fmt.recent_window)
    return min(longest, fmt.recent_window + fmt.page_size - 1)


def table_pages(tokens: int, page_size: int, window_page_size: int) -> int:
    """Window pages of whole packed pages: a decode is given those of the next one at once."""
    return -(-tokens // page_size) * (page_size // window_page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """Sizes of both groups; tokens, except where the name says bytes or pages."""

    fmt: CacheFormat
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_bytes: int
    window_page_size: int

    @property
    def recent_window(self) -> int:
        assert self.fmt.recent_window is not None
        return self.fmt.recent_window

    @property
    def bytes_per_token(self) -> int:
        """Of one layer, packed."""
        return self.page_bytes // self.fmt.page_size

    @property
    def kept_tokens(self) -> int:
        """Last tokens whose bf16 rows some later step may read: the unfinished page among them."""
        return self.recent_window + self.fmt.page_size

    @property
    def refreshed_tokens(self) -> int:
        """Whole pages that hold the recent window of a prefix that ends on a page border."""
        return -(-self.recent_window // self.fmt.page_size) * self.fmt.page_size

    @property
    def sink_window_pages(self) -> int:
        """Window pages that a request keeps for its first tokens."""
        return 1 if self.fmt.num_sink_tokens else 0

    def packed_pages(self, tokens: int) -> int:
        """Pages of the packed group for a request of so many tokens."""
        return -(-tokens // self.fmt.page_size)

    def window_pages(self, batches_in_flight: int, max_tokens: int) -> int:
        """Most window pages that a request holds at once.

        A step takes pages for the tokens that are still in the window when it ends; those of the
        steps before it, which may be in flight, are freed later.
        """
        once = -(-(self.kept_tokens + MAX_DRAFTS) // self.window_page_size) + 1
        peak = (1 + batches_in_flight) * once + self.sink_window_pages
        return min(peak, table_pages(max_tokens, self.fmt.page_size, self.window_page_size))


def pool_layout(fmt: CacheFormat, kv_lora_rank: int, qk_rope_head_dim: int) -> PoolLayout:
    """The layout for one format and size of MLA; UsageError where a pool cannot hold it."""
    require_byte_layout(fmt)
    require(
        fmt.recent_window is not None,
        "an unprotected cache format (recent_window None) is for evaluation only, not served",
        UsageError,
    )
    page_bytes = page_layout(kv_lora_rank, qk_rope_head_dim, fmt).page_bytes
    require(
        page_bytes % fmt.page_size == 0,
        f"a page of {page_bytes} bytes does not divide into {fmt.page_size} tokens",
        UsageError,
    )
    rows = page_bytes // bf16_row_bytes(kv_lora_rank, qk_rope_head_dim)
    size = 1
    while 2 * size <= rows and fmt.page_size % (2 * size) == 0:
        size *= 2
    require(
        fmt.num_sink_tokens <= size,
        f"{fmt.num_sink_tokens} sink tokens do not fit a window page of {size} tokens, "
        f"as large as a page of {fmt.name}",
        UsageError,
    )
    return PoolLayout(
        fmt=fmt,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        page_bytes=page_bytes,
        window_page_size=size,
    )
