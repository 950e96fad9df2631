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

// {scale, -scale (M + zero)} of two tokens: {scales, offsets}; `even`: the first two of four zeros.
DEVICE V2 scale_and_offset(u32 stage, u32 group, u32 token, u32 minus_m) {
  u32 scale = lds32(stage + AT_SCALES + (group * PAGE_SIZE + token) * 2);
  u32 zeros = lds32(stage + AT_ZEROS + group * PAGE_SIZE + token / 4 * 4);
  u32 zero = permute(zeros, 0x64646464, token % 4 ? 0x4342 : 0x4140);  // 1024 + zero
  return V2{scale, hmul2(scale, hsub2(minus_m, zero))};
}

// Scales and zero points in the forms in which consumers want them; one of 80 units: tokens t, t + 1,
// t + 8 and t + 9 of groups g and g + 1.
DEVICE void prepare_unit(u32 stage, u32 to, u32 unit) {
  u32 two = unit / 16, warp = unit / 4 % 4, pair = unit % 4, token = warp * 16 + pair * 2;
  u32 m = two < 4 ? MINUS_M : 0x63806380;  // 1024 - M; M is 64 for 4 bits
  u32 scores = to + SCORE_SCALES + ((two * 4 + warp) * 8 + pair * 2) * 16;
  u32 values = to + VALUE_SCALES + (two * 32 + warp * 4 + pair) * 16;
  V2 x[2][2];
#pragma unroll
  for (u32 i = 0; i < 4; i++) x[i / 2][i % 2] = scale_and_offset(stage, 2 * two + i / 2, token + i % 2 * 8, m);
  sts128(scores, V4{permute(x[0][0].x, x[0][0].y, 0x5410), permute(x[0][1].x, x[0][1].y, 0x5410),
                    permute(x[1][0].x, x[1][0].y, 0x5410), permute(x[1][1].x, x[1][1].y, 0x5410)});
  sts128(scores + 16, V4{permute(x[0][0].x, x[0][0].y, 0x7632), permute(x[0][1].x, x[0][1].y, 0x7632),
                         permute(x[1][0].x, x[1][0].y, 0x7632), permute(x[1][1].x, x[1][1].y, 0x7632)});
  if (two == 4) return;
  sts128(values, V4{x[0][0].x, x[0][0].y, x[0][1].x, x[0][1].y});
  sts128(values + 256, V4{x[1][0].x, x[1][0].y, x[1][1].x, x[1][1].y});
}

// 4 nibbles of a word, of two tokens: scale * (64 + n) - scale * (64 + zero).
DEVICE void scale_nibbles(u32 x, u32 scale, u32 offset, u32& v0, u32& v1, u32& v2, u32& v3) {
  v0 = hfma2(and_or(x << 4, 0x00f000f0, 0x54005400), scale, offset);
  v1 = hfma2(and_or(x, 0x00f000f0, 0x54005400), scale, offset);
  v2 = hfma2(and_or(x >> 4, 0x00f000f0, 0x54005400), scale, offset);
  v3 = hfma2(and_or(x >> 8, 0x00f000f0, 0x54005400), scale, offset);
}

DEVICE u32 hadd2(u32 a, u32 b) { return hfma2(a, 0x3c003c00, b); }

// Rope keys of a band of two rows, with the page's mean: plane 2i, then plane 2i + 1.
DEVICE void rope_keys(u32 x, u32 y, V2 scale, V4 mean, u32 (&a)[2][4]) {
  scale_nibbles(x, twice_low(scale.x), twice_high(scale.x), a[0][0], a[0][2], a[1][0], a[1][2]);
  scale_nibbles(y, twice_low(scale.y), twice_high(scale.y), a[0][1], a[0][3], a[1][1], a[1][3]);
  u32 of[4] = {permute(mean.x, mean.z, 0x5410), permute(mean.x, mean.z, 0x7632), permute(mean.y, mean.w, 0x5410),
               permute(mean.y, mean.w, 0x7632)};
#pragma unroll
  for (int i = 0; i < 8; i++) a[i / 4][i % 4] = hadd2(a[i / 4][i % 4], of[i / 4 * 2 + i / 2 % 2]);
}

DEVICE void add_rope_scores(const Place& at, u32 stage, u32 prepared, V4 x, float (&s)[H2]) {
  V4 scale = lds128(prepared + at.score_scales + 4 * 512);
  u32 mean = stage + AT_MEAN + at.pair * 16, a[2][2][4];
  rope_keys(x.x, x.y, V2{scale.x, scale.y}, lds128(mean), a[0]);
  rope_keys(x.z, x.w, V2{scale.z, scale.w}, lds128(mean + 64), a[1]);
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
