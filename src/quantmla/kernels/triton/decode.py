"""Split-KV decode: packed splits and window splits of every sequence, then their combination.

A query row is a query token and a head: S * N rows of each sequence, in blocks of ROWS.
"""

import triton
import triton.language as tl

from quantmla.kernels.triton.packed import attend_pages
from quantmla.kernels.triton.query import load_query_planes, row_offsets
from quantmla.kernels.triton.window import attend_window, packed_length

LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))


@triton.jit(
    do_not_specialize=[
        "batch",
        "num_rows",
        "num_splits",
        "window_splits",
        "min_pages",
        "query_len",
        "heads",
        "recent_window",
        "sink_tokens",
        "window_tokens",
        "window_table_width",
        "stride_table",
        "stride_window_table",
        "stride_sink",
    ]
)
def decode_split(
    latent_q,
    rope_q,
    pages,
    block_table,
    lengths,
    window,
    window_table,
    sink_pages,
    window_start,
    partial_out,
    partial_lse,
    score_scale,
    batch,
    num_rows,
    num_splits,
    window_splits,
    min_pages,
    query_len,
    heads,
    recent_window,
    sink_tokens,
    window_tokens,
    window_table_width,
    stride_qb,
    stride_qs,
    stride_qn,
    stride_rb,
    stride_rs,
    stride_rn,
    stride_page,
    stride_table,
    stride_window_page,
    stride_window_row,
    stride_window_table,
    stride_sink,
    STARTS: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
    PREFETCH: tl.constexpr,
    DOT: tl.constexpr,
):
    """Writes out [B, K, S * N, RANK], channels in plane order, and base-2 lse [B, K, S * N].

    Splits 0..num_splits-1 share the packed pages, the rest the window. An empty split writes -inf
    as its lse and no output. `score_scale` is softmax_scale * log2(e).
    """
    row_blocks = tl.cdiv(num_rows, ROWS)
    pid = tl.program_id(0)
    b = pid // row_blocks % batch
    split = pid // row_blocks // batch  # window splits, the short ones, come last
    row = pid % row_blocks * ROWS + tl.arange(0, ROWS)
    row_mask = row < num_rows
    at = (b * (num_splits + window_splits) + split).to(tl.int64) * num_rows + row

    length = tl.load(lengths + b)
    start = 0
    if STARTS:
        start = tl.load(window_start + b)
    packed = packed_length(length, start, recent_window, PAGE)
    sink_page = tl.load(sink_pages + b * stride_sink)
    num_sinks = tl.where(sink_page >= 0, tl.minimum(length, sink_tokens), 0)
    q_offset = row_offsets(b, row, heads, (stride_qb, stride_qs, stride_qn))
    r_offset = row_offsets(b, row, heads, (stride_rb, stride_rs, stride_rn))

    if split < num_splits:
        num_pages = packed // PAGE.TOKENS
        share = tl.maximum(tl.cdiv(num_pages, num_splits), min_pages)
        first = split * share
        last = tl.minimum(first + share, num_pages)
        if first < last:
            q_planes, rope_planes, gain = load_query_planes(
                latent_q, rope_q, q_offset, r_offset, row_mask, PAGE
            )
            out, top, total = attend_pages(
                (pages, stride_page),
                block_table + b.to(tl.int64) * stride_table,
                first,
                last,
                num_sinks,
                q_planes,
                rope_planes,
                1.0 / gain * score_scale,
                PAGE,
                STEP,
                ROWS,
                ASM,
                PREFETCH,
            )
            inverse = (1.0 / total)[None, :]
            target = partial_out + at[None, :] * PAGE.RANK + tl.arange(0, PAGE.WORDS)[:, None]
            P: tl.constexpr = PAGE.PLANES
            for i in tl.static_range(P):
                tl.store(target + i * PAGE.WORDS, out[i] * inverse, mask=row_mask[None, :])
            tl.store(partial_lse + at, top + tl.log2(total), mask=row_mask)
        else:
            tl.store(partial_lse + at, tl.full([ROWS], -INF, tl.float32), mask=row_mask)
    else:
        channel, rope_channel = tl.arange(0, PAGE.RANK), tl.arange(0, PAGE.ROPE)
        q_mask = row_mask[None, :]
        q = tl.load(latent_q + q_offset[None, :] + channel[:, None], mask=q_mask, other=0.0)
        q_rope = tl.load(rope_q + r_offset[None, :] + rope_channel[:, None], mask=q_mask, other=0.0)
        out_w, top, total = attend_window(
            (window, stride_window_page, stride_window_row, window_tokens, window_table_width),
            window_table + b.to(tl.int64) * stride_window_table,
            sink_page,
            tl.maximum(packed, num_sinks),
            length,
            num_sinks,
            split - num_splits,
            window_splits,
            q.to(DOT),
            q_rope.to(DOT),
            length - query_len + row // heads,
            score_scale,
            PAGE,
            WINDOW_TILE,
            ROWS,
            DOT,
        )
        inverse = tl.where(total > 0, 1.0 / total, 0.0)[None, :]
        place = channel % PAGE.PLANES * PAGE.WORDS + channel // PAGE.PLANES
        target = partial_out + at[None, :] * PAGE.RANK + place[:, None]
        tl.store(target, out_w * inverse, mask=q_mask)
        tl.store(partial_lse + at, tl.where(total > 0, top + tl.log2(total), -INF), mask=row_mask)


@triton.jit(do_not_specialize=["num_rows", "all_splits"])
def combine(
    partial_out,
    partial_lse,
    out,
    lse,
    num_rows,
    all_splits,
    PAGE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """CHANNELS channels of one row's splits, into its output, and its natural-log lse."""
    b = tl.program_id(0) // num_rows
    row = tl.program_id(0) % num_rows
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    place = channel % PAGE.PLANES * PAGE.WORDS + channel // PAGE.PLANES
    start = (b.to(tl.int64) * all_splits) * num_rows + row

    top = tl.full([SPLITS], -INF, tl.float32)
    for first in range(0, all_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        at = start + split * num_rows
        top = tl.maximum(top, tl.load(partial_lse + at, mask=split < all_splits, other=-INF))
    highest = tl.max(top, 0)
    base = tl.where(highest == -INF, 0.0, highest)
    total = 0.0
    value = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, all_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        at = start + split.to(tl.int64) * num_rows
        weight = tl.exp2(tl.load(partial_lse + at, mask=split < all_splits, other=-INF) - base)
        rows = (partial_out + at * PAGE.RANK)[:, None] + place[None, :]
        x = tl.load(rows, mask=(weight > 0)[:, None], other=0.0)  # an empty split has no output
        total += tl.sum(weight, 0)
        value += tl.sum(weight[:, None] * x, 0)
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    here = tl.program_id(0).to(tl.int64)
    tl.store(out + here * PAGE.RANK + channel, (value * inverse).to(out.dtype.element_ty))
    log_sum = tl.where(total > 0, (base + tl.log2(total)) * LN2, -INF)
    tl.store(lse + here, log_sum, mask=tl.program_id(1) == 0)
