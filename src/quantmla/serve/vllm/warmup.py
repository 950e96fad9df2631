"""What happens once at start: which kernels run is decided and said, and they are compiled."""

import torch

from quantmla.cache.view import CacheView
from quantmla.kernels import BACKENDS, api
from quantmla.kernels.problem import append_problem, decode_problem, gather_problem
from quantmla.serve.vllm.engine import init_logger
from quantmla.serve.vllm.pool import PoolLayout, short_chunk

logger = init_logger("vllm.quantmla")


def scratch_view(layout: PoolLayout, device: torch.device) -> CacheView:
    """A cache of one sequence that has nothing to do with the pool."""
    channels, size = layout.kv_lora_rank + layout.qk_rope_head_dim, layout.window_page_size
    pool = torch.zeros(2, layout.page_bytes, dtype=torch.uint8, device=device)
    rows = pool.view(torch.bfloat16).as_strided(
        (2, size, channels), (layout.page_bytes // 2, channels, 1)
    )
    table = torch.zeros(1, 64, dtype=torch.int32, device=device)
    ints = torch.zeros(1, dtype=torch.int32, device=device)
    return CacheView(
        fmt=layout.fmt,
        kv_lora_rank=layout.kv_lora_rank,
        pages_JY=pool,
        block_table_BJ=table,
        lengths_B=ints,
        window_pages_JMC=rows,
        window_table_BW=table,
        sink_pages_B=ints,
        window_start_B=ints,
    )


def _rows(count: int, layout: PoolLayout, device: torch.device) -> tuple[api.Rows, api.Tokens]:
    """Rows of padding: they touch nothing."""
    sizes = (layout.kv_lora_rank, layout.qk_rope_head_dim)
    rows = torch.zeros(count, sum(sizes), dtype=torch.bfloat16, device=device)
    tokens = torch.full((2, count), -1, dtype=torch.int32, device=device)
    return api.Rows(*rows.split(sizes, dim=1)), api.Tokens(*tokens)


def _query(
    length: int, num_heads: int, layout: PoolLayout, device: torch.device
) -> api.DecodeQuery:
    sizes = (layout.kv_lora_rank, layout.qk_rope_head_dim)
    q = torch.zeros(1, length, num_heads, sum(sizes), dtype=torch.bfloat16, device=device)
    latent, rope = q.split(sizes, dim=-1)
    return api.DecodeQuery(latent, rope, 1.0)


def warm_up(layout: PoolLayout, num_heads: int, most_rows: int, device: torch.device) -> str:
    """Compiles what a step of up to `most_rows` tokens needs, and says which kernels these are.

    Kernels differ by the rows of a query, heads x length: powers of two up to the longest piece
    that goes to decode meet all of them. UsageError where no kernel can.
    """
    view = scratch_view(layout, device)
    channels = layout.kv_lora_rank + layout.qk_rope_head_dim
    for length in (2**i for i in reversed(range(short_chunk(layout.recent_window).bit_length()))):
        query = _query(length, num_heads, layout, device)
        api.decode(query, view)
    for count in (2**i for i in range(most_rows.bit_length())):
        rows, tokens = _rows(count, layout, device)
        api.append(rows, tokens, view)
        out = torch.zeros(count, channels, dtype=torch.bfloat16, device=device)
        api.gather(tokens, view, out)
    names = {path: name for name, path in BACKENDS.items()}
    problems = (
        decode_problem(query, view),
        append_problem(rows, tokens, view),
        gather_problem(tokens, view, out),
    )
    return ", ".join(
        f"{problem.operation} by {names[api.choose(problem, 'auto').__name__]}"
        for problem in problems
    )


def describe(layout: PoolLayout, num_pages: int | None, layers: int) -> str:
    """The line of the start-up log."""
    fmt, bf16 = layout.fmt, 2 * (layout.kv_lora_rank + layout.qk_rope_head_dim)
    line = (
        f"QuantMLA {fmt.name}: {layout.bytes_per_token} bytes a token and layer ({bf16} in bf16), "
        f"packed pages of {fmt.page_size} tokens, window pages of {layout.window_page_size}; "
        f"the first {fmt.num_sink_tokens} and last {layout.recent_window} tokens stay in bf16"
    )
    if num_pages is None:
        return line
    tokens = num_pages * fmt.page_size
    return f"{line}; {num_pages:,} pages for each of {layers} layers, at most {tokens:,} tokens"
