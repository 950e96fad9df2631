"""Append: rows of tokens into the bf16 window, and whole pages into bytes.

One program handles a block of rows and one part of their channels: a content group, or (the last
program of the second axis) the whole rope key. Parts do not depend on one another, so a page is
packed by as many programs as it has groups, each reading its 64 rows once.

The arithmetic is that of quant/affine.py operation by operation, in float32 with IEEE division, so
that bytes are equal.
"""

import triton
import triton.language as tl

MIN_SCALE = tl.constexpr(2.0**-24)
MAX_SCALE = tl.constexpr(65504.0)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds a float32 to integer, half to even


@triton.jit
def _round(x):
    return (x + ROUNDER) - ROUNDER


@triton.jit
def _round_up_to_half(x):
    """quant.affine.round_up_to_half; x is positive, so the next float16 is the next bit pattern."""
    x = tl.minimum(tl.maximum(x, MIN_SCALE), MAX_SCALE)
    nearest = x.to(tl.float16)
    above = (nearest.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    chosen = tl.where(nearest.to(tl.float32) < x, above.to(tl.float32), nearest.to(tl.float32))
    return tl.minimum(chosen, MAX_SCALE)


@triton.jit
def _scale_and_zero(low, high, BITS: tl.constexpr):
    """Scale and zero point of groups from their smallest and largest values, float32."""
    low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
    top_code = 2.0**BITS - 1.0
    exact = tl.div_rn(high - low, tl.full(low.shape, top_code, tl.float32))
    scale = tl.maximum(exact + (_round_up_to_half(exact) - exact), MIN_SCALE)
    zero = tl.minimum(tl.maximum(_round(tl.div_rn(0.0 - low, scale)), 0.0), top_code)
    return scale, zero


@triton.jit
def _codes(x, scale, zero, BITS: tl.constexpr):
    """int32 codes; scale and zero have x's shape."""
    code = _round(tl.div_rn(x, scale)) + zero
    return tl.minimum(tl.maximum(code, 0.0), 2.0**BITS - 1.0).to(tl.int32)


@triton.jit
def _pack_words(codes, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """int32 words [TOKENS, CHANNELS * BITS / 32], lowest bits first."""
    PER: tl.constexpr = 32 // BITS
    fields = tl.reshape(codes, [TOKENS, CHANNELS // PER, PER])
    return tl.sum(fields << (tl.arange(0, PER) * BITS)[None, None, :], axis=2)


@triton.jit
def _window_rows(window, stride_page, stride_row, table, table_width, page_tokens, position, mask):
    """Pointer to each token's row in the window and the number of its page."""
    page = tl.load(table + position // page_tokens % table_width, mask=mask, other=-1)
    return window + page.to(tl.int64) * stride_page + (position % page_tokens) * stride_row, page


@triton.jit
def _page_input(
    rows,
    stride_rows,
    sequences,
    window,
    stride_window_page,
    stride_window_row,
    window_table,
    window_table_width,
    window_tokens,
    last_row,
    sequence,
    last_position,
    channel,
    window_at,
    TOKENS: tl.constexpr,
):
    """A complete page's rows [TOKENS, channels], float32: from this call, or else from the window."""
    back = TOKENS - 1 - tl.arange(0, TOKENS)
    row = last_row - back
    here = (row >= 0) & (tl.load(sequences + row, mask=row >= 0, other=-1) == sequence)
    new = tl.load(
        rows + row.to(tl.int64)[:, None] * stride_rows + channel[None, :], mask=here[:, None], other=0.0
    )
    kept, _ = _window_rows(
        window,
        stride_window_page,
        stride_window_row,
        window_table,
        window_table_width,
        window_tokens,
        last_position - back,
        ~here,
    )
    old = tl.load(kept[:, None] + (window_at + channel)[None, :], mask=~here[:, None], other=0.0)
    return tl.where(here[:, None], new.to(tl.float32), old.to(tl.float32))


@triton.jit
def _write_group(page, x, codes_at, row_bytes, scales_at, zeros_at, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """Quantises one content group of a page and writes its codes, scales and zero points."""
    token = tl.arange(0, TOKENS)
    scale, zero = _scale_and_zero(tl.min(x, 1), tl.max(x, 1), BITS)
    wide_scale = tl.broadcast_to(scale[:, None], [TOKENS, CHANNELS])
    codes = _codes(x, wide_scale, tl.broadcast_to(zero[:, None], [TOKENS, CHANNELS]), BITS)
    words = _pack_words(codes, TOKENS, CHANNELS, BITS)
    WORDS: tl.constexpr = CHANNELS * BITS // 32
    target = (page + codes_at).to(tl.pointer_type(tl.int32))
    tl.store(target + token[:, None] * (row_bytes // 4) + tl.arange(0, WORDS)[None, :], words)
    tl.store((page + scales_at).to(tl.pointer_type(tl.float16)) + token, scale.to(tl.float16))
    tl.store(page + zeros_at + token, zero.to(tl.uint8))


@triton.jit
def _clear(page, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Padding between planes, less than 128 bytes, is 0."""
    if FIRST < LAST:
        at = FIRST + tl.arange(0, 128)
        tl.store(page + at, tl.zeros([128], tl.uint8), mask=at < LAST)


@triton.jit
def _write_rope(
    page,
    x,
    ROPE: tl.constexpr,
    ROPE_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    BANDS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROPE_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ZEROS_AT: tl.constexpr,
    MEAN_AT: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
):
    """Centres a page's rope keys by their mean, quantises them by band, writes both."""
    # exact in float64 for bf16 rows, whatever the order of summation
    mean = (tl.sum(x.to(tl.float64), 0) * (1.0 / TOKENS)).to(tl.float32).to(tl.float16)
    tl.store((page + MEAN_AT).to(tl.pointer_type(tl.float16)) + tl.arange(0, ROPE), mean)
    x = x - mean.to(tl.float32)[None, :]
    BAND: tl.constexpr = ROPE // BANDS
    banded = tl.reshape(x, [TOKENS, BANDS, BAND])
    scale, zero = _scale_and_zero(tl.min(banded, 2), tl.max(banded, 2), ROPE_BITS)
    wide_scale = tl.broadcast_to(scale[:, :, None], [TOKENS, BANDS, BAND])
    wide_zero = tl.broadcast_to(zero[:, :, None], [TOKENS, BANDS, BAND])
    codes = tl.reshape(_codes(banded, wide_scale, wide_zero, ROPE_BITS), [TOKENS, ROPE])
    words = _pack_words(codes, TOKENS, ROPE, ROPE_BITS)
    WORDS: tl.constexpr = ROPE * ROPE_BITS // 32
    token, band = tl.arange(0, TOKENS), GROUPS + tl.arange(0, BANDS)
    target = (page + ROPE_AT).to(tl.pointer_type(tl.int32))
    tl.store(target + token[:, None] * WORDS + tl.arange(0, WORDS)[None, :], words)
    place = band[None, :] * TOKENS + token[:, None]
    tl.store((page + SCALES_AT).to(tl.pointer_type(tl.float16)) + place, scale.to(tl.float16))
    tl.store(page + ZEROS_AT + place, zero.to(tl.uint8))
    _clear(page, ZEROS_AT + (GROUPS + BANDS) * TOKENS, MEAN_AT)
    _clear(page, MEAN_AT + 2 * ROPE, PAGE_BYTES)


@triton.jit
def _copy_rows(
    rows,
    stride_rows,
    sequences,
    positions,
    window,
    window_table,
    sink_pages,
    num_rows,
    sink_tokens,
    window_tokens,
    window_table_width,
    stride_window_page,
    stride_window_row,
    stride_window_table,
    stride_sink,
    row,
    channel,
    window_at,
):
    """Rows into the window, and the first ones of a sequence into its sink page."""
    sequence = tl.load(sequences + row, mask=row < num_rows, other=-1)
    real = sequence >= 0
    position = tl.load(positions + row, mask=real, other=0)
    x = tl.load(
        rows + row.to(tl.int64)[:, None] * stride_rows + channel[None, :], mask=real[:, None], other=0.0
    )
    target, page = _window_rows(
        window,
        stride_window_page,
        stride_window_row,
        window_table + sequence.to(tl.int64) * stride_window_table,
        window_table_width,
        window_tokens,
        position,
        real,
    )
    tl.store(target[:, None] + (window_at + channel)[None, :], x, mask=(real & (page >= 0))[:, None])
    is_sink = real & (position < sink_tokens)
    sink_page = tl.load(sink_pages + sequence * stride_sink, mask=is_sink, other=-1)
    sink = window + sink_page.to(tl.int64) * stride_window_page + position * stride_window_row
    tl.store(
        sink[:, None] + (window_at + channel)[None, :], x, mask=(is_sink & (sink_page >= 0))[:, None]
    )


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "sink_tokens",
        "window_tokens",
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
    window_tokens,
    window_table_width,
    stride_latent,
    stride_rope,
    stride_page,
    stride_table,
    stride_window_page,
    stride_window_row,
    stride_window_table,
    stride_sink,
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
    """BLOCK rows, one part of their channels: to the window, then every page that ends among them."""
    GROUP: tl.constexpr = RANK // GROUPS
    first = tl.program_id(0) * BLOCK
    part = tl.program_id(1)
    row = first + tl.arange(0, BLOCK)
    if part < GROUPS:
        channel = part * GROUP + tl.arange(0, GROUP)
        _copy_rows(latent, stride_latent, sequences, positions, window, window_table, sink_pages, num_rows, sink_tokens, window_tokens, window_table_width, stride_window_page, stride_window_row, stride_window_table, stride_sink, row, channel, 0)
    else:
        _copy_rows(k_rope, stride_rope, sequences, positions, window, window_table, sink_pages, num_rows, sink_tokens, window_tokens, window_table_width, stride_window_page, stride_window_row, stride_window_table, stride_sink, row, tl.arange(0, ROPE), RANK)
    for last_row in range(first, tl.minimum(first + BLOCK, num_rows)):
        sequence = tl.load(sequences + last_row)
        position = tl.load(positions + last_row)
        number = -1
        if (sequence >= 0) & (position % TOKENS == TOKENS - 1):
            number = tl.load(block_table + sequence.to(tl.int64) * stride_table + position // TOKENS)
        if number >= 0:
            page = pages + number.to(tl.int64) * stride_page
            table = window_table + sequence.to(tl.int64) * stride_window_table
            if part < GROUPS:
                group_channel = part * GROUP + tl.arange(0, GROUP)
                x = _page_input(latent, stride_latent, sequences, window, stride_window_page, stride_window_row, table, window_table_width, window_tokens, last_row, sequence, position, group_channel, 0, TOKENS)
                _write_group(page, x, part * (GROUP * BITS // 8), RANK * BITS // 8, SCALES_AT + part * TOKENS * 2, ZEROS_AT + part * TOKENS, TOKENS, GROUP, BITS)
            else:
                rope = _page_input(k_rope, stride_rope, sequences, window, stride_window_page, stride_window_row, table, window_table_width, window_tokens, last_row, sequence, position, tl.arange(0, ROPE), RANK, TOKENS)
                _write_rope(page, rope, ROPE, ROPE_BITS, GROUPS, BANDS, TOKENS, ROPE_AT, SCALES_AT, ZEROS_AT, MEAN_AT, PAGE_BYTES)
