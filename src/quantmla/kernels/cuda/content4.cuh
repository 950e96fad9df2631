// Content of 4 bits: word j of a row holds channels 4j to 4j + 3, a group is 16 words.

// Entries {scale, -scale (64 + zero)} of two pairs of tokens, and of those 8 further; `minus`: -zero.
DEVICE void prepare_values(u32 to, u32 warp, u32 quad, V2 upper, V2 lower, const u32 (&minus)[4]) {
  u32 entry = to + 2 * quad * VALUE_PAIR_BYTES + warp * 16, k = 0x54005400;  // 64
  sts128(entry, V4{upper.x, hmul2(upper.x, hsub2(minus[0], k)), lower.x, hmul2(lower.x, hsub2(minus[2], k))});
  sts128(entry + VALUE_PAIR_BYTES, V4{upper.y, hmul2(upper.y, hsub2(minus[1], k)), lower.y, hmul2(lower.y, hsub2(minus[3], k))});
}

// Words of group i, as operands want them.
#define GROUPS_A_LOAD 1
DEVICE V4 load_groups(u32 rows, u32 i) { return ldmatrix((rows ^ (i % 4 * 32)) + i / 4 * HALF); }

#if FOLDED

// Operands of a group's four products, one for each plane.
DEVICE void mask_group(V4 x, u32, u32 (&a)[4][4]) {
  mask_nibbles(x.x, a[0][0], a[1][0], a[2][0], a[3][0]);
  mask_nibbles(x.y, a[0][1], a[1][1], a[2][1], a[3][1]);
  mask_nibbles(x.z, a[0][2], a[1][2], a[2][2], a[3][2]);
  mask_nibbles(x.w, a[0][3], a[1][3], a[2][3], a[3][3]);
}
#else
struct RowScales {  // {scale, -scale (64 + zero)} of a thread's two tokens
  V2 upper, lower;
};
DEVICE RowScales read_row_scales(u32 from) {
  V4 x = lds128(from);
  return RowScales{V2{x.x, x.y}, V2{x.z, x.w}};
}
DEVICE void store_row_scales(u32 to, u32, u32 upper, u32 lower, u32 upper_minus, u32 lower_minus) {
  u32 k = 0x54005400;
  sts128(to, V4{upper, hmul2(upper, hsub2(upper_minus, k)), lower, hmul2(lower, hsub2(lower_minus, k))});
}

// Operands of a group's four products, one for each plane.
DEVICE void scale_group(V4 x, const RowScales& row, u32, u32 (&a)[4][4]) {
  scale_nibbles(x.x, row.upper.x, row.upper.y, a[0][0], a[1][0], a[2][0], a[3][0]);
  scale_nibbles(x.y, row.lower.x, row.lower.y, a[0][1], a[1][1], a[2][1], a[3][1]);
  scale_nibbles(x.z, row.upper.x, row.upper.y, a[0][2], a[1][2], a[2][2], a[3][2]);
  scale_nibbles(x.w, row.lower.x, row.lower.y, a[0][3], a[1][3], a[2][3], a[3][3]);
}
#endif

// O[channel 4 word + plane][head] += V^T P; rows are words 64 half + 16 warp + row and + 8.
DEVICE void value_page(const Place& at, u32 stage, u32 prepared, u32 buffer, float (&o)[2][4][H2]) {
  u32 probability = probabilities_at(at, buffer);
  u32 rows = stage + at.value_rows, scales = prepared + at.value_scales;
  V4 next = ldmatrix_transposed(rows), next_scale = lds128(scales);
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    V4 x = next, s = next_scale;
    if (i < 7) {
      next = ldmatrix_transposed(rows + (i + 1) % 2 * HALF + (i + 1) / 2 * 2048);
      next_scale = lds128(scales + (i + 1) % 2 * (VALUE_STEP * VALUE_GROUP_BYTES) + (i + 1) / 2 * 16);
    }
    u32 v[4][4];
    scale_nibbles(x.x, s.x, s.y, v[0][0], v[1][0], v[2][0], v[3][0]);
    scale_nibbles(x.y, s.x, s.y, v[0][1], v[1][1], v[2][1], v[3][1]);
    scale_nibbles(x.z, s.z, s.w, v[0][2], v[1][2], v[2][2], v[3][2]);
    scale_nibbles(x.w, s.z, s.w, v[0][3], v[1][3], v[2][3], v[3][3]);
    add_values(o[i % 2], v, probability, i / 2);
    if (i < 7) wait_for_values<1>();
  }
  finish_values(o);
}

// Query channels 8 part to 8 part + 7 of a group, two words: to 4 tiles, one for each plane. Where
// scores are folded, upper nibbles are read as 16 n. Returns the sum of the rounded values.
DEVICE float store_planes(u32 at, u32 part, u32 n, const float (&x)[8]) {
  float sum = 0;
#pragma unroll
  for (int plane = 0; plane < 4; plane++) {
    float down = FOLDED && plane & 1 ? 0.0625f : 1.0f, up = FOLDED && plane & 1 ? 16.0f : 1.0f;
    u32 two = pack_half2(x[plane] * down, x[4 + plane] * down);
    sts32(at + plane * TILE + query_element(2 * part, n), two);
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
    add_row_products(at, a, g, s, odd);
  }
}

// First of the four channels whose outputs are planes o[half][0..3] of a word.
DEVICE u32 output_channel(u32 word, u32 half) { return 4 * (half * 64 + word); }
