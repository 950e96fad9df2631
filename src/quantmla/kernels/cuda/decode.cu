// Decode attention over packed pages (4-bit content and rope, page-centred) for Hopper.
//
// Tokens lie on the rows of the MMA and heads on its columns, so few heads waste nothing. A packed
// 16-bit word holds 4 channels of one token, one per nibble: ldmatrix of the packed page gives, after
// masking, the operand of 4 products K_i Q_i^T; ldmatrix.trans of the same bytes gives V_i^T. Nothing
// dequantised is ever written to memory.
//
// Scores: nibbles are masked in place and read as subnormal float16 numbers, n * 2^-24 (n * 2^-20 for
// the upper one, which the query makes good), exactly. A 64-channel group is one step of k per nibble
// plane, so its scale multiplies the fp32 result. Zero points are one more product: -scale * zero
// against the query's sums per group. So is the page's mean rope key.
// Values: 64 + n in float16 by one OR, then one FMA: scale * (64 + n) - scale * (64 + zero).
//
// The running maximum is raised only when a probability would pass 2^14, which one barrier finds out
// with the warps' probabilities; otherwise nothing is rescaled.
//
// Each warpgroup takes every WARPGROUPS-th page of a part, and keeps its own maximum, sum and output;
// they are merged at the part's end. Compile-time constants: HEADS (16 or 32, columns of a tile),
// WARPGROUPS, STAGES, TMA, and the page's offsets, which quant/layout.py decides.

#define LATENT 512
#define ROPE 64
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1
#endif
#define THREADS (WARPGROUPS * 128)
#define H2 (HEADS / 2)     // accumulators of a 64-row product, per thread
#define TILE (32 * HEADS)  // bytes of a B operand [16, HEADS]
#define HALF (64 * 128)    // bytes of 64 rows of 128 bytes

// Query tiles: content [8 groups][4 planes], rope [2 bands][2], rope as it is [4], sums per group.
#define ROPE_TILE 32
#define MEAN_TILE 36
#define SUMS_TILE 40
#define QUERY_TILES 41

// What a warp makes of a page's scales and zero points, for itself.
#define SCORE_SCALES 0        // float32 [10 groups][8 rows][row, row + 8], rows of 72 bytes
#define SCORE_ZEROS 720       // float16 [16 groups][16 tokens], rows of 48 bytes: -scale * zero
#define VALUE_SCALES 1488     // {scale, -scale (64 + zero)} [2 groups][4][8] token pairs, 320 and 80 bytes
#define PREPARED 2128

#define AT_QUERY (WARPGROUPS * STAGES * PAGE_BYTES)
#define AT_P (AT_QUERY + QUERY_TILES * TILE)
#define AT_PREPARED (AT_P + WARPGROUPS * 4 * TILE)
#define AT_BOUND (AT_PREPARED + WARPGROUPS * 4 * PREPARED)  // {query factor, maximum} [WARPGROUPS][HEADS]
#define AT_REDUCE (AT_BOUND + WARPGROUPS * HEADS * 8)       // float [WARPGROUPS][4 warps][HEADS]
#define AT_SUM (AT_REDUCE + WARPGROUPS * HEADS * 16)        // {maximum, sum} [WARPGROUPS][HEADS]
#define AT_ROWS (AT_SUM + WARPGROUPS * HEADS * 8)           // addresses of 64 bf16 rows [WARPGROUPS]
#define AT_TOKENS (AT_ROWS + WARPGROUPS * 512)              // their tokens
#define AT_LIMIT (AT_TOKENS + WARPGROUPS * 256)             // last token that a column sees [HEADS]
#define AT_FACTOR (AT_LIMIT + HEADS * 4)                    // [HEADS]
#define AT_BARRIER (AT_FACTOR + HEADS * 4)                  // [WARPGROUPS][STAGES]
#define AT_COUNT (AT_BARRIER + WARPGROUPS * STAGES * 8)     // warps that are done with a stage
#define AT_SCHEDULE (AT_COUNT + WARPGROUPS * STAGES * 8)
#define SHARED_BYTES (AT_SCHEDULE + WARPGROUPS * 32)

#define INFINITE as_float(0x7f800000u)
#define LOWEST -1e30f
#define MOST_HALF 0x7400u   // 2^14
#define RAISE_ABOVE 7.0f    // a new maximum makes the largest probability 2^7

struct Place {  // of a thread
  u32 lane, row, pair, warp, group;  // row = lane / 4, pair = lane % 4; warp of its warpgroup
  u32 prepared, bound, p_tile;
  u32 probability;  // descriptor
};

// Descriptor of a B operand: steps between 8 values of k, and between 8 columns, in 16 bytes.
#ifdef SWAP_STRIDES
#define STEPS (8u << 16)
#define OTHER_STEP HEADS
#else
#define STEPS ((u32)HEADS << 16)
#define OTHER_STEP 8
#endif
DEVICE u32 descriptor(u32 address) { return address >> 4 | STEPS; }
DEVICE u64 operand(u32 descriptor_low, u32 tile) { return join(descriptor_low + tile * (TILE / 16), OTHER_STEP); }
DEVICE u64 query_tile(u32 tile) { return operand(descriptor(SHARED_BASE + AT_QUERY), tile); }
// Byte of element (k, n) of a B operand.
DEVICE u32 element(u32 k, u32 n) { return (k / 8) * (HEADS * 16) + n * 16 + (k % 8) * 2; }

// ---------------------------------------------------------------- query

DEVICE float to_float(u32 bits16, int is_bf16) { return is_bf16 ? as_float(bits16 << 16) : half_low(bits16); }

DEVICE void read_eight(const u16* from, int is_bf16, float scale, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = to_float(from[i], is_bf16) * scale;
}

