// Content of 2 bits: word j of a row holds channels 8j to 8j + 7, a group is 8 words. A k step of 16
// is plane 2i of a group's words, then plane 2i + 1.

// 4 crumbs of a word, from bits 0, 2, 4, 6 on, of two tokens: scale * (16 + n) - scale * (16 + zero).
DEVICE void scale_crumbs(u32 x, u32 scale, u32 offset, u32& v0, u32& v1, u32& v2, u32& v3) {
  v0 = hfma2(and_or(x << 6, 0x00c000c0, 0x4c004c00), scale, offset);
  v1 = hfma2(and_or(x << 4, 0x00c000c0, 0x4c004c00), scale, offset);
  v2 = hfma2(and_or(x << 2, 0x00c000c0, 0x4c004c00), scale, offset);
  v3 = hfma2(and_or(x, 0x00c000c0, 0x4c004c00), scale, offset);
}

struct Start {  // of a page's scores: operands of the first group
  u32 a[4][4];
};

DEVICE void unpack_keys(u32 upper, u32 lower, const RowScales& scale, u32 (&a)[4][4]) {
  u32 first = scale.upper.pair, second = scale.lower.pair;
  scale_crumbs(upper, twice_low(first), twice_high(first), a[0][0], a[0][2], a[1][0], a[1][2]);
  scale_crumbs(upper >> 8, twice_low(first), twice_high(first), a[2][0], a[2][2], a[3][0], a[3][2]);
  scale_crumbs(lower, twice_low(second), twice_high(second), a[0][1], a[0][3], a[1][1], a[1][3]);
  scale_crumbs(lower >> 8, twice_low(second), twice_high(second), a[2][1], a[2][3], a[3][1], a[3][3]);
}

DEVICE void start_scores(const Place& at, u32 stage, u32 prepared, Start& start) {
  V4 x = ldmatrix(stage + at.score_rows);
  unpack_keys(x.x, x.y, row_scales(at, prepared, 0), start.a);
}

// Scores of a packed page, in units of the scaled query: tokens 16 warp + row and + 8 of this thread.
// The last products are still on their way.
DEVICE void score_page(const Place& at, u32 stage, u32 prepared, Start& start, float (&s)[H2]) {
  u32 rows = stage + at.score_rows;
  V4 x = ldmatrix(rows), next = ldmatrix(rows ^ 32);
  add_scores<1>(start.a, 0, s);
  mma_wait<1>();
#pragma unroll
  for (u32 g = 1; g < 8; g++) {
    if (g % 2 == 0) {
      x = next;
      next = g < 6 ? ldmatrix(rows ^ (g / 2 + 1) * 32) : ldmatrix(stage + at.rope_rows);
    }
    u32 a[4][4];
    unpack_keys(g % 2 ? x.z : x.x, g % 2 ? x.w : x.y, row_scales(at, prepared, g), a);
    add_scores<0>(a, g, s);
    mma_wait<1>();
  }
  add_rope_scores(at, prepared, next, s);
  mma_wait<1>();
}

struct Words {  // of 16 tokens, for values; scales of the upper and the lower 8 words
  V4 x, upper, lower;
};

DEVICE Words load_words(const Place& at, u32 stage, u32 prepared, u32 k) {
  u32 scales = prepared + at.value_scales + k * 64;
  return Words{ldmatrix_transposed(stage + at.value_rows + k * 2048), lds128(scales), lds128(scales + 256)};
}

// Operands of O[channel 8 word + 4 group + plane][head] += V^T P; rows are words 16 warp + row and + 8.
DEVICE void unpack_words(const Place& at, const Words& w, u32 (&v)[4][4]) {
  u32 down = 8 * at.group;
  scale_crumbs(w.x.x >> down, w.upper.x, w.upper.y, v[0][0], v[1][0], v[2][0], v[3][0]);
  scale_crumbs(w.x.y >> down, w.lower.x, w.lower.y, v[0][1], v[1][1], v[2][1], v[3][1]);
  scale_crumbs(w.x.z >> down, w.upper.z, w.upper.w, v[0][2], v[1][2], v[2][2], v[3][2]);
  scale_crumbs(w.x.w >> down, w.lower.z, w.lower.w, v[0][3], v[1][3], v[2][3], v[3][3]);
}

// Outputs are those of planes.
DEVICE void to_bytes(float (&)[4][H2]) {}
DEVICE void to_planes(float (&)[4][H2]) {}

// Query channels 32 i + 8 part and on, one word, to 4 tiles.
DEVICE void store_query(u32 query, u32 i, u32 part, u32 n, float (&x)[8]) {
  u32 to = query + i / 2 * 4 * TILE;
#pragma unroll
  for (u32 plane = 0; plane < 8; plane++)
    sts16(to + plane / 2 * TILE + element(plane % 2 * 8 + i % 2 * 4 + part, n), pack_half2(x[plane], 0));
}

// Operands of group g of two bf16 rows.
DEVICE void row_operands(u64 upper, u64 lower, u32 g, const Place& at, u32 (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    V4 one = global_16(i ? lower : upper, g * 64 + at.pair * 16), two = global_16(i ? lower : upper, g * 64 + at.pair * 16 + 8);
    u32 first[4] = {one.x, one.y, one.z, one.w}, second[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      a[tile][i] = halves(first[tile] << 16, second[tile] << 16);
      a[tile][2 + i] = halves(first[tile], second[tile]);
    }
  }
}

// First of the four channels whose outputs are planes o[0..3] of a word.
DEVICE u32 output_channel(u32 word, u32 group) { return 8 * word + 4 * group; }
