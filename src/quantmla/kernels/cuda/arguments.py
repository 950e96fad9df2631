"""What the CUDA kernels are called with: `struct Arguments` of schedule.cuh.

B sequences, S query tokens, N heads, R latent rank, E rope channels; P parts, H columns of a tile.
"""

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels.cuda.build import Variant
from quantmla.kernels.problem import ROW_ALIGNMENT, DecodeQuery, is_aligned
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
    """What a call writes, and the queries that it reads: copies, where they lay unevenly."""

    latent_BSNR: Tensor
    rope_BSNE: Tensor
    scratch: Tensor  # uint8; see Parts
    out_BSNR: Tensor
    lse_BSN: Tensor  # float32


class Parts(NamedTuple):
    """Room for partial results in scratch memory: float16 [P, H, R], and what follows it."""

    lse: int  # bytes from the start: float32 [P, H], base 2
    part_of: int  # bytes from the start: int32 [2 * B]
    size: int  # bytes

    @classmethod
    def of(cls, shape: torch.Size, num_splits: int | None, blocks: int, columns: int) -> "Parts":
        """For as many parts as any lengths can give, of queries [B, S, N, R]."""
        batch, query_len, heads, rank = shape
        tiles = batch * -(-query_len * heads // columns)
        parts = max(ROUNDS * blocks, tiles) if num_splits is None else num_splits * tiles
        lse = parts * columns * rank * 2
        part_of = lse + parts * columns * 4
        return cls(lse, part_of, part_of + 2 * batch * 4)


class DecodeArguments:
    """`struct Arguments` for calls whose queries and pools differ in their addresses alone.

    Everything else is set once. `query` is not kept; the tables are, as the kernels will read them.
    """

    def __init__(
        self, query: DecodeQuery, view: CacheView, num_splits: int | None, blocks: int, columns: int
    ) -> None:
        q = query.latent_BSNR
        self.copied = [not is_aligned(x, ROW_ALIGNMENT) for x in query[:2]]
        self.parts = Parts.of(q.shape, num_splits, blocks, columns)
        self.shape, self.dtype = q.shape, q.dtype
        self.struct = _shared(query, view, num_splits, columns)
        self.tables = _tables(view)
        for name, x in self.tables.items():
            setattr(self.struct, name, None if x is None else x.data_ptr())

    def fill(
        self,
        query: DecodeQuery,
        pages_JY: Tensor,
        window_pages_JMC: Tensor,
        out_BSNR: Tensor | None = None,
    ) -> Buffers:
        """Sets the addresses that were left out; the buffers must live until the launches."""
        latent, rope, _ = query
        if self.copied[0]:
            latent = latent.clone(memory_format=torch.contiguous_format)
        if self.copied[1]:
            rope = rope.clone(memory_format=torch.contiguous_format)
        device, shape = latent.device, self.shape
        if out_BSNR is None:
            out_BSNR = torch.empty(shape, dtype=self.dtype, device=device)
        buffers = Buffers(
            latent,
            rope,
            torch.empty(self.parts.size, dtype=torch.uint8, device=device),
            out_BSNR,
            torch.empty(shape[:3], dtype=torch.float32, device=device),
        )
        struct, start = self.struct, buffers.scratch.data_ptr()
        struct.pages, struct.window = pages_JY.data_ptr(), window_pages_JMC.data_ptr()
        struct.q_latent, struct.q_rope = latent.data_ptr(), rope.data_ptr()
        struct.part_out, struct.part_lse = start, start + self.parts.lse
        struct.part_of = start + self.parts.part_of
        struct.out, struct.lse = buffers.out_BSNR.data_ptr(), buffers.lse_BSN.data_ptr()
        return buffers


def _tables(view: CacheView) -> dict[str, Tensor | None]:
    return {
        "block_table": view.block_table_BJ,
        "lengths": view.lengths_B,
        "window_start": view.window_start_B,
        "window_table": view.window_table_BW,
        "sink_pages": view.sink_pages_B,
    }


def _row_strides(x: Tensor) -> Any:
    """As the kernels see it: rows that do not start at multiples of 16 bytes are copied."""
    if not is_aligned(x, ROW_ALIGNMENT):
        x = torch.empty(x.shape, device="meta")
    return (ctypes.c_longlong * 3)(*x.stride()[:3])


def _shared(query: DecodeQuery, view: CacheView, num_splits: int | None, columns: int) -> Arguments:
    """All but the pointers."""
    q, start, window = query.latent_BSNR, view.window_start_B, view.window_pages_JMC
    batch, query_len, heads, _ = q.shape
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
        *[None] * len(_POINTERS),
        *strides,
        _row_strides(q),
        _row_strides(query.rope_BSNE),
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