// Eight channels = words j, j + 1 of one group: 4 planes; returns the sum of the rounded values.
DEVICE float store_planes(u32 at, u32 j, u32 n, const float (&x)[8]) {
  float sum = 0;
#pragma unroll
  for (int plane = 0; plane < 4; plane++) {
    float down = plane & 1 ? 0.0625f : 1.0f, up = plane & 1 ? 16.0f : 1.0f;
    u32 two = pack_half2(x[plane] * down, x[4 + plane] * down);
    sts32(at + plane * TILE + element(j, n), two);
    sum += up * (half_low(two) + half_high(two));
  }
  return sum;
}

// One warp brings one row of the query to shared memory: float16 with its own power of two.
DEVICE void store_query_row(const Arguments& p, const Place& at, int b, u32 n, int row) {
  float low[8] = {}, high[8] = {}, rope[2] = {};
  u32 lane = at.lane;
  bool real = row < p.query_len * p.heads;
  if (real) {
    int query = row / p.heads, head = row % p.heads;
    const u16* latent = p.q_latent + b * p.latent_stride[0] + query * p.latent_stride[1] + head * p.latent_stride[2];
    const u16* rotary = p.q_rope + b * p.rope_stride[0] + query * p.rope_stride[1] + head * p.rope_stride[2];
    read_eight(latent + 8 * lane, p.is_bf16, p.scale_log2, low);
    read_eight(latent + 256 + 8 * lane, p.is_bf16, p.scale_log2, high);
    rope[0] = to_float(rotary[2 * lane], p.is_bf16) * p.scale_log2;
    rope[1] = to_float(rotary[2 * lane + 1], p.is_bf16) * p.scale_log2;
  }
  float most = fmaxf(fabsf(rope[0]), fabsf(rope[1]));
  for (int i = 0; i < 8; i++) most = fmaxf(most, fmaxf(fabsf(low[i]), fabsf(high[i])));
  for (int mask = 16; mask; mask >>= 1) most = fmaxf(most, shuffle_xor(most, mask));
  // largest magnitude in [2^8, 2^9): a sum of 64 fits float16
  int exponent = most > 0 ? min(max((int)(as_bits(most) >> 23) - 127, -100), 100) : 8;
  float up = as_float((u32)(127 + 8 - exponent) << 23), down = as_float((u32)(127 - 8 + exponent) << 23);
  for (int i = 0; i < 8; i++) low[i] *= up, high[i] *= up;
  rope[0] *= up, rope[1] *= up;

  u32 query = SHARED_BASE + AT_QUERY, group = lane / 8, j = (lane % 8) * 2;
  float sum_low = store_planes(query + group * 4 * TILE, j, n, low);
  float sum_high = store_planes(query + (4 + group) * 4 * TILE, j, n, high);

  u32 as_is = pack_half2(rope[0], rope[1]);
  sts32(query + (MEAN_TILE + lane / 8) * TILE + element(2 * lane % 16, n), as_is);
  // channel 4 word + plane; a k step is plane 2i of 8 words, then plane 2i + 1 of the same
  u32 word = lane / 2, pair = query + (ROPE_TILE + word / 8 * 2 + lane % 2) * TILE;
  u32 odd = pack_half2(rope[1] * 0.0625f, 0);
  sts16(pair + element(word % 8, n), as_is);
  sts16(pair + element(8 + word % 8, n), odd);
  float sum_rope = half_low(as_is) + 16.0f * half_low(odd);

  for (int mask = 1; mask < 8; mask <<= 1) {
    sum_low += shuffle_xor(sum_low, mask), sum_high += shuffle_xor(sum_high, mask);
    sum_rope += shuffle_xor(sum_rope, mask);
  }
  sum_rope += shuffle_xor(sum_rope, 8);
  u32 sums = query + SUMS_TILE * TILE;
  if (lane % 8 == 0) {
    sts16(sums + element(group, n), pack_half2(sum_low, 0));
    sts16(sums + element(4 + group, n), pack_half2(sum_high, 0));
  }
  if (lane % 16 == 0) sts16(sums + element(8 + lane / 16, n), pack_half2(sum_rope, 0));
  if (lane == 0) {
    sts_float(SHARED_BASE + AT_FACTOR + n * 4, down);
    int length = p.lengths[(i64)b * p.lengths_stride];
    sts32(SHARED_BASE + AT_LIMIT + n * 4, length - p.query_len + (real ? row / p.heads : p.query_len));
  }
}

// ---------------------------------------------------------------- pages

DEVICE void load_page(const Arguments& p, const TensorMap* map, const Place& at, u32 slot, int number) {
  u32 to = SHARED_BASE + (at.group * STAGES + slot) * PAGE_BYTES;
  u32 bar = SHARED_BASE + AT_BARRIER + (at.group * STAGES + slot) * 8;
  const u8* page = p.pages + number * p.page_stride;
#if TMA
  if (at.lane == 0) {
    barrier_expect(bar, PAGE_BYTES);
    copy_tile(to, map, number, bar);
    copy_bulk(to + AT_ROPE, page + AT_ROPE, PAGE_BYTES - AT_ROPE, bar);
  }
#else
#pragma unroll 8
  for (u32 i = at.lane; i < AT_ROPE / 16; i += 32) {
    u32 token = i / 16, chunk = i % 16;
    copy_16(to + chunk / 8 * HALF + token * 128 + ((chunk ^ token) % 8) * 16, page + i * 16);
  }
#pragma unroll 8
  for (u32 i = AT_ROPE + at.lane * 16; i < PAGE_BYTES; i += 512) copy_16(to + i, page + i);
  copies_arrive(bar);
#endif
}

