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
DEVICE void score_page(const Place& at, u32 stage, float (&s)[H2]) {
  float acc[2][H2];
  u32 rows = stage + at.score_rows;
  prepare_scores(at, stage);
  sync_warp();
  score_offsets(at, stage, s);
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
}

DEVICE void value_rows(const Place& at, u32 buffer, float (&o)[2][4][H2]) {
  u32 probability = uniform(at.probability + buffer * (4 * TILE / 16));
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
      add_values(o[half], v, probability, k);
      mma_wait<0>();
      settle_output(o);
    }
  }
}

// First of the four channels whose outputs are planes o[half][0..3] of a word.
DEVICE u32 output_channel(u32 word, u32 half) { return 4 * (half * 64 + word); }
