"""What happens once at start: which kernels run is decided and said, and they are compiled."""

import torch

from quantmla.cache.view import CacheView
from quantmla.kernels import api
from quantmla.serve.vllm.engine import init_logger
from quantmla.serve.vllm.pool import PoolLayout

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


def warm_up(layout: PoolLayout, num_heads: int, most_rows: int, device: torch.device) -> None:
    """Compiles what a step of up to `most_rows` tokens needs; UsageError where no kernel can.

    Rows are padding and touch nothing. Other query lengths than 1 are compiled when CUDA graphs are
    captured.
    """
    view = scratch_view(layout, device)
    rank, rope = layout.kv_lora_rank, layout.qk_rope_head_dim
    bf16 = {"dtype": torch.bfloat16, "device": device}
    query = api.DecodeQuery(
        torch.zeros(1, 1, num_heads, rank, **bf16), torch.zeros(1, 1, num_heads, rope, **bf16), 1.0
    )
    api.decode(query, view)
    count = 1
    while count <= most_rows:
        tokens = api.Tokens(*torch.full((2, count), -1, dtype=torch.int32, device=device))
        rows = torch.zeros(count, rank + rope, **bf16)
        api.append(api.Rows(*rows.split((rank, rope), dim=1)), tokens, view)
        api.gather(tokens, view, rows)
        count *= 2


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
