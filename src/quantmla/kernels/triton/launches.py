"""Every launch of this backend from the tensors of a call."""

from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels.problem import DecodeQuery, Rows, Tokens
from quantmla.kernels.triton.append import append_rows
from quantmla.kernels.triton.decode import combine, decode_split
from quantmla.kernels.triton.gather import gather_rows
from quantmla.kernels.triton.launch import Launch
from quantmla.kernels.triton.schedule import WINDOW_TILE, Schedule
from quantmla.kernels.triton.shape import page_shape
from quantmla.mla.partial import Partial

LOG2E = 1 / log(2)
COMBINE_CHANNELS = 128
COMBINE_SPLITS = 32
GATHER_BLOCK = 64
MAX_APPEND_BLOCK = 64


def _cache(view: CacheView) -> dict[str, object]:
    """The tensors of a view and their strides, under the names that all kernels use."""
    return {
        "pages": view.pages_JY,
        "block_table": view.block_table_BJ,
        "window": view.window_pages_JMC,
        "window_table": view.window_table_BW,
        "sink_pages": view.sink_pages_B,
        "sink_tokens": view.fmt.num_sink_tokens,
        "window_table_width": view.window_table_BW.shape[1],
        "stride_page": view.pages_JY.stride(0),
        "stride_table": view.block_table_BJ.stride(0),
        "stride_window_page": view.window_pages_JMC.stride(0),
        "stride_window_row": view.window_pages_JMC.stride(1),
        "stride_window_table": view.window_table_BW.stride(0),
        "stride_sink": view.sink_pages_B.stride(0),
    }


def _lengths(view: CacheView) -> dict[str, object]:
    """What says which tokens are packed. `window_start` is not read where there is none."""
    start = view.lengths_B if view.window_start_B is None else view.window_start_B
    return {
        "lengths": view.lengths_B,
        "window_start": start,
        "recent_window": view.fmt.recent_window,
    }


def decode_launches(
    query: DecodeQuery,
    view: CacheView,
    plan: Schedule,
    target: tuple[bool, bool],
    out_BSNR: Tensor | None = None,
) -> tuple[list[Launch], Partial]:
    """Two launches and what they fill. `target`: compiled (not interpreted), and for NVIDIA."""
    compiled, nvidia = target
    q, q_rope = query.latent_BSNR, query.rope_BSNE
    batch, query_len, heads, rank = q.shape
    num_rows, all_splits = query_len * heads, plan.num_splits + plan.window_splits
    partial_out = torch.empty(batch, all_splits, num_rows, rank, device=q.device)
    partial_lse = torch.empty(batch, all_splits, num_rows, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out_BSNR is None else out_BSNR
    lse = torch.empty(q.shape[:3], device=q.device)
    shape = page_shape(view)
    partials = {"partial_out": partial_out, "partial_lse": partial_lse}
    split = Launch(
        kernel=decode_split,
        grid=(batch * all_splits * triton.cdiv(num_rows, plan.rows),),
        args={
            "latent_q": q,
            "rope_q": q_rope,
            "score_scale": query.softmax_scale * LOG2E,
            "batch": batch,
            "num_rows": num_rows,
            "num_splits": plan.num_splits,
            "window_splits": plan.window_splits,
            "min_pages": plan.min_pages,
            "query_len": query_len,
            "heads": heads,
            **dict(zip(("stride_qb", "stride_qs", "stride_qn"), q.stride(), strict=False)),
            **dict(zip(("stride_rb", "stride_rs", "stride_rn"), q_rope.stride(), strict=False)),
            **partials,
            "window_tokens": view.window_page_size,
            **_cache(view),
            **_lengths(view),
        },
        constants={
            "WINDOW_TILE": WINDOW_TILE,
            "STEP": plan.step,
            "ROWS": plan.rows,
            "ASM": compiled and nvidia,
            "PREFETCH": compiled and nvidia and plan.prefetch,
            # the interpreter multiplies bit patterns of bf16
            "DOT": tl.bfloat16 if compiled else tl.float32,
            "STARTS": view.window_start_B is not None,
            "PAGE": shape,
        },
        num_warps=plan.num_warps,
        num_stages=plan.stages,
    )
    channels = min(COMBINE_CHANNELS, rank)
    combined = Launch(
        kernel=combine,
        grid=(batch * num_rows, rank // channels),
        args={"out": out, "lse": lse, "num_rows": num_rows, "all_splits": all_splits, **partials},
        constants={
            "PAGE": shape,
            "CHANNELS": channels,
            "SPLITS": COMBINE_SPLITS,
        },
    )
    return [split, combined], Partial(out, lse)


def append_launch(rows: Rows, tokens: Tokens, view: CacheView) -> Launch:
    """Small blocks for few rows, so that many pages that end at once are packed side by side."""
    num_rows = rows.latent_TR.shape[0]
    shape = page_shape(view)
    block = min(MAX_APPEND_BLOCK, triton.next_power_of_2(max(1, num_rows // 128)))
    return Launch(
        kernel=append_rows,
        grid=(triton.cdiv(num_rows, block), shape.GROUPS + 1),
        args={
            "latent": rows.latent_TR,
            "k_rope": rows.k_rope_TE,
            "sequences": tokens.sequence_T,
            "positions": tokens.position_T,
            "num_rows": num_rows,
            "content_clip": view.fmt.content_clip,
            "rope_clip": view.fmt.rope_clip,
            "stride_latent": rows.latent_TR.stride(0),
            "stride_rope": rows.k_rope_TE.stride(0),
            **_cache(view),
        },
        constants={
            "WINDOW_TOKENS": view.window_page_size,
            "BLOCK": block,
            "PAGE": shape,
        },
    )


def gather_launch(tokens: Tokens, view: CacheView, out_TC: Tensor) -> Launch:
    num_rows = out_TC.shape[0]
    shape = page_shape(view)
    return Launch(
        kernel=gather_rows,
        grid=(triton.cdiv(num_rows, GATHER_BLOCK), shape.GROUPS + 1),
        args={
            "sequences": tokens.sequence_T,
            "positions": tokens.position_T,
            "out": out_TC,
            "num_rows": num_rows,
            "stride_out": out_TC.stride(0),
            **_cache(view),
            **_lengths(view),
        },
        constants={
            "BLOCK": GATHER_BLOCK,
            "WINDOW_TOKENS": view.window_page_size,
            "STARTS": view.window_start_B is not None,
            "PAGE": shape,
        },
    )
