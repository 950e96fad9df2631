"""The Hopper backend in CUDA C++: what it can do, and decode; append and gather are in rows.py."""

import ctypes
from importlib.util import find_spec

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels.cuda.arguments import DecodeArguments, shared_bytes
from quantmla.kernels.cuda.build import Variant, defines
from quantmla.kernels.cuda.launch import (
    COMBINE_SLICES,
    Kernels,
    Launch,
    combine_threads,
    kernels,
    multiprocessors,
    on,
    tensor_map,
)
from quantmla.kernels.cuda.rows import plan_append, plan_gather
from quantmla.kernels.problem import DecodeQuery, Problem
from quantmla.mla.partial import Partial

__all__ = ["plan_append", "plan_decode", "plan_gather", "why_not"]

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


class DecodeRun:
    """Two launches for every run: all parts of all sequences, then their combination."""

    def __init__(
        self,
        loaded: Kernels,
        variant: Variant,
        query: DecodeQuery,
        view: CacheView,
        num_splits: int | None,
    ) -> None:
        blocks = multiprocessors(view.pages_JY.device)
        self.arguments = DecodeArguments(query, view, num_splits, blocks, variant.columns)
        struct = self.arguments.struct
        rows = struct.batch * struct.query_len * struct.heads
        threads = combine_threads(rows, blocks)
        grid = (rows, COMBINE_SLICES if threads > 128 else 1)
        shared = loaded.shared_bytes
        self.decode = Launch(loaded.decode, (blocks, 1), variant.threads, shared, overlaps=True)
        self.combine = Launch(loaded.combine, grid, threads, threads * 16, overlaps=True)
        # where the kernels find their arguments; combine reads the first of them alone
        self.parameters = (ctypes.c_void_p * 2)(ctypes.addressof(struct))
        self.row_bytes = view.layout.content_row_bytes

    def __call__(
        self,
        query: DecodeQuery,
        pages_JY: Tensor,
        window_pages_JMC: Tensor,
        out_BSNR: Tensor | None = None,
        /,
    ) -> Partial:
        buffers = self.arguments.fill(query, pages_JY, window_pages_JMC, out_BSNR)
        device = pages_JY.device
        with on(device):
            address, count = pages_JY.data_ptr(), pages_JY.shape[0]
            stride = self.arguments.struct.page_stride
            content = tensor_map(address, self.row_bytes, stride, count)
            self.parameters[1] = content.getPtr()
            self.decode.start(self.parameters, device)
            self.combine.start(self.parameters, device)
        return Partial(buffers.out_BSNR, buffers.lse_BSN)


def plan_decode(query: DecodeQuery, view: CacheView, num_splits: int | None) -> DecodeRun:
    """The kernel for so many rows, compiled when it is first asked for."""
    _, query_len, heads, _ = query.latent_BSNR.shape
    variant, layout = variant_for(query_len * heads), view.layout
    macros, shared = defines(variant, layout), shared_bytes(variant, layout)
    loaded = kernels(macros, shared, view.pages_JY.device)
    return DecodeRun(loaded, variant, query, view, num_splits)
