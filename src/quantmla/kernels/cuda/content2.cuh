// Content of 2 bits: word j of a row holds channels 8j to 8j + 7, a group is 8 words. A k step of 16
// is plane 2i of a group's words, then plane 2i + 1.

DEVICE void prepare_values(const Place& at, u32 stage) {
  V2 s = lds64(stage + AT_SCALES + at.value_source * 2);
  u32 z = lds32(stage + AT_ZEROS + at.value_source);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 scale = i ? s.y : s.x, zero = i ? second_zeros(z) : first_zeros(z);
    // 1008 and 1020 - (1024 + zero)
    V4 entry = {scale, hmul2(scale, hsub2(0x63e063e0, zero)), hmul2(scale, hsub2(0x63f863f8, zero)), 0};
    sts128(at.value_target + i * VALUE_PAIR_BYTES, entry);
  }
}

// Planes 0 to 7 in place, read as n 4^(p % 4) 2^-24, which the query makes good.
DEVICE void mask_crumbs(u32 x, u32& n0, u32& n1, u32& n2, u32& n3, u32& n4, u32& n5, u32& n6, u32& n7) {
  u32 y = x >> 8;
  n0 = x & 0x00030003, n1 = x & 0x000c000c, n2 = x & 0x00300030, n3 = x & 0x00c000c0;
  n4 = y & 0x00030003, n5 = y & 0x000c000c, n6 = y & 0x00300030, n7 = y & 0x00c000c0;
}

DEVICE void score_group(const Place& at, u32 x, u32 y, u32 group, float (&acc)[H2]) {
  u32 a[4][4];
  mask_crumbs(x, a[0][0], a[0][2], a[1][0], a[1][2], a[2][0], a[2][2], a[3][0], a[3][2]);
  mask_crumbs(y, a[0][1], a[0][3], a[1][1], a[1][3], a[2][1], a[2][3], a[3][1], a[3][3]);
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
  V4 x = ldmatrix(rows), next = ldmatrix(rows ^ 32);
  mma_wait<0>();
  settle(s);
  score_group(at, x.x, x.y, 0, acc[0]);
  prepare_values(at, stage);  // for after the next barrier
#pragma unroll
  for (u32 g = 1; g < 8; g++) {
    if (g % 2 == 0) {
      x = next;
      next = g < 6 ? ldmatrix(rows ^ ((g / 2 + 1) * 32)) : ldmatrix(stage + at.rope_rows);
    }
    score_group(at, g % 2 ? x.z : x.x, g % 2 ? x.w : x.y, g, acc[g % 2]);
    mma_wait<1>();
    settle(acc[(g - 1) % 2]);
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

// M + n by one OR: M is 16 or 4 where the field lies at bits 6 or 8. (Bits 4 need fewer shifts, but
// M = 64 would round off four times as much.)
#define SCALED_16(word) hfma2(and_or(word, 0x00c000c0, 0x4c004c00), scale.x, scale.y)
#define SCALED_4(word) hfma2(and_or(word, 0x03000300, 0x44004400), scale.x, scale.z)

DEVICE void scale_crumbs(u32 x, const V4& scale, u32 i, u32 (&low)[4][4], u32 (&high)[4][4]) {
  u32 left = x << 4, right = x >> 4;
  low[0][i] = SCALED_16(x << 6), low[1][i] = SCALED_16(left), low[2][i] = SCALED_4(left), low[3][i] = SCALED_16(x);
  high[0][i] = SCALED_4(x), high[1][i] = SCALED_16(right), high[2][i] = SCALED_4(right), high[3][i] = SCALED_4(x >> 6);
}

// O[channel 8 word + plane][head] += V^T P; rows are words 16 warp + row and + 8.
DEVICE void value_page(const Place& at, u32 stage, u32 buffer, float (&o)[2][4][H2]) {
  u32 probability = uniform(at.probability + buffer * (4 * TILE / 16));
  u32 rows = stage + at.value_rows, scales = at.value_scales;
  V4 next = ldmatrix_transposed(rows);
#pragma unroll
  for (u32 k = 0; k < 4; k++) {
    V4 x = next;
    u32 low[4][4], high[4][4];
    scale_crumbs(x.x, lds128(scales + k * 32), 0, low, high);
    scale_crumbs(x.y, lds128(scales + VALUE_GROUP_BYTES + k * 32), 1, low, high);
    scale_crumbs(x.z, lds128(scales + k * 32 + 16), 2, low, high);
    scale_crumbs(x.w, lds128(scales + VALUE_GROUP_BYTES + k * 32 + 16), 3, low, high);
    if (k < 3) next = ldmatrix_transposed(rows + (k + 1) * 2048);
    add_values(o[0], low, probability, k);
    add_values(o[1], high, probability, k);
    if (k < 3) mma_wait<1>();
  }
  mma_wait<0>();
  settle_output(o);
}

// Query channels 8 part to 8 part + 7 of a group, one word: to 4 tiles. Returns the sum of the
// rounded values.
DEVICE float store_planes(u32 at, u32 part, u32 n, const float (&x)[8]) {
  float sum = 0;
#pragma unroll
  for (int plane = 0; plane < 8; plane++) {
    float up = (float)(1 << 2 * (plane % 4));
    u32 one = pack_half2(x[plane] / up, 0);
    sts16(at + plane / 2 * TILE + element(part + plane % 2 * 8, n), one);
    sum += up * half_low(one);
  }
  return sum;
}

// Products of bf16 rows with the query's tiles: those of planes 2, 3, 6 and 7 go to `odd`.
DEVICE void score_content_rows(const Place& at, u64 upper, u64 lower, float (&s)[H2], float (&odd)[H2]) {
#pragma unroll 1
  for (u32 g = 0; g < 8; g += 2) {
    V4 x[2][2][2];  // group, row, word 2 pair and 2 pair + 1
#pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i / 2 % 2][i % 2] = global_16(i / 2 % 2 ? lower : upper, (g + i / 4) * 64 + at.pair * 16 + i % 2 * 8);
    u32 a[2][4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      V4 one = x[i / 2][i % 2][0], two = x[i / 2][i % 2][1];
      u32 first[4] = {one.x, one.y, one.z, one.w}, second[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
      for (int tile = 0; tile < 4; tile++) {
        a[i / 2][tile][i % 2] = halves(first[tile] << 16, second[tile] << 16);
        // the query of odd planes carries 1/4 more
        a[i / 2][tile][2 + i % 2] = hmul2(halves(first[tile], second[tile]), 0x44004400);
      }
    }
    add_row_products(a, g, s, odd);
  }
}

// First of the four channels whose outputs are planes o[half][0..3] of a word.
DEVICE u32 output_channel(u32 word, u32 half) { return 8 * word + 4 * half; }
