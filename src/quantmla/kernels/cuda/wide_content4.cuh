// Content of 4 bits: word j of a row holds channels 4j to 4j + 3, a group is 16 words.

struct Start {  // of a page's scores: operands of the first group
  u32 a[4][4];
};

DEVICE void unpack_keys(const V4& x, const RowScales& scale, u32 (&a)[4][4]) {
  scale_word(x.x, scale.upper, a[0][0], a[1][0], a[2][0], a[3][0]);
  scale_word(x.y, scale.lower, a[0][1], a[1][1], a[2][1], a[3][1]);
  scale_word(x.z, scale.upper, a[0][2], a[1][2], a[2][2], a[3][2]);
  scale_word(x.w, scale.lower, a[0][3], a[1][3], a[2][3], a[3][3]);
}

DEVICE void start_scores(const Place& at, u32 stage, u32 prepared, Start& start) {
  unpack_keys(ldmatrix(stage + at.score_rows), row_scales(at, prepared, 0), start.a);
}

// Scores of a packed page, in units of the scaled query: tokens 16 warp + row and + 8 of this thread.
// The last products are still on their way.
DEVICE void score_page(const Place& at, u32 stage, u32 prepared, Start& start, float (&s)[H2]) {
  u32 rows = stage + at.score_rows;
  V4 next = ldmatrix(rows ^ 32);
  RowScales next_scale = row_scales(at, prepared, 1);
  add_scores<1>(start.a, 0, s);
  mma_wait<1>();
#pragma unroll
  for (u32 g = 1; g < 8; g++) {
    V4 x = next;
    RowScales scale = next_scale;
    next = g < 7 ? ldmatrix((rows ^ ((g + 1) % 4 * 32)) + (g + 1) / 4 * HALF) : ldmatrix(stage + at.rope_rows);
    if (g < 7) next_scale = row_scales(at, prepared, g + 1);
    u32 a[4][4];
    unpack_keys(x, scale, a);
    add_scores<0>(a, g, s);
    mma_wait<1>();
  }
  add_rope_scores(at, prepared, next, s);
  mma_wait<1>();
}

struct Words {  // of 16 tokens, for values
  V4 x, scale;
};

DEVICE Words load_words(const Place& at, u32 stage, u32 prepared, u32 k) {
  return Words{ldmatrix_transposed(stage + at.value_rows + k * 2048), lds128(prepared + at.value_scales + k * 64)};
}

// Operands of O[channel 4 word + plane][head] += V^T P; rows are words 64 group + 16 warp + row and + 8.
// Odd planes are whole bytes: 16 times as much, and the plane before.
DEVICE void unpack_words(const Place& at, const Words& w, u32 (&v)[4][4]) {
  u32 first = times_17(w.scale.y), second = times_17(w.scale.w);
  scale_bytes(w.x.x, w.scale.x, w.scale.y, first, v[0][0], v[1][0], v[2][0], v[3][0]);
  scale_bytes(w.x.y, w.scale.x, w.scale.y, first, v[0][1], v[1][1], v[2][1], v[3][1]);
  scale_bytes(w.x.z, w.scale.z, w.scale.w, second, v[0][2], v[1][2], v[2][2], v[3][2]);
  scale_bytes(w.x.w, w.scale.z, w.scale.w, second, v[0][3], v[1][3], v[2][3], v[3][3]);
}

// Outputs of planes to those that such operands give, and back.
DEVICE void to_bytes(float (&o)[4][H2]) {
#pragma unroll
  for (int i = 0; i < H2; i++) o[1][i] = 16.0f * o[1][i] + o[0][i], o[3][i] = 16.0f * o[3][i] + o[2][i];
}
DEVICE void to_planes(float (&o)[4][H2]) {
#pragma unroll
  for (int i = 0; i < H2; i++) o[1][i] = 0.0625f * (o[1][i] - o[0][i]), o[3][i] = 0.0625f * (o[3][i] - o[2][i]);
}

// Query channels 32 i + 8 part and on, two words, to 4 tiles.
DEVICE void store_query(u32 query, u32 i, u32 part, u32 n, float (&x)[8]) {
  u32 to = query + i / 2 * 4 * TILE + element(i % 2 * 8 + 2 * part, n);
#pragma unroll
  for (int j = 0; j < 8; j += 2) query_of_bytes(x[j], x[j + 1]);
#pragma unroll
  for (u32 plane = 0; plane < 4; plane++) sts32(to + plane * TILE, pack_half2(x[plane], x[4 + plane]));
}

// Operands of group g of two bf16 rows.
DEVICE void row_operands(u64 upper, u64 lower, u32 g, const Place& at, u32 (&a)[4][4]) {
  V4 x[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++) x[i] = global_16(i % 2 ? lower : upper, g * 64 + at.pair * 8 + i / 2 * 32);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    a[0][i] = halves(x[i].x << 16, x[i].z << 16), a[1][i] = halves(x[i].x, x[i].z);
    a[2][i] = halves(x[i].y << 16, x[i].w << 16), a[3][i] = halves(x[i].y, x[i].w);
    row_bytes(a[0][i], a[1][i]), row_bytes(a[2][i], a[3][i]);
  }
}

// First of the four channels whose outputs are planes o[0..3] of a word.
DEVICE u32 output_channel(u32 word, u32 group) { return 4 * (group * 64 + word); }
