"""Gather: tokens as decode reads them, into rows of bfloat16.

One program handles a block of rows and one part of their channels, as in append.py.
"""

import triton
import triton.language as tl


@triton.jit
def _unpack_words(words, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """Codes in channel order, float32, from int32 words with the lowest bits first."""
    PER: tl.constexpr = 32 // BITS
    fields = words[:, :, None] >> (tl.arange(0, PER) * BITS)[None, None, :]
    return tl.reshape(fields & (2**BITS - 1), [ROWS, CHANNELS]).to(tl.float32)


@triton.jit
def _packed_group(page, offset, mask, codes_at, row_bytes, scales_at, zeros_at, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr):
    """scale * (code - zero point) of CHANNELS channels in groups of GROUP; `page` is a pointer per row."""
    WORDS: tl.constexpr = CHANNELS * BITS // 32
    row = (page + codes_at + offset * row_bytes).to(tl.pointer_type(tl.int32))
    words = tl.load(row[:, None] + tl.arange(0, WORDS)[None, :], mask=mask[:, None], other=0)
    codes = tl.reshape(_unpack_words(words, ROWS, CHANNELS, BITS), [ROWS, CHANNELS // GROUP, GROUP])
    group = tl.arange(0, CHANNELS // GROUP)[None, :] * TOKENS
    scales = (page + scales_at).to(tl.pointer_type(tl.float16)) + offset
    scale = tl.load(scales[:, None] + group, mask=mask[:, None], other=0.0).to(tl.float32)
    zero = tl.load((page + zeros_at + offset)[:, None] + group, mask=mask[:, None], other=0).to(tl.float32)
    return tl.reshape(scale[:, :, None] * (codes - zero[:, :, None]), [ROWS, CHANNELS])


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "recent_window",
        "sink_tokens",
        "window_tokens",
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
    window_tokens,
    window_table_width,
    stride_out,
    stride_page,
    stride_table,
    stride_window_page,
    stride_window_row,
    stride_window_table,
    stride_sink,
    STARTS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BITS: tl.constexpr,
    ROPE_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    BANDS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROPE_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ZEROS_AT: tl.constexpr,
    MEAN_AT: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of BLOCK rows, part): a content group, or the rope key."""
    GROUP: tl.constexpr = RANK // GROUPS
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    sequence = tl.load(sequences + row, mask=row < num_rows, other=-1)
    real = sequence >= 0
    position = tl.load(positions + row, mask=real, other=0)
    length = tl.load(lengths + sequence, mask=real, other=0)
    packed_length = tl.maximum(length - recent_window, 0) // TOKENS * TOKENS
    if STARTS:
        packed_length = tl.maximum(packed_length, tl.load(window_start + sequence, mask=real, other=0))
    sink_page = tl.load(sink_pages + sequence * stride_sink, mask=real, other=-1)
    sink = real & (position < tl.minimum(length, sink_tokens)) & (sink_page >= 0)
    packed = real & ~sink & (position < packed_length)
    recent = real & ~sink & ~packed

    table = window_table + sequence.to(tl.int64) * stride_window_table
    kept = tl.load(table + position // window_tokens % window_table_width, mask=recent, other=0)
    kept = tl.where(sink, sink_page, kept)
    bf16_row = window + kept.to(tl.int64) * stride_window_page + (position % window_tokens) * stride_window_row
    number = tl.load(
        block_table + sequence.to(tl.int64) * stride_table + position // TOKENS, mask=packed, other=0
    )
    page = pages + number.to(tl.int64) * stride_page
    target = out + row.to(tl.int64) * stride_out
    offset = position % TOKENS
    plain = (real & ~packed)[:, None]
    if part < GROUPS:
        channel = part * GROUP + tl.arange(0, GROUP)
        bf16 = tl.load(bf16_row[:, None] + channel[None, :], mask=plain, other=0.0)
        x = _packed_group(
            page,
            offset,
            packed,
            part * (GROUP * BITS // 8),
            RANK * BITS // 8,
            SCALES_AT + part * TOKENS * 2,
            ZEROS_AT + part * TOKENS,
            BLOCK,
            GROUP,
            BITS,
            GROUP,
            TOKENS,
        )
        x = tl.where(plain, bf16, x.to(tl.bfloat16))
        tl.store(target[:, None] + channel[None, :], x, mask=real[:, None])
    else:
        rope_channel = tl.arange(0, ROPE)
        bf16_rope = tl.load(bf16_row[:, None] + RANK + rope_channel[None, :], mask=plain, other=0.0)
        y = _packed_group(
            page,
            offset,
            packed,
            ROPE_AT,
            ROPE * ROPE_BITS // 8,
            SCALES_AT + GROUPS * TOKENS * 2,
            ZEROS_AT + GROUPS * TOKENS,
            BLOCK,
            ROPE,
            ROPE_BITS,
            ROPE // BANDS,
            TOKENS,
        )
        means = (page + MEAN_AT).to(tl.pointer_type(tl.float16))
        mean = tl.load(means[:, None] + rope_channel[None, :], mask=packed[:, None], other=0.0)
        y = tl.where(plain, bf16_rope, (y + mean.to(tl.float32)).to(tl.bfloat16))
        tl.store(target[:, None] + RANK + rope_channel[None, :], y, mask=real[:, None])
