"""Where bf16 rows lie, and attention over them: sinks and the recent window."""

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))


@triton.jit
def packed_length(length, window_start, recent_window, PAGE: tl.constexpr):
    """Tokens before this one are read packed; see CacheView.packed_length_B."""
    old = tl.maximum(length - recent_window, 0)
    return tl.maximum(old // PAGE.TOKENS * PAGE.TOKENS, window_start)


@triton.jit
def window_rows(window, table, position, mask):
    """Pointers to tokens' rows, and the numbers of their pages (-1 where masked).

    `window` is the pool, its strides between pages and rows, the tokens of a page, and the width of
    the tables; `table` points to the table of each token's sequence.
    """
    pool, stride_page, stride_row, tokens, width = window
    page = tl.load(table + position // tokens % width, mask=mask, other=-1)
    return pool + page.to(tl.int64) * stride_page + (position % tokens) * stride_row, page


@triton.jit
def sink_rows(window, sink_page, position):
    """Pointers to the rows of tokens that their sequence's sink page holds."""
    pool, stride_page, stride_row, _tokens, _width = window
    return pool + sink_page.to(tl.int64) * stride_page + position * stride_row


@triton.jit
def attend_window(
    window,
    table,
    sink_page,
    first,
    length,
    num_sinks,
    step,
    num_steps,
    q,
    q_rope,
    row_limit,
    score_scale,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Sinks, then tokens first..length-1, in tiles step, step + num_steps, ...

    A query row sees tokens up to its `row_limit`. Returns output [RANK, ROWS], maximum (base 2) and
    denominator of each row.
    """
    RANK: tl.constexpr = PAGE.RANK
    channel, rope_channel = tl.arange(0, RANK), RANK + tl.arange(0, PAGE.ROPE)
    top = tl.full([ROWS], -INF, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([RANK, ROWS], tl.float32)
    count = num_sinks + tl.maximum(length - first, 0)
    for tile in range(step, tl.cdiv(count, TILE), num_steps):
        index = tile * TILE + tl.arange(0, TILE)
        real, sink = index < count, index < num_sinks
        position = tl.where(sink, index, first + index - num_sinks)
        row, _page = window_rows(window, table, position, real & (index >= num_sinks))
        row = tl.where(sink, sink_rows(window, sink_page, position), row)[:, None]
        latent = tl.load(row + channel[None, :], mask=real[:, None], other=0.0).to(DOT)
        k_rope = tl.load(row + rope_channel[None, :], mask=real[:, None], other=0.0).to(DOT)
        scores = tl.dot(latent, q, tl.dot(k_rope, q_rope)) * score_scale
        seen = real[:, None] & (position[:, None] <= row_limit[None, :])
        scores = tl.where(seen, scores, -INF)
        new_top = tl.maximum(top, tl.max(scores, 0))
        base = tl.where(new_top == -INF, 0.0, new_top)  # no token seen yet: avoid inf - inf
        shrink = tl.exp2(top - base)
        p = tl.exp2(scores - base[None, :])
        total = total * shrink + tl.sum(p, 0)
        top = new_top
        out = tl.dot(tl.trans(latent), p.to(DOT), out * shrink[None, :])
    return out, top, total