// Scales and zero points in the forms and places in which this warp's threads will want them.
DEVICE void prepare(const Place& at, u32 stage) {
  if (at.lane < 20) {  // scores: 10 groups x 2 halves of the warp's 16 tokens
    u32 group = at.lane / 2, half = at.lane % 2, token = at.warp * 16 + half * 8;
    V4 s = lds128(stage + AT_SCALES + group * 128 + token * 2);
    V2 z = lds64(stage + AT_ZEROS + group * 64 + token);
    u32 scale[4] = {s.x, s.y, s.z, s.w}, minus[4];
    u32 to = at.prepared + SCORE_SCALES + group * 72 + half * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sts_float(to + (2 * i) * 8, half_low(scale[i]) * 16777216.0f);
      sts_float(to + (2 * i + 1) * 8, half_high(scale[i]) * 16777216.0f);
      u32 zero = permute(i < 2 ? z.x : z.y, 0x64646464, i % 2 ? 0x4342 : 0x4140);  // 1024 + zero
      minus[i] = hmul2(scale[i], hsub2(0x64006400, zero));
    }
    sts128(at.prepared + SCORE_ZEROS + group * 48 + half * 16, V4{minus[0], minus[1], minus[2], minus[3]});
  }
  u32 half = at.lane / 16, four = at.lane % 16, group = at.warp + 4 * half;
  V2 s = lds64(stage + AT_SCALES + group * 128 + four * 8);
  u32 z = lds32(stage + AT_ZEROS + group * 64 + four * 4);
  u32 to = at.prepared + VALUE_SCALES + half * 320 + four % 2 * 160 + four / 2 * 8;
  // 960 - (1024 + zero)
  sts64(to, V2{s.x, hmul2(s.x, hsub2(0x63806380, permute(z, 0x64646464, 0x4140)))});
  sts64(to + 80, V2{s.y, hmul2(s.y, hsub2(0x63806380, permute(z, 0x64646464, 0x4342)))});
}

DEVICE void mask_nibbles(u32 x, u32& n0, u32& n1, u32& n2, u32& n3) {
  u32 y = x >> 8;
  n0 = x & 0x000f000f, n1 = x & 0x00f000f0, n2 = y & 0x000f000f, n3 = y & 0x00f000f0;
}

DEVICE void score_group(const Place& at, V4 x, u32 group, float (&acc)[H2]) {
  u32 a[4][4];
  mask_nibbles(x.x, a[0][0], a[1][0], a[2][0], a[3][0]);
  mask_nibbles(x.y, a[0][1], a[1][1], a[2][1], a[3][1]);
  mask_nibbles(x.z, a[0][2], a[1][2], a[2][2], a[3][2]);
  mask_nibbles(x.w, a[0][3], a[1][3], a[2][3], a[3][3]);
  mma_fence(a);
  mma<0>(acc, a[0], query_tile(group * 4));
  mma<1>(acc, a[1], query_tile(group * 4 + 1));
  mma<1>(acc, a[2], query_tile(group * 4 + 2));
  mma<1>(acc, a[3], query_tile(group * 4 + 3));
  mma_commit();
}

DEVICE void score_band(const Place& at, u32 x, u32 y, u32 band, float (&acc)[H2]) {
  u32 a[2][4];  // plane 2i of both rows, then plane 2i + 1
  mask_nibbles(x, a[0][0], a[0][2], a[1][0], a[1][2]);
  mask_nibbles(y, a[0][1], a[0][3], a[1][1], a[1][3]);
  mma_fence(a);
  mma<0>(acc, a[0], query_tile(ROPE_TILE + band * 2));
  mma<1>(acc, a[1], query_tile(ROPE_TILE + band * 2 + 1));
  mma_commit();
}

// Zero points of all groups, and the page's mean rope key, which is the same in every row.
DEVICE void score_offsets(const Place& at, u32 stage, float (&s)[H2]) {
  u32 lane = at.lane;
  V4 z = ldmatrix_transposed(at.prepared + SCORE_ZEROS + (lane % 8 + lane / 16 * 8) * 48 + lane / 8 % 2 * 16);
  u32 zero[1][4] = {{z.x, z.y, z.z, z.w}}, mean[4][4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    mean[k][0] = mean[k][1] = lds32(stage + AT_MEAN + k * 32 + at.pair * 4);
    mean[k][2] = mean[k][3] = lds32(stage + AT_MEAN + k * 32 + at.pair * 4 + 16);
  }
  mma_fence(zero), mma_fence(mean);
  mma<0>(s, zero[0], query_tile(SUMS_TILE));
#pragma unroll
  for (int k = 0; k < 4; k++) mma<1>(s, mean[k], query_tile(MEAN_TILE + k));
  mma_commit();
}

DEVICE void fold(const Place& at, u32 group, const float (&acc)[H2], float (&s)[H2]) {
  V2 scale = lds64(at.prepared + SCORE_SCALES + group * 72 + at.row * 8);
  float upper = as_float(scale.x), lower = as_float(scale.y);
#pragma unroll
  for (int i = 0; i < H2; i += 4) {
    s[i] += upper * acc[i], s[i + 1] += upper * acc[i + 1];
    s[i + 2] += lower * acc[i + 2], s[i + 3] += lower * acc[i + 3];
  }
}

