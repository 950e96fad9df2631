"""Attention over packed pages: the loop in which a decode spends its time.

Scores have tokens on the rows and query rows on the columns, so that the tensor core's large side
is filled by tokens however few heads there are. Operands are float16: a dequantised value keeps 11
bits, and so does a probability, which is scaled by 2**P_SHIFT so that small ones do not vanish.
"""

import triton
import triton.language as tl

from quantmla.kernels.triton.planes import centred_plane, offset_of, spread

P_SHIFT = tl.constexpr(14.0)
INF = tl.constexpr(float("inf"))


@triton.jit
def _scale_and_offset(page, place, PAGE: tl.constexpr):
    """One int32 for scale and -(1024 + zero point), both float16: they change layout together."""
    scale = tl.load(page.to(tl.pointer_type(tl.int16)) + PAGE.SCALES_AT // 2 + place)
    zero = tl.load(page + PAGE.ZEROS_AT + place)
    # 0xe400 is -1024.0, whose last bit is worth 1
    return (scale.to(tl.int32) & 0xFFFF) | ((zero.to(tl.int32) | 0xE400) << 16)


@triton.jit
def _low_half(x):
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _high_half(x):
    return (x >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _page_numbers(table, at, last, index, PAGE: tl.constexpr, STEP: tl.constexpr):
    """Of the pages at .. at + STEP - 1; past the last one, the last again."""
    if STEP == 1:
        return tl.load(table + tl.minimum(at, last - 1))
    else:
        return tl.load(table + tl.minimum(at + index // PAGE.TOKENS, last - 1))[:, None]


@triton.jit
def _prefetch(pool, number, stride_page, PAGE: tl.constexpr, STEP: tl.constexpr):
    """Asks for whole pages to come into L2, one 128-byte line per element."""
    line = tl.minimum(tl.arange(0, PAGE.LINES_WIDTH), PAGE.LINES - 1)
    if STEP > 1:
        line = line[None, :]
    address = pool + number.to(tl.int64) * stride_page + line * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def attend_pages(
    pages,
    table,
    first,
    last,
    num_sinks,
    q,
    q_rope,
    score_gain,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Online softmax over pages first..last-1 of one sequence, STEP pages at a time.

    `pages` is the pool and the stride between its pages. Returns the planes of the output, the
    maximum (base 2, P_SHIFT taken off) and the denominator of each row.
    """
    T: tl.constexpr = STEP * PAGE.TOKENS
    P: tl.constexpr = PAGE.PLANES
    PR: tl.constexpr = PAGE.ROPE_PLANES
    W: tl.constexpr = PAGE.WORDS
    G: tl.constexpr = PAGE.GROUPS
    pool, stride_page = pages
    index = tl.arange(0, T)
    token = (index % PAGE.TOKENS)[:, None]
    word, group = tl.arange(0, W)[None, :], tl.arange(0, G)[None, :]
    # words past the last one are the last one again, times q = 0
    rope_word = tl.minimum(tl.arange(0, PAGE.ROPE_WIDTH), PAGE.ROPE_WORDS - 1)[None, :]
    content_place = group * PAGE.TOKENS + token
    band = PAGE.GROUPS + rope_word * PAGE.BANDS // PAGE.ROPE_WORDS
    rope_place = band * PAGE.TOKENS + token

    top = tl.full([ROWS], -INF, tl.float32)
    total = tl.zeros([T, ROWS], tl.float32)  # summed over tokens once, at the end
    out = ()
    for _ in tl.static_range(P):
        out = out + (tl.zeros([W, ROWS], tl.float32),)

    step_page = tl.arange(0, STEP) * PAGE.TOKENS  # one element per page of a step
    number = _page_numbers(table, first, last, index, PAGE, STEP)
    following = _page_numbers(table, first + STEP, last, step_page, PAGE, STEP)
    for at in range(first, last, STEP):
        page = pool + number.to(tl.int64) * stride_page
        page16 = page.to(tl.pointer_type(tl.int16))
        page64 = page.to(tl.pointer_type(tl.int64))
        codes = tl.load(page16 + token * W + word)
        content_meta = _scale_and_offset(page, content_place, PAGE)
        rope_codes = tl.load(page16 + PAGE.ROPE_AT // 2 + token * PAGE.ROPE_WORDS + rope_word)
        rope_meta = _scale_and_offset(page, rope_place, PAGE)
        means = tl.load(page64 + PAGE.MEAN_AT // 8 + rope_word)  # four channels each
        if PREFETCH:
            _prefetch(pool, following, stride_page, PAGE, STEP)
            following = _page_numbers(table, at + 2 * STEP, last, step_page, PAGE, STEP)
        number = _page_numbers(table, at + STEP, last, index, PAGE, STEP)  # ahead of its use

        scores = tl.zeros([T, ROWS], tl.float32)
        scale, offset = _low_half(rope_meta), _high_half(rope_meta)
        for i in tl.static_range(PR):
            shifted = offset_of(offset, i, PAGE.ROPE_BITS, ASM)
            key = centred_plane(rope_codes, shifted, i, PAGE.ROPE_BITS, ASM) * scale
            mean = (means >> (16 * i)).to(tl.int16).to(tl.float16, bitcast=True)
            scores = tl.dot(key + mean, q_rope[i], scores)
        meta = spread(content_meta, T, G, W // G)
        wide_scale, wide_offset = _low_half(meta), _high_half(meta)
        for i in tl.static_range(P):
            shifted = offset_of(wide_offset, i, PAGE.BITS, ASM)
            content_key = centred_plane(codes, shifted, i, PAGE.BITS, ASM) * wide_scale
            scores = tl.dot(content_key, q[i], scores)

        position = at * PAGE.TOKENS + index
        hidden = position < num_sinks
        if STEP > 1:
            hidden = hidden | (position >= last * PAGE.TOKENS)
        scores = scores * score_gain[None, :] + tl.where(hidden, -INF, 0.0)[:, None]
        new_top = tl.maximum(top, tl.max(scores, 0))
        shrink = tl.exp2(top - new_top)[None, :]
        p = tl.exp2(scores - (new_top - P_SHIFT)[None, :])
        total = total * shrink + p
        top = new_top
        p = p.to(tl.float16)

        turned, turned_codes = tl.trans(meta), tl.trans(codes)
        wide_scale, wide_offset = _low_half(turned), _high_half(turned)
        new = ()
        for i in tl.static_range(P):
            shifted = offset_of(wide_offset, i, PAGE.BITS, ASM)
            value = centred_plane(turned_codes, shifted, i, PAGE.BITS, ASM) * wide_scale
            new = new + (tl.dot(value, p, out[i] * shrink),)
        out = new
    return out, top - P_SHIFT, tl.sum(total, 0)
