// Pages: what the producer's warps do, and what is the same for every width of content.

DEVICE u32 page_at(u32 slot) { return SHARED_BASE + slot * PAGE_BYTES; }
DEVICE u32 prepared_at(u32 slot) { return SHARED_BASE + AT_PREPARED + slot * PREPARED; }

// By one thread.
DEVICE void load_page(const Arguments& p, const TensorMap* map, u32 slot, int number) {
  u32 to = page_at(slot), bar = SHARED_BASE + AT_LOADED + slot * 8;
  barrier_expect(bar, PAGE_BYTES);
  copy_tile(to, map, number, bar);
  copy_bulk(to + AT_ROPE, p.pages + number * p.page_stride + AT_ROPE, PAGE_BYTES - AT_ROPE, bar);
}

DEVICE float power(int exponent) { return as_float((u32)(127 + exponent) << 23); }

// The shift that brings a page's largest scale to [2^14, 2^15).
DEVICE int find_shift(u32 stage, u32 lane) {
  u32 most = 0, from = stage + AT_SCALES + lane * 16;
#pragma unroll
  for (u32 i = 0; i < 3; i++) {
    V4 x = lds128(from + (i < 2 || lane < 16 ? i * 512 : 0));
    most = hmax2(most, hmax2(hmax2(x.x, x.y), hmax2(x.z, x.w)));
  }
  return 29 - (warp_most(max(most & 0xffff, most >> 16)) >> 10);
}

// {scales, offsets} of two tokens: what times n, and then plus what, is a key.
DEVICE V2 scale_and_offset(u32 stage, u32 group, u32 token, int shift) {
  u32 scale = lds32(stage + AT_SCALES + (group * PAGE_SIZE + token) * 2);
  u32 zeros = lds32(stage + AT_ZEROS + group * PAGE_SIZE + token / 4 * 4), which = token % 4 ? 0x4342 : 0x4140;
  int half = min(shift, 15);
  scale = hmul2(hmul2(scale, (u32)(half + 15) * 0x04000400), (u32)(shift - half + 15) * 0x04000400);
  return V2{scale, hmul2(scale, permute(zeros, 0x80808080, which))};  // -zero 2^-24
}

DEVICE u32 more_offsets(u32 row, u32 two) {
  return CONTENT_BITS == 4 || two == 4 ? hmul2(row, 0x4c403c00) : hmul2(permute(row, row, 0x3232), 0x4d404500);
}

// Scales and zero points in the forms in which consumers want them; one of 80 units: tokens t, t + 1,
// t + 8 and t + 9 of groups g and g + 1.
DEVICE void prepare_unit(u32 stage, u32 to, u32 unit, int shift) {
  u32 two = unit / 16, warp = unit / 4 % 4, pair = unit % 4, token = warp * 16 + pair * 2;
  u32 scores = to + SCORE_SCALES + ((two * 8 + warp) * 8 + pair * 2) * 16;
  u32 values = to + VALUE_SCALES + two * 2 * VALUE_GROUP_BYTES + (warp * 4 + pair) * VALUE_PAIR_BYTES;
  V2 x[2][2];
#pragma unroll
  for (u32 i = 0; i < 4; i++) x[i / 2][i % 2] = scale_and_offset(stage, 2 * two + i / 2, token + i % 2 * 8, shift);
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    u32 row = permute(x[i / 2][0].x, x[i / 2][0].y, i % 2 ? 0x7632 : 0x5410);
    u32 lower = permute(x[i / 2][1].x, x[i / 2][1].y, i % 2 ? 0x7632 : 0x5410);
    sts128(scores + i / 2 * SCORE_GROUP_BYTES + i % 2 * 16, V4{row, more_offsets(row, two), lower, more_offsets(lower, two)});
  }
  if (two == 4) return;
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    V2 first = x[i][0], second = x[i][1];
#if CONTENT_BITS == 4
    sts128(values + i * VALUE_GROUP_BYTES, V4{first.x, first.y, second.x, second.y});
#else
    sts128(values + i * VALUE_GROUP_BYTES, V4{first.x, first.y, hmul2(first.y, 0x45004500), hmul2(first.y, 0x4d404d40)});
    sts128(values + i * VALUE_GROUP_BYTES + 16, V4{second.x, second.y, hmul2(second.y, 0x45004500), hmul2(second.y, 0x4d404d40)});
#endif
  }
}

// Mean rope keys of words 2i and 2i + 1 of a band, by 8 threads.
DEVICE void prepare_means(u32 stage, u32 to, u32 i, int shift) {
  V4 x = lds128(stage + AT_MEAN + i * 16);
  float unit = power(shift - 24), up = 16 * unit;
  float x0 = half_low(x.x), y0 = half_low(x.z), x2 = half_low(x.y), y2 = half_low(x.w);
  sts128(to + MEANS + i * 16, V4{pack_half2(x0 * unit, y0 * unit), pack_half2(half_high(x.x) * up + x0 * unit, half_high(x.z) * up + y0 * unit),
                                 pack_half2(x2 * unit, y2 * unit), pack_half2(half_high(x.y) * up + x2 * unit, half_high(x.w) * up + y2 * unit)});
}

