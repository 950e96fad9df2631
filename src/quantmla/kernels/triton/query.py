"""Queries as the packed path wants them: float16 planes, each row times a power of two."""

import triton
import triton.language as tl

Q_EXPONENT = tl.constexpr(12)  # the largest |q| of a row becomes about 2**12


@triton.jit
def row_offsets(b, row, heads, strides):
    """Elements from the start of a [B, S, N, channels] tensor to rows s * N + n of sequence b."""
    stride_b, stride_s, stride_n = strides
    return b.to(tl.int64) * stride_b + (row // heads) * stride_s + (row % heads) * stride_n


@triton.jit
def _load_planes(
    pointer, row_offset, row_mask, P: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr
):
    """P float32 tensors [WIDTH, rows]: channels P * j + i of each row; words past WORDS are 0."""
    word = tl.arange(0, WIDTH)
    mask = (word < WORDS)[:, None] & row_mask[None, :]
    planes = ()
    for i in tl.static_range(P):
        x = tl.load(pointer + row_offset[None, :] + (word * P + i)[:, None], mask=mask, other=0.0)
        planes = planes + (x.to(tl.float32),)
    return planes


@triton.jit
def _row_gain(content, rope, P: tl.constexpr, PR: tl.constexpr):
    """Power of two per row that takes its largest channel to about 2**Q_EXPONENT."""
    top = tl.max(tl.abs(content[0]), 0)
    for i in tl.static_range(1, P):
        top = tl.maximum(top, tl.max(tl.abs(content[i]), 0))
    for i in tl.static_range(PR):
        top = tl.maximum(top, tl.max(tl.abs(rope[i]), 0))
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 127 - 100), 127 + 100)
    return (((exponent - 254 - Q_EXPONENT) * -1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scaled_half(planes, gain, P: tl.constexpr):
    out = ()
    for i in tl.static_range(P):
        out = out + ((planes[i] * gain[None, :]).to(tl.float16),)
    return out


@triton.jit
def load_query_planes(latent, rope, latent_offset, rope_offset, row_mask, PAGE: tl.constexpr):
    """Content planes [words, rows], rope planes, and the gain that both were multiplied by."""
    content_planes = _load_planes(
        latent, latent_offset, row_mask, PAGE.PLANES, PAGE.WORDS, PAGE.WORDS
    )
    rope_planes = _load_planes(
        rope, rope_offset, row_mask, PAGE.ROPE_PLANES, PAGE.ROPE_WIDTH, PAGE.ROPE_WORDS
    )
    gain = _row_gain(content_planes, rope_planes, PAGE.PLANES, PAGE.ROPE_PLANES)
    half = _scaled_half(content_planes, gain, PAGE.PLANES)
    return half, _scaled_half(rope_planes, gain, PAGE.ROPE_PLANES), gain