// Scores of a packed page, in units of the scaled query: tokens 16 warp + row and + 8 of this thread.
DEVICE void score_page(const Place& at, u32 stage, float (&s)[H2]) {
  float acc[2][H2];
  u32 lane = at.lane, token = at.warp * 16 + lane % 16;
  u32 rows = stage + token * 128 + ((lane / 16) ^ (lane % 8)) * 16;
  prepare(at, stage);
  sync_warp();
  score_offsets(at, stage, s);
  V4 first = ldmatrix(rows), next = ldmatrix(rows ^ 32);
  mma_wait<0>();
  settle(s);
  score_group(at, first, 0, acc[0]);
#pragma unroll
  for (u32 g = 1; g < 8; g++) {
    V4 x = next;
    next = g < 7 ? ldmatrix((rows ^ ((g + 1) % 4 * 32)) + (g + 1) / 4 * HALF)
                 : ldmatrix(stage + AT_ROPE + token * 32 + lane / 16 * 16);
    score_group(at, x, g, acc[g % 2]);
    mma_wait<1>();
    settle(acc[(g - 1) % 2]);
    if (g == 1) settle(s);
    fold(at, g - 1, acc[(g - 1) % 2], s);
  }
  score_band(at, next.x, next.y, 0, acc[0]);
  mma_wait<1>();
  settle(acc[1]);
  fold(at, 7, acc[1], s);
  score_band(at, next.z, next.w, 1, acc[1]);
  mma_wait<1>();
  settle(acc[0]);
  fold(at, 8, acc[0], s);
  mma_wait<0>();
  settle(acc[1]);
  fold(at, 9, acc[1], s);
}

DEVICE void scale_nibbles(u32 x, u32 scale, u32 offset, u32& v0, u32& v1, u32& v2, u32& v3) {
  v0 = hfma2(and_or(x << 4, 0x00f000f0, 0x54005400), scale, offset);
  v1 = hfma2(and_or(x, 0x00f000f0, 0x54005400), scale, offset);
  v2 = hfma2(and_or(x >> 4, 0x00f000f0, 0x54005400), scale, offset);
  v3 = hfma2(and_or(x >> 8, 0x00f000f0, 0x54005400), scale, offset);
}

DEVICE void add_values(const Place& at, float (&o)[4][H2], u32 (&v)[4][4], u32 k) {
  u64 p = operand(at.probability, k);
  mma_fence(v);
#pragma unroll
  for (int plane = 0; plane < 4; plane++) mma<1>(o[plane], v[plane], p);
  mma_commit();
}

DEVICE void settle_output(float (&o)[2][4][H2]) {
#pragma unroll
  for (int i = 0; i < 8; i++) settle(o[i / 4][i % 4]);
}

// O[channel 4 word + plane][head] += V^T P; rows are words 64 half + 16 warp + row and + 8.
DEVICE void value_page(const Place& at, u32 stage, float (&o)[2][4][H2]) {
  u32 lane = at.lane;
  u32 rows = stage + (lane % 8 + lane / 16 * 8) * 128 + ((2 * at.warp + lane / 8 % 2) ^ (lane % 8)) * 16;
  u32 scales = at.prepared + VALUE_SCALES + at.pair * 80;
  V4 next = ldmatrix_transposed(rows), next_scale = lds128(scales);
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    V4 x = next, s = next_scale;
    if (i < 7) {
      next = ldmatrix_transposed(rows + (i + 1) % 2 * HALF + (i + 1) / 2 * 2048);
      next_scale = lds128(scales + (i + 1) % 2 * 320 + (i + 1) / 2 * 16);
    }
    u32 v[4][4];
    scale_nibbles(x.x, s.x, s.y, v[0][0], v[1][0], v[2][0], v[3][0]);
    scale_nibbles(x.y, s.x, s.y, v[0][1], v[1][1], v[2][1], v[3][1]);
    scale_nibbles(x.z, s.z, s.w, v[0][2], v[1][2], v[2][2], v[3][2]);
    scale_nibbles(x.w, s.z, s.w, v[0][3], v[1][3], v[2][3], v[3][3]);
    add_values(at, o[i % 2], v, i / 2);
    if (i < 7) mma_wait<1>();
  }
  mma_wait<0>();
  settle_output(o);
}

// ---------------------------------------------------------------- bf16 rows

DEVICE u32 halves(u32 low, u32 high) {  // two bf16 in the upper 16 bits to float16
  return pack_half2(as_float(low & 0xffff0000), as_float(high & 0xffff0000));
}

DEVICE V4 global_16(u64 row, u32 channel) {
  return row ? *(const V4*)(row + channel * 2) : V4{0, 0, 0, 0};
}

// Addresses of rows 64 block ... of the sequence's bf16 tokens: the window's, then the sinks.
DEVICE void find_rows(const Arguments& p, const Place& at, int b, int block) {
  u32 i = thread_index() % 128;
  if (i < 64) {
    int length = p.lengths[(i64)b * p.lengths_stride], page = p.sink_pages[(i64)b * p.sink_stride];
    int sinks = page >= 0 ? min(p.num_sinks, length) : 0, start = max(packed_length(p, b), sinks);
    int k = block * 64 + i, token = k < length - start ? start + k : k - (length - start);
    u64 row = 0;
    bool real = k < length - start + sinks;
    if (real) {
      i64 within = token;
      if (token >= sinks) {
        page = p.window_table[b * p.window_table_stride + token / p.window_page_size % p.window_width];
        within = token % p.window_page_size;
      }
      row = (u64)(p.window + page * p.window_page_stride + within * p.window_row_stride);
    }
    sts64(SHARED_BASE + AT_ROWS + at.group * 512 + i * 8, V2{(u32)row, (u32)(row >> 32)});
    sts32(SHARED_BASE + AT_TOKENS + at.group * 256 + i * 4, real ? token : 0x7fffffff);
  }
  sync_named(1 + at.group, 128);
}

DEVICE u64 row_address(const Place& at, u32 i) {
  V2 a = lds64(SHARED_BASE + AT_ROWS + at.group * 512 + i * 8);
  return (u64)a.y << 32 | a.x;
}

