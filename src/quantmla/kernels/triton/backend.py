"""The Triton backend: what it can do, and how its kernels are launched."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels.plan import unprepared
from quantmla.kernels.problem import DecodeQuery, Problem, Rows, Tokens
from quantmla.kernels.triton.schedule import Device, schedule
from quantmla.mla.partial import Partial

CONTENT_BITS = (2, 4)
ROPE_BITS = (4,)
RANKS = (128, 256, 512)
ROPE_DIMS = (32, 64)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> str | None:
    return None if value in allowed else f"{name} {value} is not one of {allowed}"


def why_not(problem: Problem) -> str | None:
    """The first thing in the way."""
    fmt = problem.fmt
    if problem.platform == "cpu":
        return "Triton kernels need a GPU, the cache is on the CPU"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if problem.capability is not None and problem.capability < (8, 0):
        return f"compute capability {problem.capability} is below (8, 0)"
    checks = (
        _one_of("query dtype", problem.dtype, (torch.bfloat16,)),
        _one_of("content_bits", fmt.content_bits, CONTENT_BITS),
        _one_of("rope_bits", fmt.rope_bits, ROPE_BITS),
        _one_of("rope_centring", fmt.rope_centring, ("page",)),
        _one_of("rope_bands", fmt.rope_bands, (1, 2)),
        _one_of("group_size", fmt.group_size, (32, 64, 128)),
        _one_of("page_size", fmt.page_size, (64,)),
        _one_of("range_rule", fmt.range_rule, ("hold_zero",)),
        _one_of("kv_lora_rank", problem.kv_lora_rank, RANKS),
        _one_of("qk_rope_head_dim", problem.qk_rope_head_dim, ROPE_DIMS),
    )
    reason = next((check for check in checks if check is not None), None)
    if reason is None and fmt.num_sink_tokens >= fmt.page_size:
        reason = f"{fmt.num_sink_tokens} sink tokens fill a page of {fmt.page_size}"
    return reason


@cache
def _device(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    # ROCm gives no such figure: 64 KiB on the GPUs so far
    shared = getattr(properties, "shared_memory_per_block_optin", 64 << 10)
    return Device(properties.multi_processor_count, shared)


def decode(
    query: DecodeQuery,
    view: CacheView,
    num_splits: int | None = None,
    out_BSNR: Tensor | None = None,
) -> Partial:
    """Two launches: all splits of all sequences, then their combination."""
    from quantmla.kernels.triton.launches import decode_launches

    device = view.pages_JY.device
    batch, query_len, heads, _ = query.latent_BSNR.shape
    max_pages = view.block_table_BJ.shape[1]
    plan = schedule(batch, query_len * heads, max_pages, _device(device), num_splits)
    target = True, torch.version.hip is None
    launches, result = decode_launches(query, view, plan, target, out_BSNR)
    for launch in launches:
        launch.run()
    return result


def append(rows: Rows, tokens: Tokens, view: CacheView) -> None:
    """One launch: rows into the window, and the pages that end among them into bytes."""
    from quantmla.kernels.triton.launches import append_launch

    if rows.latent_TR.shape[0]:
        append_launch(rows, tokens, view).run()


def gather(tokens: Tokens, view: CacheView, out_TC: Tensor) -> None:
    """One launch."""
    from quantmla.kernels.triton.launches import gather_launch

    if out_TC.shape[0]:
        gather_launch(tokens, view, out_TC).run()


plan_decode, plan_append, plan_gather = unprepared(decode, append, gather)
