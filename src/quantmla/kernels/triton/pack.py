"""Quantising and packing a page's rows: quant/affine.py step by step, so that bytes agree.

float32 with IEEE division and rounding half to even, but for the content's codes. There a value
has 8 significant bits and a scale 11, so that a quotient below 2**8 either is half an integer or is
at least 2**-12 away from one: rounded to multiples of 2**-14 first, a product with an approximate
reciprocal rounds to the same integer. (|value - (k + 1/2) scale| is 0 or at least half the scale's
last place, 2**-12 of it.) Larger quotients, of scales at float16's limit, are beyond the codes.
"""

import triton
import triton.language as tl

MIN_SCALE = tl.constexpr(2.0**-24)
MAX_HALF = tl.constexpr(65504.0)
ROUNDER = tl.constexpr(
    12582912.0
)  # 1.5 * 2**23: adding it rounds a float32 to integer, half to even


GRID = tl.constexpr(768.0)  # 1.5 * 2**9: adding it rounds to multiples of 2**-14


@triton.jit
def _round(x):
    return (x + ROUNDER) - ROUNDER


@triton.jit
def _round_up_to_half(x):
    """x is positive, so the next float16 is the next bit pattern."""
    x = tl.minimum(tl.maximum(x, MIN_SCALE), MAX_HALF)
    nearest = x.to(tl.float16)
    above = (nearest.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    chosen = tl.where(nearest.to(tl.float32) < x, above.to(tl.float32), nearest.to(tl.float32))
    return tl.minimum(chosen, MAX_HALF)


@triton.jit
def _scale_and_zero(low, high, clip, BITS: tl.constexpr):
    """Scale and zero point of groups from their smallest and largest values, float32."""
    low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
    top_code = 2.0**BITS - 1.0
    exact = tl.div_rn((high - low) * clip, tl.full(low.shape, top_code, tl.float32))
    scale = _round_up_to_half(exact)
    zero = tl.minimum(tl.maximum(_round(tl.div_rn(low * clip * -1.0, scale)), 0.0), top_code)
    return scale, zero


@triton.jit
def _pack_words(x, scale, zero, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """int32 words [TOKENS, CHANNELS * BITS / 32] of x's codes, lowest bits first.

    x, scale and zero have one shape, whose last dimensions are TOKENS * CHANNELS values.
    """
    PER: tl.constexpr = 32 // BITS
    code = tl.minimum(tl.maximum(_round(tl.div_rn(x, scale)) + zero, 0.0), 2.0**BITS - 1.0)
    fields = tl.reshape(code.to(tl.int32), [TOKENS, CHANNELS // PER, PER])
    return tl.sum(fields << (tl.arange(0, PER) * BITS)[None, None, :], axis=2)


@triton.jit
def _pack_content(x, scale, zero, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """As `_pack_words`, of bf16 values x [TOKENS, CHANNELS] with scale and zero [TOKENS]."""
    PER: tl.constexpr = 32 // BITS
    least = ROUNDER - zero  # what code 0 is before the zero point is added
    inverse = tl.broadcast_to((1.0 / scale)[:, None], [TOKENS, CHANNELS])
    grid = tl.fma(x, inverse, tl.full([TOKENS, CHANNELS], GRID, tl.float32))
    code = grid + (ROUNDER - GRID)
    code = tl.minimum(tl.maximum(code, least[:, None]), (least + (2.0**BITS - 1.0))[:, None])
    fields = tl.reshape(code.to(tl.int32, bitcast=True), [TOKENS, CHANNELS // PER, PER])
    words = tl.sum(fields << (tl.arange(0, PER) * BITS)[None, None, :], axis=2)
    ones: tl.constexpr = 0x11111111 if BITS == 4 else 0x55555555  # each field's lowest bit
    return words - (least.to(tl.int32, bitcast=True) * ones)[:, None]


@triton.jit
def write_group(page, x, group, clip, PAGE: tl.constexpr):
    """One content group [TOKENS, GROUP] of a page: codes, scales and zero points."""
    WORDS: tl.constexpr = PAGE.GROUP * PAGE.BITS // 32
    token = tl.arange(0, PAGE.TOKENS)
    scale, zero = _scale_and_zero(tl.min(x, 1), tl.max(x, 1), clip, PAGE.BITS)
    words = _pack_content(x, scale, zero, PAGE.TOKENS, PAGE.GROUP, PAGE.BITS)
    row = page.to(tl.pointer_type(tl.int32)) + token * (PAGE.RANK * PAGE.BITS // 32)
    tl.store(row[:, None] + group * WORDS + tl.arange(0, WORDS)[None, :], words)
    place = group * PAGE.TOKENS + token
    tl.store((page + PAGE.SCALES_AT).to(tl.pointer_type(tl.float16)) + place, scale.to(tl.float16))
    tl.store(page + PAGE.ZEROS_AT + place, zero.to(tl.uint8))


@triton.jit
def _clear(page, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Padding between planes, less than 128 bytes, is 0."""
    if FIRST < LAST:
        at = FIRST + tl.arange(0, 128)
        tl.store(page + at, tl.zeros([128], tl.uint8), mask=at < LAST)


@triton.jit
def write_rope(page, x, clip, PAGE: tl.constexpr):
    """A page's rope keys [TOKENS, ROPE], centred by their mean, by band; and the padding."""
    TOKENS: tl.constexpr = PAGE.TOKENS
    BANDS: tl.constexpr = PAGE.BANDS
    BAND: tl.constexpr = PAGE.BAND
    WORDS: tl.constexpr = PAGE.ROPE * PAGE.ROPE_BITS // 32
    halves = page.to(tl.pointer_type(tl.float16))
    # exact in float64 for bf16 rows, whatever the order of summation
    mean = tl.sum(x.to(tl.float64), 0) * (1.0 / PAGE.TOKENS)
    mean = tl.minimum(tl.maximum(mean, -MAX_HALF), MAX_HALF).to(tl.float32).to(tl.float16)
    tl.store(halves + PAGE.MEAN_AT // 2 + tl.arange(0, PAGE.ROPE), mean)
    banded = tl.reshape(x - mean.to(tl.float32)[None, :], [TOKENS, BANDS, BAND])
    scale, zero = _scale_and_zero(tl.min(banded, 2), tl.max(banded, 2), clip, PAGE.ROPE_BITS)
    wide_scale = tl.broadcast_to(scale[:, :, None], [TOKENS, BANDS, BAND])
    wide_zero = tl.broadcast_to(zero[:, :, None], [TOKENS, BANDS, BAND])
    words = _pack_words(banded, wide_scale, wide_zero, PAGE.TOKENS, PAGE.ROPE, PAGE.ROPE_BITS)
    token = tl.arange(0, PAGE.TOKENS)[:, None]
    target = (page + PAGE.ROPE_AT).to(tl.pointer_type(tl.int32)) + token * WORDS
    tl.store(target + tl.arange(0, WORDS)[None, :], words)
    place = (PAGE.GROUPS + tl.arange(0, PAGE.BANDS))[None, :] * PAGE.TOKENS + token
    tl.store(halves + PAGE.SCALES_AT // 2 + place, scale.to(tl.float16))
    tl.store(page + PAGE.ZEROS_AT + place, zero.to(tl.uint8))
    _clear(page, PAGE.ZEROS_END, PAGE.MEAN_AT)
    _clear(page, PAGE.MEAN_END, PAGE.BYTES)
