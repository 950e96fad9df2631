// Content of 4 bits: word j of a row holds channels 4j to 4j + 3, a group is 16 words.

DEVICE void prepare_values(const Place& at, u32 stage) {
  V2 s = lds64(stage + AT_SCALES + at.value_source * 2);
  u32 z = lds32(stage + AT_ZEROS + at.value_source);
  // 960 - (1024 + zero)
  sts64(at.value_target, V2{s.x, hmul2(s.x, hsub2(0x63806380, first_zeros(z)))});
  sts64(at.value_target + VALUE_PAIR_BYTES, V2{s.y, hmul2(s.y, hsub2(0x63806380, second_zeros(z)))});
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

// Scores of a packed page, in units of the scaled query: tokens 16 warp + row and + 8 of this thread.
DEVICE void score_page(const Place& at, u32 stage, u32 means, float (&s)[H2]) {
  float acc[2][H2];
  u32 rows = stage + at.score_rows;
  prepare_scores(at, stage);
  sync_warp();
  score_offsets(at, means, s);
  V4 first = ldmatrix(rows), next = ldmatrix(rows ^ 32);
  mma_wait<0>();
  settle(s);
  score_group(at, first, 0, acc[0]);
  prepare_values(at, stage);  // for after the next barrier
#pragma unroll
  for (u32 g = 1; g < 8; g++) {
    V4 x = next;
    next = g < 7 ? ldmatrix((rows ^ ((g + 1) % 4 * 32)) + (g + 1) / 4 * HALF)
                 : ldmatrix(stage + at.rope_rows);
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

// O[channel 4 word + plane][head] += V^T P; rows are words 64 half + 16 warp + row and + 8.
DEVICE void value_page(const Place& at, u32 stage, u32 buffer, float (&o)[2][4][H2]) {
  u32 probability = uniform(at.probability + buffer * (4 * TILE / 16));
  u32 rows = stage + at.value_rows, scales = at.value_scales;
  V4 next = ldmatrix_transposed(rows), next_scale = lds128(scales);
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    V4 x = next, s = next_scale;
    if (i < 7) {
      next = ldmatrix_transposed(rows + (i + 1) % 2 * HALF + (i + 1) / 2 * 2048);
      next_scale = lds128(scales + (i + 1) % 2 * VALUE_GROUP_BYTES + (i + 1) / 2 * 16);
    }
    u32 v[4][4];
    scale_nibbles(x.x, s.x, s.y, v[0][0], v[1][0], v[2][0], v[3][0]);
    scale_nibbles(x.y, s.x, s.y, v[0][1], v[1][1], v[2][1], v[3][1]);
    scale_nibbles(x.z, s.z, s.w, v[0][2], v[1][2], v[2][2], v[3][2]);
    scale_nibbles(x.w, s.z, s.w, v[0][3], v[1][3], v[2][3], v[3][3]);
    add_values(o[i % 2], v, probability, i / 2);
    if (i < 7) mma_wait<1>();
  }
  mma_wait<0>();
  settle_output(o);
}

// Query channels 8 part to 8 part + 7 of a group, two words: to 4 tiles, one for each plane. Upper
// nibbles are read as 16 n. Returns the sum of the rounded values.
DEVICE float store_planes(u32 at, u32 part, u32 n, const float (&x)[8]) {
  float sum = 0;
#pragma unroll
  for (int plane = 0; plane < 4; plane++) {
    float down = plane & 1 ? 0.0625f : 1.0f, up = plane & 1 ? 16.0f : 1.0f;
    u32 two = pack_half2(x[plane] * down, x[4 + plane] * down);
    sts32(at + plane * TILE + element(2 * part, n), two);
    sum += up * (half_low(two) + half_high(two));
  }
  return sum;
}

// Products of bf16 rows with the query's tiles; upper nibbles' tiles go to `odd`.
DEVICE void score_content_rows(const Place& at, u64 upper, u64 lower, float (&s)[H2], float (&odd)[H2]) {
#pragma unroll 1
  for (u32 g = 0; g < 8; g += 2) {
    V4 x[2][4];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      // 8 channels: the words 2 pair and 2 pair + 1 of the upper and the lower 8 words of the group
      u32 channel = (g + i) * 64 + at.pair * 8;
      x[i][0] = global_16(upper, channel), x[i][1] = global_16(lower, channel);
      x[i][2] = global_16(upper, channel + 32), x[i][3] = global_16(lower, channel + 32);
    }
    u32 a[2][4][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      V4 y = x[i / 4][i % 4];
      u32(&to)[4][4] = a[i / 4];
      to[0][i % 4] = halves(y.x << 16, y.z << 16), to[1][i % 4] = halves(y.x, y.z);
      to[2][i % 4] = halves(y.y << 16, y.w << 16), to[3][i % 4] = halves(y.y, y.w);
    }
    add_row_products(a, g, s, odd);
  }
}

// First of the four channels whose outputs are planes o[half][0..3] of a word.
DEVICE u32 output_channel(u32 word, u32 half) { return 4 * (half * 64 + word); }
