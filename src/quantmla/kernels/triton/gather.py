"""Gather: tokens as decode reads them, into rows of bfloat16.

One program handles a block of rows and one part of their channels, as in append.py.
"""

import triton
import triton.language as tl

from quantmla.kernels.triton.window import packed_length, sink_rows, window_rows


@triton.jit
def _packed_channels(
    page,
    offset,
    mask,
    at,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """scale * (code - zero point), float32 [ROWS, CHANNELS], in groups of GROUP channels.

    `page` points to each row's page and `offset` is its token there; `at` is where the codes of the
    part begin in the page, the bytes between tokens, and the part's first group.
    """
    codes_at, row_bytes, first_group = at
    PER: tl.constexpr = 32 // BITS
    row = (page + codes_at + offset * row_bytes).to(tl.pointer_type(tl.int32))
    word = tl.arange(0, CHANNELS // PER)[None, :]
    words = tl.load(row[:, None] + word, mask=mask[:, None], other=0)
    fields = words[:, :, None] >> (tl.arange(0, PER) * BITS)[None, None, :]
    codes = tl.reshape((fields & (2**BITS - 1)).to(tl.float32), [ROWS, CHANNELS // GROUP, GROUP])
    group = first_group + tl.arange(0, CHANNELS // GROUP)[None, :]
    place = group * PAGE.TOKENS + offset[:, None]
    scales = (page + PAGE.SCALES_AT).to(tl.pointer_type(tl.float16))[:, None]
    scale = tl.load(scales + place, mask=mask[:, None], other=0.0).to(tl.float32)
    zeros = (page + PAGE.ZEROS_AT)[:, None]
    zero = tl.load(zeros + place, mask=mask[:, None], other=0).to(tl.float32)
    return tl.reshape(scale[:, :, None] * (codes - zero[:, :, None]), [ROWS, CHANNELS])


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "recent_window",
        "sink_tokens",
        "window_table_width",
        "stride_table",
        "stride_window_table",
        "stride_sink",
    ]
)
def gather_rows(
    sequences,
    positions,
    pages,
    block_table,
    lengths,
    window,
    window_table,
    sink_pages,
    window_start,
    out,
    num_rows,
    recent_window,
    sink_tokens,
    window_table_width,
    stride_out,
    stride_page,
    stride_table,
    stride_window_page,
    stride_window_row,
    stride_window_table,
    stride_sink,
    WINDOW_TOKENS: tl.constexpr,
    STARTS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of BLOCK rows, part): a content group, or the rope key."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    sequence = tl.load(sequences + row, mask=row < num_rows, other=-1)
    real = sequence >= 0
    position = tl.load(positions + row, mask=real, other=0)
    length = tl.load(lengths + sequence, mask=real, other=0)
    start = 0
    if STARTS:
        start = tl.load(window_start + sequence, mask=real, other=0)
    sink_page = tl.load(sink_pages + sequence * stride_sink, mask=real, other=-1)
    sink = real & (position < tl.minimum(length, sink_tokens)) & (sink_page >= 0)
    old = position < packed_length(length, start, recent_window, PAGE)
    packed = real & old & (sink == 0)
    plain = real & (packed == 0)

    rows = (window, stride_window_page, stride_window_row, WINDOW_TOKENS, window_table_width)
    table = window_table + sequence.to(tl.int64) * stride_window_table
    bf16_row, _page = window_rows(rows, table, position, plain & (sink == 0))
    bf16_row = tl.where(sink, sink_rows(rows, sink_page, position), bf16_row)[:, None]
    entry = block_table + sequence.to(tl.int64) * stride_table + position // PAGE.TOKENS
    page = pages + tl.load(entry, mask=packed, other=0).to(tl.int64) * stride_page
    offset = position % PAGE.TOKENS
    target = (out + row.to(tl.int64) * stride_out)[:, None]
    channel = (part * PAGE.GROUP + tl.arange(0, PAGE.GROUP))[None, :]
    rope_channel = tl.arange(0, PAGE.ROPE)[None, :]
    plain = plain[:, None]
    if part < PAGE.GROUPS:
        at = (part * (PAGE.GROUP * PAGE.BITS // 8), PAGE.RANK * PAGE.BITS // 8, part)
        x = _packed_channels(
            page, offset, packed, at, PAGE.GROUP, PAGE.GROUP, PAGE.BITS, PAGE, BLOCK
        )
        bf16 = tl.load(bf16_row + channel, mask=plain, other=0.0)
        tl.store(target + channel, tl.where(plain, bf16, x.to(tl.bfloat16)), mask=real[:, None])
    else:
        at = (PAGE.ROPE_AT, PAGE.ROPE * PAGE.ROPE_BITS // 8, PAGE.GROUPS)
        y = _packed_channels(
            page, offset, packed, at, PAGE.BAND, PAGE.ROPE, PAGE.ROPE_BITS, PAGE, BLOCK
        )
        means = (page + PAGE.MEAN_AT).to(tl.pointer_type(tl.float16))[:, None]
        mean = tl.load(means + rope_channel, mask=packed[:, None], other=0.0)
        y = (y + mean.to(tl.float32)).to(tl.bfloat16)
        bf16_rope = tl.load(bf16_row + PAGE.RANK + rope_channel, mask=plain, other=0.0)
        at_rope = target + PAGE.RANK + rope_channel
        tl.store(at_rope, tl.where(plain, bf16_rope, y), mask=real[:, None])