DEVICE void score_rows(const Place& at, float (&s)[H2]) {
  float odd[H2];
  u64 upper = row_address(at, at.warp * 16 + at.row), lower = row_address(at, at.warp * 16 + at.row + 8);
#pragma unroll
  for (int i = 0; i < H2; i++) s[i] = odd[i] = 0;
#pragma unroll 1
  for (u32 g = 0; g < 8; g++) {
    // 8 channels: the words 2 pair and 2 pair + 1 of the upper and the lower 8 words of the group
    u32 channel = g * 64 + at.pair * 8;
    V4 x[4] = {global_16(upper, channel), global_16(lower, channel), global_16(upper, channel + 32),
               global_16(lower, channel + 32)};
    u32 a[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[0][i] = halves(x[i].x << 16, x[i].z << 16), a[1][i] = halves(x[i].x, x[i].z);
      a[2][i] = halves(x[i].y << 16, x[i].w << 16), a[3][i] = halves(x[i].y, x[i].w);
    }
    settle(s), settle(odd);
    mma_fence(a);
    mma<1>(s, a[0], query_tile(g * 4));
    mma<1>(odd, a[1], query_tile(g * 4 + 1));
    mma<1>(s, a[2], query_tile(g * 4 + 2));
    mma<1>(odd, a[3], query_tile(g * 4 + 3));
    mma_commit();
    mma_wait<0>();
    settle(s), settle(odd);
  }
#pragma unroll
  for (int i = 0; i < H2; i++) s[i] += 16.0f * odd[i];  // odd planes of the query carry 1/16
#pragma unroll 1
  for (u32 k = 0; k < 4; k++) {
    u32 channel = LATENT + k * 16 + at.pair * 2, a[1][4];
    u32 x[4] = {upper ? *(const u32*)(upper + channel * 2) : 0, lower ? *(const u32*)(lower + channel * 2) : 0,
                upper ? *(const u32*)(upper + channel * 2 + 16) : 0, lower ? *(const u32*)(lower + channel * 2 + 16) : 0};
#pragma unroll
    for (int i = 0; i < 4; i++) a[0][i] = halves(x[i] << 16, x[i]);
    settle(s);
    mma_fence(a);
    mma<1>(s, a[0], query_tile(MEAN_TILE + k));
    mma_commit();
    mma_wait<0>();
    settle(s);
  }
  u32 tokens = SHARED_BASE + AT_TOKENS + at.group * 256 + (at.warp * 16 + at.row) * 4;
  int first = lds32(tokens), second = lds32(tokens + 32);
#pragma unroll
  for (int i = 0; i < H2; i++) {
    int limit = lds32(SHARED_BASE + AT_LIMIT + (i / 4 * 8 + at.pair * 2 + i % 2) * 4);
    if ((i & 2 ? second : first) > limit) s[i] = -INFINITE;
  }
}

DEVICE void value_rows(const Place& at, float (&o)[2][4][H2]) {
#pragma unroll 1
  for (u32 k = 0; k < 4; k++) {
    u64 row[4];
#pragma unroll
    for (int i = 0; i < 4; i++) row[i] = row_address(at, k * 16 + at.pair * 2 + i / 2 * 8 + i % 2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 v[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {  // word + 8 (i % 2), tokens + 8 (i / 2)
        u32 bytes = (half * 64 + at.warp * 16 + at.row + i % 2 * 8) * 8;
        u64 r0 = row[i / 2 * 2], r1 = row[i / 2 * 2 + 1];
        V2 x = r0 ? *(const V2*)(r0 + bytes) : V2{0, 0}, y = r1 ? *(const V2*)(r1 + bytes) : V2{0, 0};
        v[0][i] = halves(x.x << 16, y.x << 16), v[1][i] = halves(x.x, y.x);
        v[2][i] = halves(x.y << 16, y.y << 16), v[3][i] = halves(x.y, y.y);
      }
      settle_output(o);
      add_values(at, o[half], v, k);
      mma_wait<0>();
      settle_output(o);
    }
  }
}

// ---------------------------------------------------------------- softmax

DEVICE V4 bound(const Place& at, int j) { return lds128(at.bound + (j * 8 + at.pair * 2) * 8); }

// Probabilities 2^(s * factor - maximum) of this thread's rows, to e, and as float16 to p.
DEVICE u32 probabilities(const Place& at, const float (&s)[H2], float (&e)[H2], u32 (&p)[H2 / 2]) {
  u32 most = 0;
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V4 b = bound(at, j);
    float f0 = as_float(b.x), m0 = as_float(b.y), f1 = as_float(b.z), m1 = as_float(b.w);
    e[4 * j] = exp2_fast(s[4 * j] * f0 - m0), e[4 * j + 1] = exp2_fast(s[4 * j + 1] * f1 - m1);
    e[4 * j + 2] = exp2_fast(s[4 * j + 2] * f0 - m0), e[4 * j + 3] = exp2_fast(s[4 * j + 3] * f1 - m1);
    p[2 * j] = pack_half2(e[4 * j], e[4 * j + 1]), p[2 * j + 1] = pack_half2(e[4 * j + 2], e[4 * j + 3]);
    most = hmax2(most, hmax2(p[2 * j], p[2 * j + 1]));
  }
  return max(most & 0xffff, most >> 16);
}

DEVICE void store_probabilities(const Place& at, const u32 (&p)[H2 / 2]) {
  // 8x8 blocks of the B operands [token][head]: rows of 8 tokens of one head
  u32 lane = at.lane;
  u32 to = at.p_tile + (2 * at.warp + lane / 8 % 2) * (HEADS * 16) + lane / 16 * 128 + lane % 8 * 16;
#pragma unroll
  for (int j = 0; j < HEADS / 16; j++)
    stmatrix_transposed(to + j * 256, V4{p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]});
  fence_async_proxy();
}

