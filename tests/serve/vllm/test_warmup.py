import torch

from quantmla.quant.format import parse_format
from quantmla.serve.vllm.pool import pool_layout


def test_the_start_up_log_says_what_runs(cpu_vllm):
    from quantmla.serve.vllm.warmup import describe, warm_up

    layout = pool_layout(parse_format("c4r4"), 128, 32)
    kernels = warm_up(layout, 2, 100, torch.device("cpu"))
    assert kernels == "decode by reference, append by reference, gather by reference"
    line = describe(pool_layout(parse_format("c4r4"), 512, 64), 1000, 27)
    for part in ("c4r4", "320 bytes", "1152 in bf16", "1,000 pages", "27 layers", "64,000 tokens"):
        assert part in line


def test_what_is_compiled_touches_no_pool(cpu_vllm):
    from quantmla.serve.vllm.warmup import scratch_view

    layout = pool_layout(parse_format("c2r4"), 512, 64)
    view = scratch_view(layout, torch.device("cpu"))
    assert view.window_page_size == layout.window_page_size == 8
    assert view.pages_JY.shape[1] == layout.page_bytes
