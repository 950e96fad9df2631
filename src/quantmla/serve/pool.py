"""How many blocks a request takes of vLLM's pool, and what vLLM says of the pool when it starts.

All groups of layers draw blocks of the same bytes from one pool. A block is one packed page of
every layer, or `window_block_tokens` bf16 rows of every layer. A request holds the packed pages of
all its tokens (vLLM counts a page from its first token on), the window's blocks, and the block of
its sinks. At start, vLLM's own figures also count, for every request, window blocks for all tokens
that may be on their way through the engine at once.
"""

from dataclasses import asdict, dataclass
from typing import Any

from quantmla.errors import UsageError, require
from quantmla.quant.format import CacheFormat

STOCK_BLOCK_TOKENS = 16  # of vLLM's unquantised latent cache
STEPS_IN_FLIGHT = 2  # asynchronous scheduling prepares a step while another one runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Bytes of a block, and what decides how many of them a request takes."""

    layers: int
    page_bytes: int  # of one layer
    row_bytes: int  # of one bf16 token in one layer
    page_size: int  # tokens
    window: int  # tokens: the recent ones and an unfinished page
    sink_blocks: int  # kept for good, 0 or 1

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def window_block_tokens(self) -> int:
        """bf16 rows of a block: the largest power of two whose rows fit a page."""
        return window_block_tokens(self.page_bytes, self.row_bytes)

    def window_blocks_decoding(self, length: int) -> int:
        """Most window blocks, sinks included, that a request of `length` tokens holds in decode."""
        rows = self.window_block_tokens
        all_blocks = -(-length // rows)
        reach = min(all_blocks, -(-(self.window - 1) // rows) + 1)
        return min(all_blocks, reach + self.sink_blocks)

    def window_blocks_reported(self, length: int, tokens_in_flight: int) -> int:
        """Window blocks that vLLM's start-up figures count for a request of `length` tokens."""
        rows = self.window_block_tokens
        return -(-min(self.window - 1 + tokens_in_flight, length) // rows) + 1 + self.sink_blocks


def window_block_tokens(page_bytes: int, row_bytes: int) -> int:
    """The largest power of two of bf16 rows that fit the bytes of a page."""
    require(
        row_bytes <= page_bytes,
        f"a page of {page_bytes} bytes does not hold one bf16 row of {row_bytes}",
        UsageError,
    )
    return 1 << ((page_bytes // row_bytes).bit_length() - 1)


def pool_of(fmt: CacheFormat, *, layers: int, page_bytes: int, row_bytes: int) -> Pool:
    """The pool of a protected format."""
    require(
        fmt.recent_window is not None,
        "an unprotected cache format has no window: vLLM cannot serve it",
        UsageError,
    )
    assert fmt.recent_window is not None
    return Pool(
        layers=layers,
        page_bytes=page_bytes,
        row_bytes=row_bytes,
        page_size=fmt.page_size,
        window=fmt.recent_window + fmt.page_size,
        sink_blocks=int(fmt.num_sink_tokens > 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """What vLLM prints when it starts, and what decode reaches."""

    blocks: int
    block_bytes: int  # of all layers
    window_block_tokens: int
    tokens: int  # vLLM's "GPU KV cache size"
    maximum_concurrency: float  # vLLM's, requests of the whole context, each with a chunk under way
    decoding_concurrency: float  # requests of the whole context, all in decode
    bf16_tokens: int  # the same three of an unquantised cache
    bf16_maximum_concurrency: float
    bf16_decoding_concurrency: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def report(pool: Pool, budget: int, context: int, batched_tokens: int) -> PoolReport:
    """The report for a cache of `budget` bytes, `context` as vLLM's --max-model-len.

    `batched_tokens` is vLLM's --max-num-batched-tokens; one block is never handed out.
    """
    pages = -(-context // pool.page_size)
    in_flight = STEPS_IN_FLIGHT * batched_tokens
    blocks = budget // pool.block_bytes
    concurrency = blocks / (pages + pool.window_blocks_reported(context, in_flight))
    decoding = max(0, blocks - 1) / (pages + pool.window_blocks_decoding(context))
    stock_pages = -(-context // STOCK_BLOCK_TOKENS)
    stock_blocks = budget // (pool.layers * pool.row_bytes * STOCK_BLOCK_TOKENS)
    return PoolReport(
        blocks=blocks,
        block_bytes=pool.block_bytes,
        window_block_tokens=pool.window_block_tokens,
        tokens=int(concurrency * context),
        maximum_concurrency=concurrency,
        decoding_concurrency=decoding,
        bf16_tokens=int(stock_blocks / stock_pages * context),
        bf16_maximum_concurrency=stock_blocks / stock_pages,
        bf16_decoding_concurrency=max(0, stock_blocks - 1) / stock_pages,
    )