DEVICE float warp_rows_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 4)), x = fmaxf(x, shuffle_xor(x, 8));
  return fmaxf(x, shuffle_xor(x, 16));
}

// The rare case: raises the maximum, and scales what has been summed under the old one.
DEVICE void raise_bounds(const Place& at, const float (&s)[H2], float (&o)[2][4][H2], float (&l)[HEADS / 4]) {
  u32 reduce = SHARED_BASE + AT_REDUCE + at.group * HEADS * 16, bar = 1 + at.group;
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V4 b = bound(at, j);
    float x = warp_rows_max(fmaxf(s[4 * j], s[4 * j + 2]) * as_float(b.x));
    float y = warp_rows_max(fmaxf(s[4 * j + 1], s[4 * j + 3]) * as_float(b.z));
    u32 to = reduce + (at.warp * HEADS + j * 8 + at.pair * 2) * 4;
    if (at.lane < 4) sts_float(to, x), sts_float(to + 4, y);
  }
  sync_named(bar, 128);
  u32 n = thread_index() % 128;
  float old = 0, raised = 0;
  if (n < HEADS) {
    old = lds_float(at.bound + n * 8 + 4), raised = old;
    for (int w = 0; w < 4; w++) raised = fmaxf(raised, lds_float(reduce + (w * HEADS + n) * 4) - RAISE_ABOVE);
    sts_float(at.bound + n * 8 + 4, raised);
  }
  sync_named(bar, 128);
  if (n < HEADS) sts_float(reduce + n * 4, exp2_fast(old - raised));
  sync_named(bar, 128);
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    float f0 = lds_float(reduce + (j * 8 + at.pair * 2) * 4), f1 = lds_float(reduce + (j * 8 + at.pair * 2) * 4 + 4);
    l[2 * j] *= f0, l[2 * j + 1] *= f1;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float(&block)[H2] = o[i / 4][i % 4];
      block[4 * j] *= f0, block[4 * j + 1] *= f1, block[4 * j + 2] *= f0, block[4 * j + 3] *= f1;
    }
  }
}

DEVICE void softmax(const Place& at, const float (&s)[H2], float (&o)[2][4][H2], float (&l)[HEADS / 4]) {
  float e[H2];
  u32 p[H2 / 2];
  u32 most = probabilities(at, s, e, p);
  store_probabilities(at, p);
  if (uniform(any_named(1 + at.group, 128, most > MOST_HALF))) {
    raise_bounds(at, s, o, l);
    probabilities(at, s, e, p);
    store_probabilities(at, p);
    sync_named(1 + at.group, 128);
  }
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) l[2 * j] += e[4 * j] + e[4 * j + 2], l[2 * j + 1] += e[4 * j + 1] + e[4 * j + 3];
}

// ---------------------------------------------------------------- results

// Merges the warpgroups' sums; writes the part's normalised output, or the sequence's if it is whole.
struct Output {
  int sequence, tile;
  i64 slot;    // of part_out and part_lse
  bool whole;  // there is no other part: `out` and `lse` instead
};

DEVICE void finish(const Arguments& p, const Place& at, const Output& to, float (&o)[2][4][H2], float (&l)[HEADS / 4]) {
  u32 i = thread_index() % 128, reduce = SHARED_BASE + AT_REDUCE + at.group * HEADS * 16;
#pragma unroll
  for (int j = 0; j < HEADS / 4; j++) {
    float x = l[j];
    x += shuffle_xor(x, 4), x += shuffle_xor(x, 8), x += shuffle_xor(x, 16);
    if (at.lane < 4) sts_float(reduce + (at.warp * HEADS + j / 2 * 8 + at.pair * 2 + j % 2) * 4, x);
  }
  sync_named(1 + at.group, 128);
  if (i < HEADS) {
    float sum = 0;
    for (int w = 0; w < 4; w++) sum += lds_float(reduce + (w * HEADS + i) * 4);
    sts64(SHARED_BASE + AT_SUM + (at.group * HEADS + i) * 8, V2{lds32(at.bound + i * 8 + 4), as_bits(sum)});
  }
  sync_block();
  u32 scratch = SHARED_BASE + i * 4;
  int rows = p.query_len * p.heads;
#pragma unroll
  for (int j = 0; j < HEADS / 4; j++) {
    u32 n = j / 2 * 8 + at.pair * 2 + j % 2;
    float most = LOWEST, sum = 0;
    for (int g = 0; g < WARPGROUPS; g++) most = fmaxf(most, lds_float(SHARED_BASE + AT_SUM + (g * HEADS + n) * 8));
    for (int g = 0; g < WARPGROUPS; g++) {
      V2 x = lds64(SHARED_BASE + AT_SUM + (g * HEADS + n) * 8);
      sum += as_float(x.y) * exp2_fast(as_float(x.x) - most);
    }
    float own = lds_float(SHARED_BASE + AT_SUM + (at.group * HEADS + n) * 8);
    float factor = sum == 0 ? 0 : exp2_fast(own - most) / sum;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      float(&block)[H2] = o[k / 4][k % 4];
      block[j / 2 * 4 + j % 2] *= factor, block[j / 2 * 4 + j % 2 + 2] *= factor;
    }
    if (at.group == 0 && at.warp == 0 && at.lane < 4) {
      float lse = sum == 0 ? -INFINITE : most + log2_fast(sum);
      int row = to.tile * HEADS + n;
      if (!to.whole) p.part_lse[to.slot * HEADS + n] = lse;
      else if (row < rows) p.lse[(i64)to.sequence * rows + row] = lse * 0.6931471805599453f;
    }
  }
  if (at.group > 0) {
#pragma unroll
    for (int k = 0; k < 8 * H2; k++) sts_float(scratch + ((at.group - 1) * 8 * H2 + k) * 512, o[k / H2 / 4][k / H2 % 4][k % H2]);
    fence_async_proxy();  // the next pages land here
  }
  sync_block();
  if (at.group == 0) {
#pragma unroll
    for (int k = 0; k < 8 * H2; k++)
      for (int g = 0; g < WARPGROUPS - 1; g++) o[k / H2 / 4][k / H2 % 4][k % H2] += lds_float(scratch + (g * 8 * H2 + k) * 512);
#pragma unroll
    for (int k = 0; k < 2 * H2; k++) {
      int half = k / H2, at_k = k % H2, n = at_k / 4 * 8 + at.pair * 2 + at_k % 2, row = to.tile * HEADS + n;
      u32 channel = 4 * (half * 64 + at.warp * 16 + at.row + (at_k & 2 ? 8 : 0));
      float x0 = o[half][0][at_k], x1 = o[half][1][at_k], x2 = o[half][2][at_k], x3 = o[half][3][at_k];
      if (!to.whole) {
        *(V4*)(p.part_out + (to.slot * HEADS + n) * LATENT + channel) = V4{as_bits(x0), as_bits(x1), as_bits(x2), as_bits(x3)};
      } else if (row < rows) {
        V2 packed = p.is_bf16 ? V2{pack_bf162(x0, x1), pack_bf162(x2, x3)} : V2{pack_half2(x0, x1), pack_half2(x2, x3)};
        *(V2*)(p.out + ((i64)to.sequence * rows + row) * LATENT + channel) = packed;
      }
    }
  }
  sync_block();
}