// By the producer's 64 threads of two warps.
DEVICE void prepare_page(u32 stage, u32 to, u32 thread) {
  int shift = find_shift(stage, thread % 32);
#pragma unroll 1
  for (u32 unit = thread; unit < 80; unit += 64) prepare_unit(stage, to, unit, shift);
  if (thread < 8) prepare_means(stage, to, thread, shift);
  if (thread == 0) sts32(to + SHIFT, shift);
}

// Odd planes may be whole bytes, 16 times as large and the plane before: that saves a mask. Values' are undone in the
// output, once; keys' in the query, k0 q0 + k1 q1 = k0 (q0 - q1 / 16) + (k0 + 16 k1) q1 / 16.
DEVICE u32 times_17(u32 x) { return hmul2(x, 0x4c404c40); }
// 4 planes of a word, of two tokens: scale * n - scale * zero.
DEVICE void scale_bytes(u32 x, u32 scale, u32 offset, u32 offset_17, u32& v0, u32& v1, u32& v2, u32& v3) {
  u32 n0, byte0, n2, byte1;
  mask_nibbles(x, n0, byte0, n2, byte1);
  v0 = hfma2(n0, scale, offset), v1 = hfma2(byte0, scale, offset_17);
  v2 = hfma2(n2, scale, offset), v3 = hfma2(byte1, scale, offset_17);
}
// A query for such keys.
DEVICE void query_of_bytes(float& q0, float& q1) { q1 *= 0.0625f, q0 -= q1; }
// Such keys of bf16 rows, less by ROWS_UNIT: float16 has no room above.
#if CONTENT_BITS == 4
#define ROWS_UNIT 16
#define DOWN_1 0x3c003c00  // what is to be 16 times as much
#else
#define ROWS_UNIT 64
#define DOWN_1 0x34003400
#endif
#define DOWN_0 (ROWS_UNIT == 16 ? 0x2c002c00 : 0x24002400)
DEVICE void row_bytes(u32& k0, u32& k1) { k0 = hmul2(k0, DOWN_0), k1 = hfma2(k1, DOWN_1, k0); }

struct RowScale {  // of a row and a group: {scale, offset}, and offsets of bytes
  u32 pair, more;
};
struct RowScales {  // of this thread's two tokens
  RowScale upper, lower;
};
DEVICE RowScales row_scales(const Place& at, u32 prepared, u32 group) {
  V4 x = lds128(prepared + at.score_scales + group * SCORE_GROUP_BYTES);
  return RowScales{{x.x, x.y}, {x.z, x.w}};
}

// 4 planes of a word of keys.
DEVICE void scale_word(u32 x, RowScale r, u32& v0, u32& v1, u32& v2, u32& v3) {
  scale_bytes(x, twice_low(r.pair), twice_high(r.pair), twice_high(r.more), v0, v1, v2, v3);
}

// Rope keys of a band of two rows, with the page's mean: plane 2i, then plane 2i + 1.
DEVICE void rope_keys(u32 x, u32 y, const RowScales& scale, V4 mean, u32 (&a)[2][4]) {
  scale_word(x, scale.upper, a[0][0], a[0][2], a[1][0], a[1][2]);
  scale_word(y, scale.lower, a[0][1], a[0][3], a[1][1], a[1][3]);
  u32 of[4] = {mean.x, mean.y, mean.z, mean.w};
#pragma unroll
  for (int i = 0; i < 8; i++) a[i / 4][i % 4] = hadd2(a[i / 4][i % 4], of[i / 4 * 2 + i / 2 % 2]);
}

DEVICE void add_rope_scores(const Place& at, u32 prepared, V4 x, float (&s)[H2]) {
  u32 mean = prepared + MEANS + at.pair * 16, a[2][2][4];
  rope_keys(x.x, x.y, row_scales(at, prepared, 8), lds128(mean), a[0]);
  rope_keys(x.z, x.w, row_scales(at, prepared, 9), lds128(mean + 64), a[1]);
  mma_fence(a[0]), mma_fence(a[1]);
#pragma unroll
  for (u32 i = 0; i < 4; i++) mma<1>(s, a[i / 2][i % 2], query_tile(ROPE_TILE + i));
  mma_commit();
}

template <int first> DEVICE void add_scores(u32 (&a)[4][4], u32 group, float (&s)[H2]) {
  mma_fence(a);
  mma<!first>(s, a[0], query_tile(group * 4));
#pragma unroll
  for (u32 i = 1; i < 4; i++) mma<1>(s, a[i], query_tile(group * 4 + i));
  mma_commit();
}

DEVICE void add_values(float (&o)[4][H2], u32 (&v)[4][4], u32 probability, u32 k) {
  u64 p = operand(probability, k);
  mma_fence(v);
#pragma unroll
  for (int plane = 0; plane < 4; plane++) mma<1>(o[plane], v[plane], p);
  mma_commit();
}

DEVICE void settle_output(float (&o)[4][H2]) {
#pragma unroll
  for (int i = 0; i < 4; i++) settle(o[i]);
}

// Descriptor of what warpgroup `group` published.
DEVICE u32 probability_tiles(u32 group) { return descriptor(SHARED_BASE + AT_P) + group * (4 * TILE / 16); }
