"""What vLLM says of a pool of packed pages when it starts, and how many requests fit in decode."""

from dataclasses import asdict, dataclass
from typing import Any

from quantmla.serve.vllm.pool import PoolLayout, table_pages

STOCK_BLOCK_TOKENS = 16  # of vLLM's own latent cache
BATCHES_IN_FLIGHT = 2  # vLLM prepares a step while another one runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A block is a page of every layer; requests are of the whole context."""

    blocks: int
    block_bytes: int
    tokens_in_window_block: int
    tokens: int  # vLLM's "GPU KV cache size"
    maximum_concurrency: float  # vLLM's: every request with a chunk of its prompt on its way
    decoding_concurrency: float  # requests that only decode
    bf16_tokens: int  # of vLLM's own latent cache in as many bytes
    bf16_maximum_concurrency: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def decoding_window_blocks(layout: PoolLayout, tokens: int) -> int:
    """Most window blocks, sinks included, of a request that has `tokens` tokens and decodes.

    Without drafts. One is of the next page where a step in flight still reads the last one's.
    """
    size, page = layout.window_page_size, layout.fmt.page_size
    last = layout.kept_tokens // size + 1
    whole = table_pages(tokens, page, size) if tokens > page else -(-tokens // size)
    return min(last + layout.sink_window_pages, whole)


def capacity(
    layout: PoolLayout, *, layers: int, row_bytes: int, budget: int, context: int
) -> Capacity:
    """For `budget` bytes of cache and `context` as --max-model-len, in tokens.

    `row_bytes` is what a token takes in one layer of vLLM's own cache.
    """
    block_bytes = layers * layout.page_bytes
    blocks = budget // block_bytes
    pages = layout.packed_pages(context)
    reported = pages + layout.window_pages(BATCHES_IN_FLIGHT, context) + 1  # one stands for none
    stock_blocks = budget // (layers * row_bytes * STOCK_BLOCK_TOKENS)
    stock = stock_blocks / -(-context // STOCK_BLOCK_TOKENS)
    usable = max(0, blocks - 1)
    return Capacity(
        blocks=blocks,
        block_bytes=block_bytes,
        tokens_in_window_block=layout.window_page_size,
        tokens=int(blocks / reported * context),
        maximum_concurrency=blocks / reported,
        decoding_concurrency=usable / (pages + decoding_window_blocks(layout, context)),
        bf16_tokens=int(stock * context),
        bf16_maximum_concurrency=stock,
    )
