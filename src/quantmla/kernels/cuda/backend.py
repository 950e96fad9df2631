"""The Hopper backend in CUDA C++: what it can do, and decode; append and gather are in rows.py."""

from importlib.util import find_spec

import torch

from quantmla.cache.view import CacheView
from quantmla.kernels.cuda.arguments import aligned, make_arguments, make_buffers, shared_bytes
from quantmla.kernels.cuda.build import Variant, defines
from quantmla.kernels.cuda.launch import kernels, multiprocessors, run
from quantmla.kernels.cuda.rows import append, gather
from quantmla.kernels.problem import DecodeQuery, Problem
from quantmla.mla.partial import Partial

__all__ = ["append", "decode", "gather", "why_not"]

NARROW = Variant(columns=16, warpgroups=3, stages=2)
WIDE = Variant(columns=32, warpgroups=2, stages=2)
WIDEST = Variant(columns=64, warpgroups=2, stages=4)


def why_not(problem: Problem) -> str | None:
    """The first thing in the way."""
    fmt = problem.fmt
    if problem.platform == "cpu":
        return "the Hopper kernels need a GPU, the cache is on the CPU"
    if problem.capability != (9, 0):
        return f"the Hopper kernels need compute capability (9, 0), not {problem.capability}"
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "the package cuda-bindings is not installed"
    wanted = {
        "rope_bits": (fmt.rope_bits, 4),
        "group_size": (fmt.group_size, 64),
        "rope_bands": (fmt.rope_bands, 2),
        "rope_centring": (fmt.rope_centring, "page"),
        "range_rule": (fmt.range_rule, "hold_zero"),
        "page_size": (fmt.page_size, 64),
        "kv_lora_rank": (problem.kv_lora_rank, 512),
        "qk_rope_head_dim": (problem.qk_rope_head_dim, 64),
    }
    if fmt.content_bits not in (2, 4):
        return f"content_bits {fmt.content_bits} is neither 2 nor 4"
    for name, (have, want) in wanted.items():
        if have != want:
            return f"{name} {have!r} is not {want!r}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"query dtype {problem.dtype} is neither torch.bfloat16 nor torch.float16"
    if not problem.aligned:
        return "rows of 16 bits do not start at multiples of 16 bytes"
    return None


def variant_for(rows: int) -> Variant:
    """Kernel for so many rows (heads x query length)."""
    return next((v for v in (NARROW, WIDE) if rows <= v.columns), WIDEST)


def decode(query: DecodeQuery, view: CacheView, num_splits: int | None = None) -> Partial:
    """Two launches: all parts of all sequences, then their combination."""
    query = DecodeQuery(aligned(query.latent_BSNR), aligned(query.rope_BSNE), query.softmax_scale)
    device = view.pages_JY.device
    _, query_len, heads, _ = query.latent_BSNR.shape
    layout = view.layout
    variant = variant_for(query_len * heads)
    shared = shared_bytes(variant, layout)
    loaded = kernels(defines(variant, layout), shared, device)
    blocks = multiprocessors(device)
    buffers = make_buffers(query, num_splits, blocks, variant.columns)
    run(loaded, variant.threads, make_arguments(query, view, num_splits, buffers), view, blocks)
    return Partial(buffers.out_BSNR, buffers.lse_BSN)
