"""Append: rows of tokens into the bf16 window, and whole pages into bytes.

One program handles a block of rows and one part of their channels: a content group, or (the last
part) the whole rope key. Parts do not depend on one another, so a page is packed by as many
programs as it has groups, each reading its rows once.
"""

import triton
import triton.language as tl

from quantmla.kernels.triton.pack import write_group, write_rope
from quantmla.kernels.triton.window import sink_rows, window_rows


@triton.jit
def _copy_rows(rows, stride, tokens, row, channel, window, tables, sinks, window_at):
    """Rows into the window, and the first ones of a sequence into its sink page."""
    sequences, positions, num_rows = tokens
    window_table, stride_table = tables
    sink_pages, stride_sink, sink_tokens = sinks
    sequence = tl.load(sequences + row, mask=row < num_rows, other=-1)
    real = sequence >= 0
    position = tl.load(positions + row, mask=real, other=0)
    source = rows + row.to(tl.int64) * stride
    x = tl.load(source[:, None] + channel[None, :], mask=real[:, None], other=0.0)
    place = window_at + channel[None, :]
    table = window_table + sequence.to(tl.int64) * stride_table
    target, page = window_rows(window, table, position, real)
    tl.store(target[:, None] + place, x, mask=(real & (page >= 0))[:, None])
    early = real & (position < sink_tokens)
    sink_page = tl.load(sink_pages + sequence * stride_sink, mask=early, other=-1)
    sink = sink_rows(window, sink_page, position)
    tl.store(sink[:, None] + place, x, mask=(early & (sink_page >= 0))[:, None])


@triton.jit
def _page_rows(
    rows, stride, sequences, last_row, last, channel, window, table, window_at, PAGE: tl.constexpr
):
    """A complete page's rows [TOKENS, channels], float32: from this call, or else from the window.

    `last` is the sequence and the position of its last token, the row `last_row` of this call.
    """
    sequence, position = last
    back = PAGE.TOKENS - 1 - tl.arange(0, PAGE.TOKENS)
    row = last_row - back
    first = last_row - (PAGE.TOKENS - 1)
    whole = False  # all of it is in this call, as in a prompt
    if first >= 0:
        whole = tl.load(sequences + first) == sequence
    if whole:
        source = rows + row.to(tl.int64) * stride
        x = tl.load(source[:, None] + channel[None, :])
    else:
        here = (row >= 0) & (tl.load(sequences + row, mask=row >= 0, other=-1) == sequence)
        source = rows + row.to(tl.int64) * stride
        new = tl.load(source[:, None] + channel[None, :], mask=here[:, None], other=0.0)
        kept, _page = window_rows(window, table, position - back, here == 0)
        place = window_at + channel[None, :]
        old = tl.load(kept[:, None] + place, mask=(here == 0)[:, None], other=0.0)
        x = tl.where(here[:, None], new, old)
    return x.to(tl.float32)


@triton.jit
def _next_end(ends, index, after, BLOCK: tl.constexpr):
    """The first row after `after` that ends a page; BLOCK if there is none."""
    return tl.min(tl.where(ends & (index > after), index, BLOCK), 0)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "sink_tokens",
        "window_table_width",
        "stride_table",
        "stride_window_table",
        "stride_sink",
    ]
)
def append_rows(
    latent,
    k_rope,
    sequences,
    positions,
    pages,
    block_table,
    window,
    window_table,
    sink_pages,
    num_rows,
    sink_tokens,
    window_table_width,
    content_clip,
    rope_clip,
    stride_latent,
    stride_rope,
    stride_page,
    stride_table,
    stride_window_page,
    stride_window_row,
    stride_window_table,
    stride_sink,
    WINDOW_TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One part of BLOCK rows' channels: to the window, then every page that ends among them."""
    first = tl.program_id(0) * BLOCK
    part = tl.program_id(1)
    row = first + tl.arange(0, BLOCK)
    tokens = (sequences, positions, num_rows)
    rows = (window, stride_window_page, stride_window_row, WINDOW_TOKENS, window_table_width)
    tables = (window_table, stride_window_table)
    sinks = (sink_pages, stride_sink, sink_tokens)
    channel = part * PAGE.GROUP + tl.arange(0, PAGE.GROUP)
    rope_channel = tl.arange(0, PAGE.ROPE)
    if part < PAGE.GROUPS:
        _copy_rows(latent, stride_latent, tokens, row, channel, rows, tables, sinks, 0)
    else:
        _copy_rows(k_rope, stride_rope, tokens, row, rope_channel, rows, tables, sinks, PAGE.RANK)
    index = tl.arange(0, BLOCK)
    sequence_of = tl.load(sequences + row, mask=row < num_rows, other=-1)
    position_of = tl.load(positions + row, mask=sequence_of >= 0, other=0)
    ends = (sequence_of >= 0) & (position_of % PAGE.TOKENS == PAGE.TOKENS - 1)
    at = _next_end(ends, index, -1, BLOCK)
    while at < BLOCK:
        end = first + at
        at = _next_end(ends, index, at, BLOCK)
        sequence = tl.load(sequences + end)
        position = tl.load(positions + end)
        entry = block_table + sequence.to(tl.int64) * stride_table
        number = tl.load(entry + position // PAGE.TOKENS)
        if number >= 0:
            page = pages + number.to(tl.int64) * stride_page
            table = window_table + sequence.to(tl.int64) * stride_window_table
            last = (sequence, position)
            if part < PAGE.GROUPS:
                x = _page_rows(
                    latent, stride_latent, sequences, end, last, channel, rows, table, 0, PAGE
                )
                write_group(page, x, part, content_clip, PAGE)
            else:
                y = _page_rows(
                    k_rope,
                    stride_rope,
                    sequences,
                    end,
                    last,
                    rope_channel,
                    rows,
                    table,
                    PAGE.RANK,
                    PAGE,
                )
                write_rope(page, y, rope_clip, PAGE)
