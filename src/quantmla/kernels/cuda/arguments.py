"""What the CUDA kernels are called with: `struct Arguments` of schedule.cuh.

B sequences, S query tokens, N heads, R latent rank, E rope channels; P parts, H columns of a tile.
"""

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels.cuda.build import Variant
from quantmla.kernels.problem import DecodeQuery
from quantmla.quant.layout import PageLayout

ROUNDS = 8  # parts per thread block at most, unless the batch alone makes more; as in schedule.cuh
_POINTERS = (
    "pages",
    "block_table",
    "lengths",
    "window_start",
    "window_table",
    "sink_pages",
    "window",
    "q_latent",
    "q_rope",
    "part_out",
    "part_lse",
    "part_of",
    "out",
    "lse",
)
_STRIDES = (
    "page_stride",
    "block_table_stride",
    "window_page_stride",
    "window_row_stride",
    "window_table_stride",
)
_INTEGERS = (
    "lengths_stride",
    "start_stride",
    "sink_stride",
    "window_width",
    "window_page_size",
    "batch",
    "query_len",
    "heads",
    "tiles",
    "num_sinks",
    "recent_window",
    "num_splits",
    "is_bf16",
)


class Arguments(ctypes.Structure):
    """`struct Arguments` of schedule.cuh."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_longlong) for name in _STRIDES]
        + [("latent_stride", ctypes.c_longlong * 3), ("rope_stride", ctypes.c_longlong * 3)]
        + [(name, ctypes.c_int) for name in _INTEGERS]
        + [("scale_log2", ctypes.c_float)]
    )


class Buffers(NamedTuple):
    """What a call writes; the parts are scratch."""

    part_out_PHR: Tensor  # float16
    part_lse_PH: Tensor  # float32, base 2
    part_of: Tensor  # int32
    out_BSNR: Tensor
    lse_BSN: Tensor  # float32


def aligned(x: Tensor) -> Tensor:
    """The same values in rows that start at multiples of 16 bytes, copied where they do not."""
    fits = x.stride(-1) == 1 and not any(stride % 8 for stride in x.stride()[:-1])
    if fits and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def make_buffers(query: DecodeQuery, num_splits: int | None, blocks: int, columns: int) -> Buffers:
    """Room for as many parts as any lengths can give, with tiles of `columns` columns."""
    q = query.latent_BSNR
    batch, query_len, heads, rank = q.shape
    tiles = -(-query_len * heads // columns)
    parts = (
        max(ROUNDS * blocks, batch * tiles) if num_splits is None else num_splits * batch * tiles
    )
    device, f32 = q.device, torch.float32
    return Buffers(
        torch.empty(parts, columns, rank, device=device, dtype=torch.float16),
        torch.empty(parts, columns, device=device, dtype=f32),
        torch.empty(2 * batch, device=device, dtype=torch.int32),
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty(batch, query_len, heads, device=device, dtype=f32),
    )


def make_arguments(
    query: DecodeQuery, view: CacheView, num_splits: int | None, buffers: Buffers
) -> Arguments:
    q, q_rope, start = query.latent_BSNR, query.rope_BSNE, view.window_start_B
    window, columns = view.window_pages_JMC, buffers.part_lse_PH.shape[1]
    batch, query_len, heads, _ = q.shape
    tensors = (
        view.pages_JY,
        view.block_table_BJ,
        view.lengths_B,
        start,
        view.window_table_BW,
        view.sink_pages_B,
        window,
        q,
        q_rope,
        *buffers,
    )
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    strides = (
        view.pages_JY.stride(0),
        view.block_table_BJ.stride(0),
        window.stride(0),
        window.stride(1),
        view.window_table_BW.stride(0),
    )
    integers = (
        view.lengths_B.stride(0),
        0 if start is None else start.stride(0),
        view.sink_pages_B.stride(0),
        view.window_table_BW.shape[1],
        view.window_page_size,
        batch,
        query_len,
        heads,
        -(-query_len * heads // columns),
        view.fmt.num_sink_tokens,
        view.fmt.recent_window,
        num_splits or 0,
        int(q.dtype == torch.bfloat16),
    )
    return Arguments(
        *pointers,
        *strides,
        (ctypes.c_longlong * 3)(*q.stride()[:3]),
        (ctypes.c_longlong * 3)(*q_rope.stride()[:3]),
        *integers,
        query.softmax_scale / math.log(2),
    )


def shared_bytes(variant: Variant, layout: PageLayout) -> int:
    """SHARED_BYTES of tile.cuh, or of wide_tile.cuh."""
    columns, stages, warpgroups = variant.columns, variant.stages, variant.warpgroups
    tile, checks = 32 * columns, 128 * ("CHECKED" in variant.defines)
    if columns == 64:
        values = 2048 if layout.content_row_bytes == 256 else 4096
        pages = stages * (layout.page_bytes + 5264 + values + 24)
        return pages + 44 * tile + columns * 36 + 1728 + 1024 + checks
    prepared = 4864 + (2560 if layout.content_row_bytes == 256 else 4608) + columns * 8 + 16
    pages = warpgroups * (stages * (layout.page_bytes + 8) + 2 * (prepared + 16))
    groups = warpgroups * (columns * 32 + 768 + 32) + columns * 8
    return pages + (73 + 8 * warpgroups) * tile + groups + 32 + 1024 + checks