// ---------------------------------------------------------------- kernels

DEVICE void start_item(const Arguments& p, const Place& at, int b, int tile) {
  for (u32 n = thread_index() / 32; n < HEADS; n += THREADS / 32) store_query_row(p, at, b, n, tile * HEADS + n);
  fence_async_proxy();
  sync_block();
  u32 n = thread_index() % 128;
  if (n < HEADS) sts64(at.bound + n * 8, V2{lds32(SHARED_BASE + AT_FACTOR + n * 4), as_bits(LOWEST)});
  sync_named(1 + at.group, 128);
}

DEVICE void start_block(const Place& at) {
  u32 t = thread_index();
  if (t < WARPGROUPS * STAGES) {
    barrier_init(SHARED_BASE + AT_BARRIER + t * 8, TMA ? 1 : 32);
    sts32(SHARED_BASE + AT_COUNT + t * 8, 0);
  }
  barrier_fence_init();
  // never written again: rows 10 to 15 of the zero points, and of the sums
  for (u32 i = at.lane; i < 6 * 12; i += 32) sts32(at.prepared + SCORE_ZEROS + 480 + i * 4, 0);
  for (u32 i = t; i < TILE / 4; i += THREADS) sts32(SHARED_BASE + AT_QUERY + SUMS_TILE * TILE + i * 4, 0);
  fence_async_proxy();
  sync_block();
}

DEVICE void clear(float (&o)[2][4][H2], float (&l)[HEADS / 4]) {
#pragma unroll
  for (int i = 0; i < 8 * H2; i++) o[i / H2 / 4][i / H2 % 4][i % H2] = 0;
#pragma unroll
  for (int i = 0; i < HEADS / 4; i++) l[i] = 0;
}

// One part of a sequence's pages; `turn` counts the pages that this warpgroup has read.
DEVICE void attend_pages(const Arguments& p, const TensorMap* map, const Place& at, const Item& item, int tile, u32& turn) {
  int b = item.sequence, all = num_pages(p, b);
  int last = (i64)all * (item.part + 1) / item.parts, page = (i64)all * item.part / item.parts + at.group;
  const int* table = p.block_table + b * p.block_table_stride;
  if (at.warp == 0)
    for (u32 i = 0; i < STAGES; i++)
      if (page + (int)i * WARPGROUPS < last) load_page(p, map, at, (turn + i) % STAGES, table[page + i * WARPGROUPS]);
  start_item(p, at, b, tile);

  float o[2][4][H2], s[H2], l[HEADS / 4];
  clear(o, l);
  int sinks = p.sink_pages[(i64)b * p.sink_stride] >= 0 ? p.num_sinks : 0;
  for (; page < last; page += WARPGROUPS, turn++) {
    u32 slot = turn % STAGES, stage = SHARED_BASE + (at.group * STAGES + slot) * PAGE_BYTES;
    int later = page + STAGES * WARPGROUPS, number = later < last ? table[later] : -1;
    barrier_wait(SHARED_BASE + AT_BARRIER + (at.group * STAGES + slot) * 8, turn / STAGES % 2);
    score_page(at, stage, s);
    if (page * PAGE_SIZE < sinks) {  // these are read in bf16
      int token = page * PAGE_SIZE + at.warp * 16 + at.row;
#pragma unroll
      for (int i = 0; i < H2; i++)
        if (token + (i & 2 ? 8 : 0) < sinks) s[i] = -INFINITE;
    }
    softmax(at, s, o, l);
    value_page(at, stage, o);
    sync_warp();
    u32 others = at.lane == 0 ? count_arrival(SHARED_BASE + AT_COUNT + (at.group * STAGES + slot) * 8, 3) : 0;
    if (later < last && uniform(others) == 3) load_page(p, map, at, slot, number);
  }
  finish(p, at, Output{b, tile, (i64)(item.first + item.part) * p.tiles + tile, false}, o, l);
}

