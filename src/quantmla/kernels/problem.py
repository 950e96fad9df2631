"""What a call asks of a backend: its inputs, checked, and the few facts that decide who can do it.

B sequences, S query tokens of each, N heads, T rows (tokens of any sequences), R latent rank,
E rope channels (interleaved), C = R + E.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.errors import UsageError, require
from quantmla.quant.format import CacheFormat
from quantmla.quant.layout import ALIGNMENT

ROW_ALIGNMENT = 16

Operation = Literal["decode", "append", "gather"]
Platform = Literal["cpu", "cuda", "rocm"]


class DecodeQuery(NamedTuple):
    """Queries of the last S tokens of every sequence; query s sees tokens t <= length - S + s."""

    latent_BSNR: Tensor  # absorbed: q_content @ w_uk
    rope_BSNE: Tensor  # after rotation
    softmax_scale: float


class Tokens(NamedTuple):
    """Which tokens T rows are: an index into the view's sequences, and a place in the sequence.

    A row whose sequence is below 0 is padding and touches nothing.
    """

    sequence_T: Tensor  # int32
    position_T: Tensor  # int32


class Rows(NamedTuple):
    """What attention will read of T tokens."""

    latent_TR: Tensor  # bfloat16
    k_rope_TE: Tensor  # bfloat16, after rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Facts that a backend needs to say whether it can."""

    operation: Operation
    platform: Platform
    capability: tuple[int, int] | None  # of an NVIDIA GPU
    dtype: torch.dtype  # of the query, or of the rows
    fmt: CacheFormat
    kv_lora_rank: int
    qk_rope_head_dim: int
    window_page_size: int
    aligned: bool = True  # rows given or written start at multiples of 16 bytes
    num_heads: int = 0  # decode only
    query_len: int = 0  # decode only


@cache
def platform_of(device: torch.device) -> tuple[Platform, tuple[int, int] | None]:
    if device.type != "cuda":
        require(device.type == "cpu", f"device {device} is neither 'cpu' nor 'cuda'", UsageError)
        return "cpu", None
    if torch.version.hip is not None:
        return "rocm", None
    return "cuda", torch.cuda.get_device_capability(device)


def _problem(
    operation: Operation,
    dtype: torch.dtype,
    view: CacheView,
    num_heads: int = 0,
    query_len: int = 0,
) -> Problem:
    platform, capability = platform_of(view.pages_JY.device)
    return Problem(
        operation=operation,
        platform=platform,
        capability=capability,
        dtype=dtype,
        fmt=view.fmt,
        kv_lora_rank=view.kv_lora_rank,
        qk_rope_head_dim=view.qk_rope_head_dim,
        window_page_size=view.window_page_size,
        num_heads=num_heads,
        query_len=query_len,
    )


def _check_tensor(
    name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], like: Tensor
) -> None:
    """`None` in `shape` is any size; the last dimension must be contiguous."""
    fits = x.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, x.shape, strict=True)
    )
    dense = fits and (x.stride(-1) == 1 or x.shape[-1] <= 1)
    if dense and x.dtype == dtype and x.device == like.device:
        return  # before any sentence is made: this runs for every layer of every step
    wanted = ["any" if size is None else size for size in shape]
    require(fits, f"{name} has shape {list(x.shape)}, not {wanted}", UsageError)
    require(x.dtype == dtype, f"{name} is {x.dtype}, not {dtype}", UsageError)
    require(
        x.device == like.device,
        f"{name} is on {x.device}, the pages are on {like.device}",
        UsageError,
    )
    raise UsageError(f"{name} has stride {x.stride(-1)} in its last dimension, not 1")


def is_aligned(x: Tensor, size: int) -> bool:
    """Whether every row starts at a multiple of `size` bytes."""
    strides = (stride * x.element_size() for stride in x.stride()[:-1])
    return x.data_ptr() % size == 0 and all(stride % size == 0 for stride in strides)


def _check_alignment(name: str, x: Tensor, size: int) -> None:
    """Vector loads need it."""
    strides = [stride * x.element_size() for stride in x.stride()[:-1]]
    require(
        is_aligned(x, size),
        f"{name} starts at address {x.data_ptr()} with strides {strides} bytes: "
        f"not multiples of {size}",
        UsageError,
    )


