// Scores by two groups at a time, whose products do not wait for each other: half as many waits.

DEVICE void score_pair(const Place& at, V4 x, V4 y, u32 group, float (&acc)[2][H2]) {
  u32 a[4][4], b[4][4];
  mask_nibbles(x.x, a[0][0], a[1][0], a[2][0], a[3][0]);
  mask_nibbles(x.y, a[0][1], a[1][1], a[2][1], a[3][1]);
  mask_nibbles(x.z, a[0][2], a[1][2], a[2][2], a[3][2]);
  mask_nibbles(x.w, a[0][3], a[1][3], a[2][3], a[3][3]);
  mask_nibbles(y.x, b[0][0], b[1][0], b[2][0], b[3][0]);
  mask_nibbles(y.y, b[0][1], b[1][1], b[2][1], b[3][1]);
  mask_nibbles(y.z, b[0][2], b[1][2], b[2][2], b[3][2]);
  mask_nibbles(y.w, b[0][3], b[1][3], b[2][3], b[3][3]);
  mma_fence(a), mma_fence(b);
  mma<0>(acc[0], a[0], query_tile(group * 4)), mma<0>(acc[1], b[0], query_tile(group * 4 + 4));
#pragma unroll
  for (int i = 1; i < 4; i++)
    mma<1>(acc[0], a[i], query_tile(group * 4 + i)), mma<1>(acc[1], b[i], query_tile(group * 4 + 4 + i));
  mma_commit();
}

DEVICE V4 content_words(u32 rows, u32 group) { return ldmatrix((rows ^ (group % 4 * 32)) + group / 4 * HALF); }

#ifdef PAIRS_AHEAD  // one pair's products run while the next pair is masked: more registers
DEVICE void score_page(const Place& at, u32 stage, u32 means, float (&s)[H2]) {
  float acc[2][2][H2];
  u32 rows = stage + at.score_rows;
  prepare_scores(at, stage);
  sync_warp();
  score_offsets(at, means, s);
  V4 x = content_words(rows, 0), y = content_words(rows, 1);
#pragma unroll
  for (u32 g = 0; g < 8; g += 2) {
    float(&last)[2][H2] = acc[(g / 2 + 1) % 2];
    score_pair(at, x, y, g, acc[g / 2 % 2]);
    if (g == 0) prepare_values(at, stage);  // for after the next barrier
    if (g < 6) x = content_words(rows, g + 2), y = content_words(rows, g + 3);
    else x = ldmatrix(stage + at.rope_rows);
    mma_wait<1>();
    if (g == 0) {
      settle(s);
    } else {
      settle(last[0]), settle(last[1]);
      fold(at, g - 2, last[0], s), fold(at, g - 1, last[1], s);
    }
  }
  score_band(at, x.x, x.y, 0, acc[0][0]);
  score_band(at, x.z, x.w, 1, acc[0][1]);
  mma_wait<2>();
  settle(acc[1][0]), settle(acc[1][1]);
  fold(at, 6, acc[1][0], s), fold(at, 7, acc[1][1], s);
  mma_wait<0>();
  settle(acc[0][0]), settle(acc[0][1]);
  fold(at, 8, acc[0][0], s), fold(at, 9, acc[0][1], s);
}
#else
DEVICE void score_page(const Place& at, u32 stage, u32 means, float (&s)[H2]) {
  float acc[2][H2];
  u32 rows = stage + at.score_rows;
  prepare_scores(at, stage);
  sync_warp();
  score_offsets(at, means, s);
  mma_wait<0>();
  settle(s);
  V4 x = content_words(rows, 0), y = content_words(rows, 1);
#pragma unroll
  for (u32 g = 0; g < 8; g += 2) {
    score_pair(at, x, y, g, acc);
    mma_wait<0>();
    settle(acc[0]), settle(acc[1]);
    if (g < 6) x = content_words(rows, g + 2), y = content_words(rows, g + 3);
    else x = ldmatrix(stage + at.rope_rows);
    fold(at, g, acc[0], s), fold(at, g + 1, acc[1], s);
  }
  score_band(at, x.x, x.y, 0, acc[0]);
  score_band(at, x.z, x.w, 1, acc[1]);
  prepare_values(at, stage);  // for after the next barrier
  mma_wait<0>();
  settle(acc[0]), settle(acc[1]);
  fold(at, 8, acc[0], s), fold(at, 9, acc[1], s);
}
#endif