// The part of a sequence that is in bf16: the window, and the sinks.
DEVICE void attend_window(const Arguments& p, const Place& at, int b, int tile, int all_parts, int own_parts) {
  int length = p.lengths[(i64)b * p.lengths_stride];
  if (length <= 0) return;
  int sinks = p.sink_pages[(i64)b * p.sink_stride] >= 0 ? min(p.num_sinks, length) : 0;
  int rows = length - max(packed_length(p, b), sinks) + sinks;
  start_item(p, at, b, tile);
  float o[2][4][H2], s[H2], l[HEADS / 4];
  clear(o, l);
  for (int block = at.group; block * 64 < rows; block += WARPGROUPS) {
    find_rows(p, at, b, block);
    score_rows(at, s);
    softmax(at, s, o, l);
    value_rows(at, o);
  }
  finish(p, at, Output{b, tile, (i64)(all_parts + b) * p.tiles + tile, own_parts == 0}, o, l);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    decode(const __grid_constant__ Arguments p, const __grid_constant__ TensorMap map) {
  u32 lane = thread_index() % 32, warp = uniform(thread_index() / 32);
  Place at;
  at.lane = lane, at.row = lane / 4, at.pair = lane % 4, at.warp = warp % 4, at.group = warp / 4;
  at.prepared = SHARED_BASE + AT_PREPARED + warp * PREPARED;
  at.bound = SHARED_BASE + AT_BOUND + at.group * HEADS * 8;
  at.p_tile = SHARED_BASE + AT_P + at.group * 4 * TILE;
  at.probability = descriptor(at.p_tile);
  check_shared_base();
  start_block(at);
  wait_for_previous_kernel();

  int blocks = block_count(), chunk = choose_chunk(p, SHARED_BASE + AT_SCHEDULE, THREADS / 32);
  int all_parts = total_parts(p, chunk), items = all_parts * p.tiles, windows = p.batch * p.tiles;
  if (block_index() == 0 && thread_index() == 0) p.part_of[2 * p.batch] = all_parts;
  // blocks without a part in the last round take the windows, several each if need be
  int idle = blocks - items % blocks, each = max(min((windows + idle - 1) / idle, chunk / WINDOW_PAGES), 1);
  u32 turn = 0;
  for (int k = block_index(); k < items; k += blocks) {
    Item item;
    find_item(p, k / p.tiles, chunk, item);
    if (item.part == 0 && thread_index() == 0) p.part_of[2 * item.sequence] = item.first;
    attend_pages(p, &map, at, item, k % p.tiles, turn);
  }
  // the first window of this block: the last round of parts goes on with windows
  int first = ((int)block_index() - items % blocks + blocks) % blocks;
  for (int k = first * each; k < windows; k += blocks * each)
    for (int w = k; w < min(k + each, windows); w++) {
      int b = w / p.tiles, own = parts(p, num_pages(p, b), chunk);
      if (thread_index() == 0) p.part_of[2 * b + 1] = own;
      attend_window(p, at, b, w % p.tiles, all_parts, own);
    }
  release_next_kernel();
}

// One row of the output from the parts of its sequence; blocks [batch * rows, 4], 128 threads.
extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Arguments p) {
  wait_for_previous_kernel();
  u32 base = SHARED_BASE, lane = thread_index() % 32, warp = thread_index() / 32;
  int rows = p.query_len * p.heads, b = block_index() / rows, row = block_index() % rows;
  int channel = block_index_y() * 128 + lane * 4;
  u16* out = p.out + (i64)block_index() * LATENT + channel;
  if (p.lengths[(i64)b * p.lengths_stride] <= 0) {
    if (warp == 0) *(V2*)out = V2{0, 0};
    if (thread_index() == 0) p.lse[block_index()] = -INFINITE;
    return;
  }
  int pages = p.part_of[2 * b + 1], count = pages + 1;
  if (pages == 0) return;
  int first = p.part_of[2 * b], window = p.part_of[2 * p.batch] + b, tile = row / HEADS, n = row % HEADS;
  // element [part][n] of the sequence's tile: its pages, then its window
  auto at = [&](int i) { return ((i64)(i < pages ? first + i : window) * p.tiles + tile) * HEADS + n; };
  float most = LOWEST, sum = 0;
  for (int i = lane; i < count; i += 32) most = fmaxf(most, p.part_lse[at(i)]);
  for (int mask = 16; mask; mask >>= 1) most = fmaxf(most, shuffle_xor(most, mask));
  for (int i = lane; i < count; i += 32) sum += exp2_fast(p.part_lse[at(i)] - most);
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  float x0 = 0, x1 = 0, x2 = 0, x3 = 0;
#pragma unroll 4
  for (int i = warp; i < count; i += 4) {
    float weight = exp2_fast(p.part_lse[at(i)] - most);
    V4 x = *(const V4*)(p.part_out + at(i) * LATENT + channel);
    x0 += weight * as_float(x.x), x1 += weight * as_float(x.y);
    x2 += weight * as_float(x.z), x3 += weight * as_float(x.w);
  }
  sts128(base + thread_index() * 16, V4{as_bits(x0), as_bits(x1), as_bits(x2), as_bits(x3)});
  sync_block();
  if (warp > 0) return;
  for (int w = 1; w < 4; w++) {
    V4 x = lds128(base + (w * 32 + lane) * 16);
    x0 += as_float(x.x), x1 += as_float(x.y), x2 += as_float(x.z), x3 += as_float(x.w);
  }
  float inverse = sum == 0 ? 0 : 1 / sum;
  x0 *= inverse, x1 *= inverse, x2 *= inverse, x3 *= inverse;
  *(V2*)out = p.is_bf16 ? V2{pack_bf162(x0, x1), pack_bf162(x2, x3)} : V2{pack_half2(x0, x1), pack_half2(x2, x3)};
  if (lane == 0 && block_index_y() == 0)
    p.lse[block_index()] = sum == 0 ? -INFINITE : (most + log2_fast(sum)) * 0.6931471805599453f;
}
