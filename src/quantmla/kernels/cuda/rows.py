"""Append and gather: their arguments as C structures, and their launches."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels.cuda.build import compile_text, source
from quantmla.kernels.cuda.launch import Launch, check, multiprocessors, on
from quantmla.kernels.problem import Rows, Tokens
from quantmla.quant.layout import PageLayout

SOURCES = {name: ("device.cuh", "places.cuh", f"{name}.cu") for name in ("append", "gather")}
THREADS = {"append": 256, "gather": 288}  # APPEND_THREADS, GATHER_THREADS
SHARED_BYTES = {"append": 8192, "gather": 1024}  # APPEND_SHARED, GATHER_SHARED
BLOCKS_PER_MULTIPROCESSOR = 3  # as many as few rows are spread over
MOST_ROWS = 32  # of a block
ROPE_TILES = 8  # of a block that appends rope keys


def _structure(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type("Fields", (ctypes.Structure,), {"_fields_": fields})


def _of(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


POINTER, INT64, INT32, FLOAT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float
Window = _structure(
    *_of(POINTER, "pool", "table", "sink_pages"),
    *_of(INT64, "page_stride", "row_stride", "table_stride"),
    *_of(INT32, "sink_stride", "width", "page_size", "num_sinks"),
)
AppendArguments = _structure(
    *_of(POINTER, "latent", "k_rope", "sequences", "positions", "pages", "block_table"),
    *_of(INT64, "latent_stride", "rope_stride", "page_stride", "block_table_stride"),
    ("window", Window),
    *_of(INT32, "num_rows", "tile", "rope_blocks"),
    *_of(FLOAT, "content_clip", "rope_clip"),
)
GatherArguments = _structure(
    *_of(POINTER, "sequences", "positions", "pages", "block_table", "lengths"),
    *_of(POINTER, "window_start", "out"),
    *_of(INT64, "page_stride", "block_table_stride", "out_stride"),
    ("window", Window),
    *_of(INT32, "num_rows", "recent_window", "lengths_stride", "start_stride"),
)


class Loaded(NamedTuple):
    """A kernel on one GPU; its module must live as long."""

    module: Any
    kernel: Any


def defines(layout: PageLayout) -> tuple[str, ...]:
    """A page's bytes, as compiler options."""
    values = {
        "CONTENT_BITS": layout.content_row_bytes // 64,
        "PAGE_BYTES": layout.page_bytes,
        "AT_ROPE": layout.rope.start,
        "AT_SCALES": layout.scales.start,
        "AT_ZEROS": layout.zero_points.start,
        "AT_MEAN": layout.mean.start,
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


@cache
def cubin(name: str, macros: tuple[str, ...]) -> bytes:
    """Machine code for Hopper of "append" or "gather"; needs no GPU."""
    code = "\n".join(source(part) for part in SOURCES[name]).replace("#pragma once", "")
    return compile_text(code, macros)


@cache
def _load(name: str, macros: tuple[str, ...], device: torch.device) -> Loaded:
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes torch's context current
        module = check(driver.cuModuleLoadData(cubin(name, macros)))
        return Loaded(module, check(driver.cuModuleGetFunction(module, name.encode())))


def tile_rows(num_rows: int, blocks: int) -> int:
    """Rows of a block: a power of two, so few that `blocks` blocks have work."""
    most = max(1, min(MOST_ROWS, num_rows // blocks))
    return 1 << (most.bit_length() - 1)


def _window(view: CacheView) -> ctypes.Structure:
    pool, table, sinks = view.window_pages_JMC, view.window_table_BW, view.sink_pages_B
    pointers = (x.data_ptr() for x in (pool, table, sinks))
    size = pool.element_size()
    strides = (pool.stride(0) * size, pool.stride(1) * size, table.stride(0))
    integers = (sinks.stride(0), table.shape[1], view.window_page_size, view.fmt.num_sink_tokens)
    return Window(*pointers, *strides, *integers)


def append_arguments(
    rows: Rows, tokens: Tokens, view: CacheView, tile: int
) -> tuple[ctypes.Structure, int]:
    """With the number of blocks: those for rope keys, then those for content."""
    pages, table, num_rows = view.pages_JY, view.block_table_BJ, rows.latent_TR.shape[0]
    tiles = -(-num_rows // tile)
    rope_blocks = -(-tiles // ROPE_TILES)
    pointers = (x.data_ptr() for x in (*rows, *tokens, pages, table))
    strides = (*(2 * x.stride(0) for x in rows), pages.stride(0), table.stride(0))
    sizes = (num_rows, tile, rope_blocks)
    clips = (view.fmt.content_clip, view.fmt.rope_clip)
    arguments = AppendArguments(*pointers, *strides, _window(view), *sizes, *clips)
    return arguments, rope_blocks + tiles


def gather_arguments(
    tokens: Tokens, view: CacheView, out_TC: Tensor
) -> tuple[ctypes.Structure, int]:
    """With the number of blocks."""
    pages, table, lengths = view.pages_JY, view.block_table_BJ, view.lengths_B
    start = view.window_start_B
    tensors = (*tokens, pages, table, lengths, start, out_TC)
    pointers = (None if x is None else x.data_ptr() for x in tensors)
    strides = (pages.stride(0), table.stride(0), 2 * out_TC.stride(0))
    integers = (
        out_TC.shape[0],
        view.fmt.recent_window,
        lengths.stride(0),
        0 if start is None else start.stride(0),
    )
    arguments = GatherArguments(*pointers, *strides, _window(view), *integers)
    return arguments, -(-out_TC.shape[0] // MOST_ROWS)


class RowsRun:
    """One launch for every run, with arguments of which a run changes a few addresses."""

    def __init__(
        self,
        name: str,
        what: tuple[ctypes.Structure, int],
        view: CacheView,
        tokens: Tokens,
        macros: tuple[str, ...] = (),
    ) -> None:
        """Arguments and number of blocks; `macros` beside the layout's."""
        self.arguments, blocks = what
        self.window = self.arguments.window  # the same memory
        self.kept = view, tokens  # the arguments hold their addresses
        loaded = _load(name, defines(view.layout) + macros, view.pages_JY.device)
        self.launch = Launch(loaded.kernel, (blocks, 1), THREADS[name], SHARED_BYTES[name])
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))

    def start(self, pages_JY: Tensor, window_pages_JMC: Tensor) -> None:
        self.arguments.pages = pages_JY.data_ptr()
        self.window.pool = window_pages_JMC.data_ptr()
        device = pages_JY.device
        with on(device):
            self.launch.start(self.parameters, device)


class AppendRun(RowsRun):
    """Rows and the window are read and written 16 bytes at a time."""

    def __call__(self, rows: Rows, pages_JY: Tensor, window_pages_JMC: Tensor) -> None:
        latent, k_rope = rows
        self.arguments.latent, self.arguments.k_rope = latent.data_ptr(), k_rope.data_ptr()
        self.start(pages_JY, window_pages_JMC)


class GatherRun(RowsRun):
    """Tokens as decode reads them."""

    def __call__(self, out_TC: Tensor, pages_JY: Tensor, window_pages_JMC: Tensor) -> None:
        self.arguments.out = out_TC.data_ptr()
        self.start(pages_JY, window_pages_JMC)


def _nothing(*_: object) -> None:
    """A run on no rows: a grid has at least one block."""


def plan_append(
    rows: Rows, tokens: Tokens, view: CacheView
) -> Callable[[Rows, Tensor, Tensor], None]:
    num_rows = rows.latent_TR.shape[0]
    if not num_rows:
        return _nothing
    most = BLOCKS_PER_MULTIPROCESSOR * multiprocessors(view.pages_JY.device)
    what = append_arguments(rows, tokens, view, tile_rows(num_rows, most))
    return AppendRun("append", what, view, tokens)


def plan_gather(
    tokens: Tokens, view: CacheView, out_TC: Tensor
) -> Callable[[Tensor, Tensor, Tensor], None]:
    if not out_TC.shape[0]:
        return _nothing
    return GatherRun("gather", gather_arguments(tokens, view, out_TC), view, tokens)
