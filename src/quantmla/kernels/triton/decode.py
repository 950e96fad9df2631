"""Split-KV decode: packed splits, window splits, and their combination.

Program (b, k, r) computes one split k of sequence b for a block r of query rows; a row is a query
token and a head, S * N rows. Scores have tokens on the rows and query rows on the columns, so that
the tensor core's large side is filled by tokens however few heads there are.

The packed path multiplies in float16: dequantised values keep 11 bits, and so do probabilities,
which are scaled by 2**P_SHIFT so that small ones do not vanish. Queries are scaled by a power of two
per row to use float16's range. The window path multiplies bf16 as it is.
"""

import triton
import triton.language as tl

from quantmla.kernels.triton.planes import centred_plane, offset_of, spread

LN2 = tl.constexpr(0.6931471805599453)
P_SHIFT = tl.constexpr(14.0)
Q_EXPONENT = tl.constexpr(12)  # the largest |q| of a row becomes about 2**12
INF = tl.constexpr(float("inf"))


@triton.jit
def _packed_length(lengths, window_start, b, recent_window, TOKENS: tl.constexpr, STARTS: tl.constexpr):
    """Tokens before this one are read packed; see CacheView.packed_length_B."""
    old = tl.maximum(tl.load(lengths + b) - recent_window, 0)
    packed = old // TOKENS * TOKENS
    if STARTS:
        packed = tl.maximum(packed, tl.load(window_start + b))
    return packed


