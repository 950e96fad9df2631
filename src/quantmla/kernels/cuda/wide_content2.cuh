// Content of 2 bits: word j of a row holds channels 8j to 8j + 7, a group is 8 words. A k step of 16
// is plane 2i of a group's words, then plane 2i + 1.

// 4 crumbs of two tokens' bytes, each with those below in its byte: scale * n - scale * zero, for offsets 1, 5, 21
// and 85 times as much.
DEVICE void scale_crumbs(u32 byte, u32 scale, const u32 (&offset)[4], u32& v0, u32& v1, u32& v2, u32& v3) {
  v0 = hfma2(byte & 0x00030003, scale, offset[0]), v1 = hfma2(byte & 0x000f000f, scale, offset[1]);
  v2 = hfma2(byte & 0x003f003f, scale, offset[2]), v3 = hfma2(byte, scale, offset[3]);
}
DEVICE u32 times_85(u32 offset, u32 offset_21) { return hfma2(offset_21, 0x44004400, offset); }
DEVICE u32 lower_bytes(u32 x) { return x & 0x00ff00ff; }
DEVICE u32 upper_bytes(u32 x) { return permute(x, 0, 0x4341); }

struct Start {  // of a page's scores: operands of the first group
  u32 a[4][4];
};

DEVICE void unpack_row(u32 x, RowScale r, int row, u32 (&a)[4][4]) {
  u32 scale = twice_low(r.pair), first = twice_high(r.pair), third = twice_high(r.more);
  u32 offset[4] = {first, twice_low(r.more), third, times_85(first, third)};
  scale_crumbs(lower_bytes(x), scale, offset, a[0][row], a[0][2 + row], a[1][row], a[1][2 + row]);
  scale_crumbs(upper_bytes(x), scale, offset, a[2][row], a[2][2 + row], a[3][row], a[3][2 + row]);
}

DEVICE void unpack_keys(u32 upper, u32 lower, const RowScales& scale, u32 (&a)[4][4]) {
  unpack_row(upper, scale.upper, 0, a), unpack_row(lower, scale.lower, 1, a);
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

struct Words {  // of 16 tokens, for values, and where their scales are
  V4 x;
  u32 scales;
};

DEVICE Words load_words(const Place& at, u32 stage, u32 prepared, u32 k) {
  return Words{ldmatrix_transposed(stage + at.value_rows + k * 2048), prepared + at.value_scales + k * (4 * VALUE_PAIR_BYTES)};
}

// Operands of O[channel 8 word + 4 group + plane][head] += V^T P; rows are words 16 warp + row and + 8.
DEVICE void unpack_words(const Place& at, const Words& w, u32 (&v)[4][4]) {
  u32 words[4] = {w.x.x, w.x.y, w.x.z, w.x.w}, own = at.group ? 0x4341 : 0x4240;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    V4 s = lds128(w.scales + i % 2 * VALUE_GROUP_BYTES + i / 2 * 16);
    u32 offset[4] = {s.y, s.z, s.w, times_85(s.y, s.w)};
    scale_crumbs(permute(words[i], 0, own), s.x, offset, v[0][i], v[1][i], v[2][i], v[3][i]);
  }
}

// Outputs of planes to those that such operands give, and back.
DEVICE void to_bytes(float (&o)[4][H2]) {
#pragma unroll
  for (int i = 0; i < H2; i++)
    o[1][i] = 4.0f * o[1][i] + o[0][i], o[2][i] = 16.0f * o[2][i] + o[1][i], o[3][i] = 64.0f * o[3][i] + o[2][i];
}
DEVICE void to_planes(float (&o)[4][H2]) {
#pragma unroll
  for (int i = 0; i < H2; i++)
    o[3][i] = (o[3][i] - o[2][i]) / 64.0f, o[2][i] = (o[2][i] - o[1][i]) / 16.0f, o[1][i] = (o[1][i] - o[0][i]) / 4.0f;
}

// Query channels 32 i + 8 part and on, one word, to 4 tiles.
DEVICE void store_query(u32 query, u32 i, u32 part, u32 n, float (&x)[8]) {
  u32 to = query + i / 2 * 4 * TILE;
#pragma unroll
  for (u32 j = 0; j < 8; j += 4) {  // for crumbs with those below
    x[j + 1] /= 4.0f, x[j + 2] /= 16.0f, x[j + 3] /= 64.0f;
    x[j] -= x[j + 1], x[j + 1] -= x[j + 2], x[j + 2] -= x[j + 3];
  }
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
#pragma unroll
    for (int tile = 0; tile < 4; tile += 2) {  // 1/64 of crumbs with those below
      a[tile][i] = hmul2(a[tile][i], 0x24002400), a[tile][2 + i] = hfma2(a[tile][2 + i], 0x2c002c00, a[tile][i]);
      a[tile + 1][i] = hfma2(a[tile + 1][i], 0x34003400, a[tile][2 + i]), a[tile + 1][2 + i] = hadd2(a[tile + 1][2 + i], a[tile + 1][i]);
    }
  }
}

// First of the four channels whose outputs are planes o[0..3] of a word.
DEVICE u32 output_channel(u32 word, u32 group) { return 8 * word + 4 * group; }