def check_view(view: CacheView) -> None:
    """Refuses shapes, dtypes and devices that no backend takes; values are the owner's matter."""
    require(
        view.fmt.recent_window is not None,
        "an unprotected cache format (recent_window None) is for evaluation only, without kernels",
        UsageError,
    )
    for name, rank in (("window_pages_JMC", 3), ("lengths_B", 1), ("sink_pages_B", 1)):
        shape = list(getattr(view, name).shape)
        require(len(shape) == rank, f"{name} has shape {shape}, not {rank} dimensions", UsageError)
    pages, batch = view.pages_JY, view.lengths_B.shape[0]
    channels = view.window_pages_JMC.shape[-1]
    require(
        view.window_table_BW.dim() != 2 or view.window_table_BW.shape[1] > 0,
        f"window_table_BW has shape {list(view.window_table_BW.shape)}: it must have a column",
        UsageError,
    )
    int32, bf16 = torch.int32, torch.bfloat16
    _check_tensor("pages_JY", pages, torch.uint8, (None, view.layout.page_bytes), pages)
    _check_tensor("window_pages_JMC", view.window_pages_JMC, bf16, (None, None, channels), pages)
    _check_tensor("block_table_BJ", view.block_table_BJ, int32, (batch, None), pages)
    _check_tensor("window_table_BW", view.window_table_BW, int32, (batch, None), pages)
    _check_tensor("lengths_B", view.lengths_B, int32, (batch,), pages)
    _check_tensor(
        "sink_pages_B", view.sink_pages_B[:, None], int32, (batch, 1), pages
    )  # any stride
    if view.window_start_B is not None:
        _check_tensor("window_start_B", view.window_start_B, int32, (batch,), pages)
    if pages.is_cuda:
        _check_alignment("pages_JY", pages, ALIGNMENT)
        _check_alignment("window_pages_JMC", view.window_pages_JMC, ROW_ALIGNMENT)
    require(
        view.fmt.num_sink_tokens <= view.window_page_size,
        f"{view.fmt.num_sink_tokens} sink tokens do not fit a window page of "
        f"{view.window_page_size}",
        UsageError,
    )


def decode_problem(query: DecodeQuery, view: CacheView) -> Problem:
    """Checks a decode call and describes it."""
    check_view(view)
    q = query.latent_BSNR
    require(q.dim() == 4, f"latent_BSNR has shape {list(q.shape)}, not [B, S, N, R]", UsageError)
    batch, query_len, heads = view.lengths_B.shape[0], q.shape[1], q.shape[2]
    require(
        q.is_floating_point() and q.element_size() > 1,
        f"latent_BSNR is {q.dtype}, not a floating-point type of 2 bytes or more",
        UsageError,
    )
    _check_tensor("latent_BSNR", q, q.dtype, (batch, None, None, view.kv_lora_rank), view.pages_JY)
    rope_shape = (batch, query_len, heads, view.qk_rope_head_dim)
    _check_tensor("rope_BSNE", query.rope_BSNE, q.dtype, rope_shape, view.pages_JY)
    window = view.fmt.recent_window
    assert window is not None
    require(
        query_len <= window + 1,
        f"query length {query_len} is more than the recent window of {window} tokens allows: "
        f"at most {window + 1}",
        UsageError,
    )
    return _problem("decode", q.dtype, view, heads, query_len)


def check_out(out_BSNR: Tensor, query: DecodeQuery) -> None:
    """Refuses what a decode's output cannot be written to: all backends write dense rows."""
    q = query.latent_BSNR
    _check_tensor("out_BSNR", out_BSNR, q.dtype, tuple(q.shape), q)
    require(
        out_BSNR.is_contiguous(),
        f"out_BSNR has strides {list(out_BSNR.stride())}: it must be contiguous",
        UsageError,
    )
    if out_BSNR.is_cuda:
        _check_alignment("out_BSNR", out_BSNR, ROW_ALIGNMENT)


def _check_tokens(tokens: Tokens, num_rows: int, view: CacheView) -> None:
    for name, x in zip(tokens._fields, tokens, strict=True):
        _check_tensor(name, x, torch.int32, (num_rows,), view.pages_JY)


def append_problem(rows: Rows, tokens: Tokens, view: CacheView) -> Problem:
    """Checks an append call and describes it."""
    check_view(view)
    require(
        rows.latent_TR.dim() == 2,
        f"latent_TR has shape {list(rows.latent_TR.shape)}, not [T, R]",
        UsageError,
    )
    num_rows = rows.latent_TR.shape[0]
    bf16 = torch.bfloat16
    _check_tensor("latent_TR", rows.latent_TR, bf16, (num_rows, view.kv_lora_rank), view.pages_JY)
    _check_tensor(
        "k_rope_TE", rows.k_rope_TE, bf16, (num_rows, view.qk_rope_head_dim), view.pages_JY
    )
    _check_tokens(tokens, num_rows, view)
    aligned = all(is_aligned(x, ROW_ALIGNMENT) for x in rows)
    return replace(_problem("append", bf16, view), aligned=aligned)


def gather_problem(tokens: Tokens, view: CacheView, out_TC: Tensor) -> Problem:
    """Checks a gather call and describes it."""
    check_view(view)
    channels = view.window_pages_JMC.shape[-1]
    _check_tensor("out_TC", out_TC, torch.bfloat16, (None, channels), view.pages_JY)
    _check_tokens(tokens, out_TC.shape[0], view)
    aligned = is_aligned(out_TC, ROW_ALIGNMENT)
    return replace(_problem("gather", torch.bfloat16, view), aligned=aligned)