@triton.jit
def _query_offsets(b, row, heads, stride_b, stride_s, stride_n):
    return b.to(tl.int64) * stride_b + (row // heads) * stride_s + (row % heads) * stride_n


@triton.jit
def _load_planes(pointer, row_offset, row_mask, P: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr):
    """P float32 tensors [W, rows]: channels P * j + i of each query row; words past WORDS are 0."""
    word = tl.arange(0, W)
    mask = (word < WORDS)[:, None] & row_mask[None, :]
    planes = ()
    for i in tl.static_range(P):
        x = tl.load(pointer + row_offset[None, :] + (word * P + i)[:, None], mask=mask, other=0.0)
        planes = planes + (x.to(tl.float32),)
    return planes


@triton.jit
def _row_gain(content, rope, P: tl.constexpr, PR: tl.constexpr):
    """Power of two per query row that takes its largest channel to about 2**Q_EXPONENT."""
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
def _scale_and_offset(page, place, SCALES_AT: tl.constexpr, ZEROS_AT: tl.constexpr):
    """One int32 for scale and -(1024 + zero point), both float16: they change layout together."""
    scale = tl.load(page.to(tl.pointer_type(tl.int16)) + SCALES_AT // 2 + place)
    zero = tl.load(page + ZEROS_AT + place)
    # 0xe400 is -1024.0, whose last bit is worth 1
    return (scale.to(tl.int32) & 0xFFFF) | ((zero.to(tl.int32) | 0xE400) << 16)


@triton.jit
def _low_half(x):
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _high_half(x):
    return (x >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _attend_pages(
    pages,
    stride_page,
    table,
    first,
    last,
    num_sinks,
    q,
    q_rope,
    score_gain,
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
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Online softmax over pages first..last-1 of one sequence, STEP pages at a time.

    Returns the planes of the output, the maximum (base 2) and the denominator of each row.
    """
    P: tl.constexpr = 16 // BITS
    PR: tl.constexpr = 16 // ROPE_BITS
    W: tl.constexpr = RANK // P
    WR: tl.constexpr = ROPE // PR
    WR16: tl.constexpr = 16 if WR < 16 else WR  # the tensor core's shortest inner dimension
    T: tl.constexpr = STEP * TOKENS
    index = tl.arange(0, T)
    token = (index % TOKENS)[:, None]
    word, group = tl.arange(0, W)[None, :], tl.arange(0, GROUPS)
    rope_word = tl.minimum(tl.arange(0, WR16), WR - 1)  # words past WR: the last one, times q = 0
    content_place = group[None, :] * TOKENS + token
    rope_place = (GROUPS + rope_word * BANDS // WR)[None, :] * TOKENS + token

    top = tl.full([ROWS], -INF, tl.float32)
    total = tl.zeros([T, ROWS], tl.float32)  # summed over tokens once, at the end
    out = ()
    for _ in tl.static_range(P):
        out = out + (tl.zeros([W, ROWS], tl.float32),)

    if STEP == 1:
        number = tl.load(table + first)
    else:
        number = tl.load(table + tl.minimum(first + index // TOKENS, last - 1))[:, None]
    for at in range(first, last, STEP):
        page = pages + number.to(tl.int64) * stride_page
        page16 = page.to(tl.pointer_type(tl.int16))
        codes = tl.load(page16 + token * W + word)
        content_meta = _scale_and_offset(page, content_place, SCALES_AT, ZEROS_AT)
        rope_codes = tl.load(page16 + ROPE_AT // 2 + token * WR + rope_word[None, :])
        rope_meta = _scale_and_offset(page, rope_place, SCALES_AT, ZEROS_AT)
        page64 = (page + MEAN_AT).to(tl.pointer_type(tl.int64))
        if STEP == 1:  # the next page's number is loaded before it is needed
            means = tl.load(page64 + rope_word)[None, :]
            number = tl.load(table + tl.minimum(at + 1, last - 1))
        else:
            means = tl.load(page64 + rope_word[None, :])
            number = tl.load(table + tl.minimum(at + STEP + index // TOKENS, last - 1))[:, None]

        scores = tl.zeros([T, ROWS], tl.float32)
        rope_scale, rope_offset = _low_half(rope_meta), _high_half(rope_meta)
        for i in tl.static_range(PR):
            centred = centred_plane(rope_codes, offset_of(rope_offset, i, ROPE_BITS, ASM), i, ROPE_BITS, ASM)
            mean = (means >> (16 * i)).to(tl.int16).to(tl.float16, bitcast=True)
            scores = tl.dot(centred * rope_scale + mean, q_rope[i], scores)
        meta = spread(content_meta, T, GROUPS, W // GROUPS)
        scale, offset = _low_half(meta), _high_half(meta)
        for i in tl.static_range(P):
            centred_key = centred_plane(codes, offset_of(offset, i, BITS, ASM), i, BITS, ASM)
            scores = tl.dot(centred_key * scale, q[i], scores)

        position = at * TOKENS + index
        if STEP == 1:
            hidden = position < num_sinks
        else:
            hidden = (position < num_sinks) | (position >= last * TOKENS)
        scores = scores * score_gain[None, :] + tl.where(hidden, -INF, 0.0)[:, None]
        new_top = tl.maximum(top, tl.max(scores, 0))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(scores - (new_top - P_SHIFT)[None, :])
        total = total * shrink[None, :] + p
        top = new_top
        p = p.to(tl.float16)

        turned, turned_codes = tl.trans(meta), tl.trans(codes)
        scale, offset = _low_half(turned), _high_half(turned)
        new = ()
        for i in tl.static_range(P):
            value = centred_plane(turned_codes, offset_of(offset, i, BITS, ASM), i, BITS, ASM) * scale
            new = new + (tl.dot(value, p, out[i] * shrink[None, :]),)
        out = new
    return out, top - P_SHIFT, tl.sum(total, 0)


@triton.jit
def _attend_window(
    window,
    stride_page,
    stride_row,
    table,
    table_width,
    page_tokens,
    sink_page,
    first,
    length,
    num_sinks,
    step,
    num_steps,
    q,
    q_rope,
    row_limit,
    score_gain,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Sinks, then tokens first..length-1, in tiles step, step + num_steps, ...: (output, max, sum)."""
    channel, rope_channel = tl.arange(0, RANK), tl.arange(0, ROPE)
    top = tl.full([ROWS], -INF, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([RANK, ROWS], tl.float32)
    count = num_sinks + tl.maximum(length - first, 0)
    for tile in range(step, tl.cdiv(count, TILE), num_steps):
        index = tile * TILE + tl.arange(0, TILE)
        real = index < count
        sink = index < num_sinks
        position = tl.where(sink, index, first + index - num_sinks)
        number = position // page_tokens % table_width
        page = tl.load(table + number, mask=real & (index >= num_sinks), other=0)
        page = tl.where(sink, sink_page, page)
        row = window + page.to(tl.int64) * stride_page + (position % page_tokens) * stride_row
        latent = tl.load(row[:, None] + channel[None, :], mask=real[:, None], other=0.0).to(DOT)
        k_rope = tl.load(row[:, None] + RANK + rope_channel[None, :], mask=real[:, None], other=0.0).to(DOT)
        scores = tl.dot(latent, q, tl.dot(k_rope, q_rope))
        seen = real[:, None] & (position[:, None] <= row_limit[None, :])
        scores = tl.where(seen, scores * score_gain, -INF)
        new_top = tl.maximum(top, tl.max(scores, 0))
        base = tl.where(new_top == -INF, 0.0, new_top)  # no token seen yet: avoid inf - inf
        shrink = tl.exp2(top - base)
        p = tl.exp2(scores - base[None, :])
        total = total * shrink + tl.sum(p, 0)
        top = new_top
        out = tl.dot(tl.trans(latent), p.to(DOT), out * shrink[None, :])
    return out, top, total


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
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
    DOT: tl.constexpr,
):
    """Writes out [B, K, S * N, RANK] (channels in plane order) and base-2 lse [B, K, S * N], float32.

    Splits 0..num_splits-1 share the packed pages, the rest the window. An empty split writes -inf
    as its lse and no output. `score_scale` is softmax_scale * log2(e).
    """
    P: tl.constexpr = 16 // BITS
    PR: tl.constexpr = 16 // ROPE_BITS
    W: tl.constexpr = RANK // P
    row_blocks = tl.cdiv(num_rows, ROWS)
    pid = tl.program_id(0)
    block = pid % row_blocks
    b = pid // row_blocks % batch
    split = pid // row_blocks // batch  # window splits, the short ones, come last
    row = block * ROWS + tl.arange(0, ROWS)
    row_mask = row < num_rows
    all_splits = num_splits + window_splits
    at = (b * all_splits + split).to(tl.int64) * num_rows + row

    length = tl.load(lengths + b)
    packed = _packed_length(lengths, window_start, b, recent_window, TOKENS, STARTS)
    sink_page = tl.load(sink_pages + b * stride_sink)
    num_sinks = tl.where(sink_page >= 0, tl.minimum(length, sink_tokens), 0)
    q_offset = _query_offsets(b, row, heads, stride_qb, stride_qs, stride_qn)
    r_offset = _query_offsets(b, row, heads, stride_rb, stride_rs, stride_rn)

    if split < num_splits:
        num_pages = packed // TOKENS
        share = tl.maximum(tl.cdiv(num_pages, num_splits), min_pages)
        first = split * share
        last = tl.minimum(first + share, num_pages)
        if first < last:
            WR: tl.constexpr = ROPE // PR
            WR16: tl.constexpr = 16 if WR < 16 else WR
            content = _load_planes(latent_q, q_offset, row_mask, P, W, W)
            rope = _load_planes(rope_q, r_offset, row_mask, PR, WR16, WR)
            gain = _row_gain(content, rope, P, PR)
            out, top, total = _attend_pages(
                pages,
                stride_page,
                block_table + b.to(tl.int64) * stride_table,
                first,
                last,
                num_sinks,
                _scaled_half(content, gain, P),
                _scaled_half(rope, gain, PR),
                1.0 / gain * score_scale,
                RANK,
                ROPE,
                BITS,
                ROPE_BITS,
                GROUPS,
                BANDS,
                TOKENS,
                ROPE_AT,
                SCALES_AT,
                ZEROS_AT,
                MEAN_AT,
                STEP,
                ROWS,
                ASM,
            )
            inverse = 1.0 / total
            target = partial_out + at[None, :] * RANK + tl.arange(0, W)[:, None]
            for i in tl.static_range(P):
                tl.store(target + i * W, out[i] * inverse[None, :], mask=row_mask[None, :])
            tl.store(partial_lse + at, top + tl.log2(total), mask=row_mask)
        else:
            tl.store(partial_lse + at, tl.full([ROWS], -INF, tl.float32), mask=row_mask)
    else:
        channel, rope_channel = tl.arange(0, RANK), tl.arange(0, ROPE)
        q = tl.load(latent_q + q_offset[None, :] + channel[:, None], mask=row_mask[None, :], other=0.0)
        q_rope = tl.load(rope_q + r_offset[None, :] + rope_channel[:, None], mask=row_mask[None, :], other=0.0)
        out_w, top, total = _attend_window(
            window,
            stride_window_page,
            stride_window_row,
            window_table + b.to(tl.int64) * stride_window_table,
            window_table_width,
            window_tokens,
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
            RANK,
            ROPE,
            WINDOW_TILE,
            ROWS,
            DOT,
        )
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        place = channel % P * W + channel // P
        target = partial_out + at[None, :] * RANK + place[:, None]
        tl.store(target, out_w * inverse[None, :], mask=row_mask[None, :])
        tl.store(partial_lse + at, tl.where(total > 0, top + tl.log2(total), -INF), mask=row_mask)


@triton.jit(do_not_specialize=["num_rows", "all_splits"])
def combine(
    partial_out,
    partial_lse,
    out,
    lse,
    num_rows,
    all_splits,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One row's splits into its output (natural channel order) and natural-log lse."""
    P: tl.constexpr = 16 // BITS
    W: tl.constexpr = RANK // P
    b = tl.program_id(0) // num_rows
    row = tl.program_id(0) % num_rows
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    place = channel % P * W + channel // P
    start = (b.to(tl.int64) * all_splits) * num_rows + row

    top = tl.full([SPLITS], -INF, tl.float32)
    for first in range(0, all_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        top = tl.maximum(
            top, tl.load(partial_lse + start + split * num_rows, mask=split < all_splits, other=-INF)
        )
    highest = tl.max(top, 0)
    base = tl.where(highest == -INF, 0.0, highest)
    total = 0.0
    sum_ = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, all_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        part = tl.load(partial_lse + start + split * num_rows, mask=split < all_splits, other=-INF)
        weight = tl.exp2(part - base)
        rows = partial_out + (start + split.to(tl.int64) * num_rows) * RANK
        x = tl.load(rows[:, None] + place[None, :], mask=(weight > 0)[:, None], other=0.0)
        total += tl.sum(weight, 0)
        sum_ += tl.sum(weight[:, None] * x, 0)
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    at = tl.program_id(0).to(tl.int64)
    tl.store(out + at * RANK + channel, (sum_ * inverse).to(out.dtype.element_ty))
    value = tl.where(total > 0, (base + tl.log2(total)) * LN2, -INF)
    tl.store(lse + at, value, mask=tl.program_id(1) == 0)
