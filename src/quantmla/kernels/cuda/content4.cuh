// Content of 4 bits: word j of a row holds channels 4j to 4j + 3, a group is 16 words.

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
DEVICE void score_page(const Place& at, u32 stage, float (&s)[H2]) {
  float acc[2][H2];
  u32 rows = stage + at.score_rows;
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
      next_scale = lds128(scales + (i + 1) % 2 * 320 + (i + 1) / 2 * 16);
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
