// Content of 2 bits: word j of a row holds channels 8j to 8j + 7, a group is 8 words. A k step of 16
// is plane 2i of a group's words, then plane 2i + 1.

// Values: integers are read in place as subnormal float16 numbers, n 2^-24 of a byte's first plane, and of the
// others what they are with those before: 4 n, 16 n, 64 n and the plane before. Scales carry the page's
// 2^shift, so that the largest is near 2^15; what is summed is in units of 2^(shift - 24).

// An entry {scale, -scale zero 2^-24, 5 and 21 times as much} of a pair of tokens.
DEVICE V4 value_entry(u32 scale, u32 tiny) {
  u32 offset = hmul2(scale, tiny);
  return V4{scale, offset, hmul2(offset, 0x45004500), hmul2(offset, 0x4d404d40)};
}

// Entries of two pairs of tokens, and of those 8 further.
DEVICE void prepare_values(u32 to, u32 warp, u32 quad, const Quads& x, Shift by) {
  u32 entry = to + 2 * quad * VALUE_PAIR_BYTES + warp * 32;
  sts128(entry, value_entry(shifted(x.upper.x, by), first_tiny(x.upper_zeros)));
  sts128(entry + 16, value_entry(shifted(x.lower.x, by), first_tiny(x.lower_zeros)));
  sts128(entry + VALUE_PAIR_BYTES, value_entry(shifted(x.upper.y, by), second_tiny(x.upper_zeros)));
  sts128(entry + VALUE_PAIR_BYTES + 16, value_entry(shifted(x.lower.y, by), second_tiny(x.lower_zeros)));
}

DEVICE void scale_byte(u32 byte, const V4& scale, u32 offset_85, u32 (&v)[4][4], int i) {
  v[0][i] = hfma2(byte & 0x00030003, scale.x, scale.y), v[1][i] = hfma2(byte & 0x000f000f, scale.x, scale.z);
  v[2][i] = hfma2(byte & 0x003f003f, scale.x, scale.w), v[3][i] = hfma2(byte, scale.x, offset_85);
}

// Words of groups 2i and 2i + 1, as operands want them.
#define GROUPS_A_LOAD 2
DEVICE V4 load_groups(u32 rows, u32 i) { return ldmatrix(rows ^ (i * 32)); }

#if FOLDED
// Planes 0 to 6 in place, read as n 4^(p % 4) 2^-24, which the query makes good; the upper byte stands for plane 7.
DEVICE void mask_crumbs(u32 x, u32& n0, u32& n1, u32& n2, u32& n3, u32& n4, u32& n5, u32& n6, u32& n7) {
  u32 y = permute(x, 0, 0x4341);
  n0 = x & 0x00030003, n1 = x & 0x000c000c, n2 = x & 0x00300030, n3 = x & 0x00c000c0;
  n4 = y & 0x00030003, n5 = y & 0x000c000c, n6 = y & 0x00300030, n7 = y;
}

// Operands of a group's four products: plane 2i of both rows, then plane 2i + 1.
DEVICE void mask_group(V4 words, u32 g, u32 (&a)[4][4]) {
  u32 x = g % 2 ? words.z : words.x, y = g % 2 ? words.w : words.y;
  mask_crumbs(x, a[0][0], a[0][2], a[1][0], a[1][2], a[2][0], a[2][2], a[3][0], a[3][2]);
  mask_crumbs(y, a[0][1], a[0][3], a[1][1], a[1][3], a[2][1], a[2][3], a[3][1], a[3][3]);
}
#endif

#if !FOLDED
// M + n by one OR: M is 16 or 4 where the field lies at bits 6 or 8. (Bits 4 need fewer shifts, but
// M = 64 would round off four times as much.)
#define SCALED_16(word) hfma2(and_or(word, 0x00c000c0, 0x4c004c00), scale.x, scale.y)
#define SCALED_4(word) hfma2(and_or(word, 0x03000300, 0x44004400), scale.x, scale.z)

DEVICE void scale_crumbs(u32 x, const V4& scale, u32 (&v)[8]) {
  u32 left = x << 4, right = x >> 4;
  v[0] = SCALED_16(x << 6), v[1] = SCALED_16(left), v[2] = SCALED_4(left), v[3] = SCALED_16(x);
  v[4] = SCALED_4(x), v[5] = SCALED_16(right), v[6] = SCALED_4(right), v[7] = SCALED_4(x >> 6);
}

DEVICE u32 times_2_to_24(u32 x) { return hmul2(hmul2(x, 0x6c006c00), 0x6c006c00); }
// 64 + n by one OR, then one FMA.
DEVICE void scale_nibbles(u32 x, u32 scale, u32 offset, u32& v0, u32& v1, u32& v2, u32& v3) {
  v0 = hfma2(and_or(x << 4, 0x00f000f0, 0x54005400), scale, offset);
  v1 = hfma2(and_or(x, 0x00f000f0, 0x54005400), scale, offset);
  v2 = hfma2(and_or(x >> 4, 0x00f000f0, 0x54005400), scale, offset);
  v3 = hfma2(and_or(x >> 8, 0x00f000f0, 0x54005400), scale, offset);
}

struct RowScales {  // entries of a thread's two tokens; of the rope's bands {scale, -scale (64 + zero)}
  V4 upper, lower;
};
DEVICE RowScales read_row_scales(u32 from) { return RowScales{lds128(from), lds128(from + 16)}; }
// {scale, -scale (16 + zero), -scale (4 + zero), unused}
DEVICE V4 crumbs_entry(u32 scale, u32 minus) {
  return V4{scale, hmul2(scale, hsub2(minus, 0x4c004c00)), hmul2(scale, hsub2(minus, 0x44004400)), 0};
}
DEVICE V4 nibbles_entry(u32 scale, u32 minus) { return V4{scale, hmul2(scale, hsub2(minus, 0x54005400)), 0, 0}; }
DEVICE void store_row_scales(u32 to, u32 group, V2 scale, V2 tiny, Shift) {
  u32 upper = times_2_to_24(tiny.x), lower = times_2_to_24(tiny.y);
  sts128(to, group < 8 ? crumbs_entry(scale.x, upper) : nibbles_entry(scale.x, upper));
  sts128(to + 16, group < 8 ? crumbs_entry(scale.y, lower) : nibbles_entry(scale.y, lower));
}

// Operands of a band's two products: plane 2i of both rows, then plane 2i + 1.
DEVICE void scale_band(u32 x, u32 y, const RowScales& row, u32 (&a)[2][4]) {
  scale_nibbles(x, row.upper.x, row.upper.y, a[0][0], a[0][2], a[1][0], a[1][2]);
  scale_nibbles(y, row.lower.x, row.lower.y, a[0][1], a[0][3], a[1][1], a[1][3]);
}

// Operands of a group's four products: plane 2i of both rows, then plane 2i + 1.
DEVICE void scale_group(V4 words, const RowScales& row, u32 g, u32 (&a)[4][4]) {
  u32 v[8];
#pragma unroll
  for (int lower = 0; lower < 2; lower++) {
    scale_crumbs(lower ? (g % 2 ? words.w : words.y) : g % 2 ? words.z : words.x, lower ? row.lower : row.upper, v);
#pragma unroll
    for (int plane = 0; plane < 8; plane++) a[plane / 2][plane % 2 * 2 + lower] = v[plane];
  }
}
#endif

// O[channel 8 word + plane][head] += V^T P; rows are words 16 warp + row and + 8.
DEVICE void value_page(const Place& at, u32 stage, u32 prepared, u32 buffer, float (&o)[2][4][H2]) {
  const u64* probability = probabilities_at(at, buffer);
  u32 rows = stage + at.value_rows, scales = prepared + at.value_scales;
  V4 next = ldmatrix_transposed(rows);
#pragma unroll
  for (u32 k = 0; k < 4; k++) {
    V4 x = next;
    u32 low[4][4], high[4][4];
    u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      V4 scale = lds128(scales + i % 2 * (VALUE_STEP * VALUE_GROUP_BYTES) + k * 32 + i / 2 * 16);
      u32 offset_85 = hfma2(scale.w, 0x44004400, scale.y);
      scale_byte(words[i] & 0x00ff00ff, scale, offset_85, low, i);
      scale_byte(permute(words[i], 0, 0x4341), scale, offset_85, high, i);
    }
    if (k < 3) next = ldmatrix_transposed(rows + (k + 1) * 2048);
    add_values(o[0], low, probability, k);
    add_values(o[1], high, probability, k);
    if (k < 3) wait_for_values<1>();
  }
  finish_values(o);
}

// Query channels 8 part to 8 part + 7 of a group, one word: to 4 tiles. If bytes stand for plane 7, its share
// is taken off planes 4 to 6. Returns the sum of the rounded values.
DEVICE float store_planes(u32 at, u32 part, u32 n, const float (&x)[8]) {
  float sum = 0, last = 0;
#pragma unroll
  for (int plane = 7; plane >= 0; plane--) {
    float up = FOLDED ? (float)(1 << 2 * (plane % 4)) : 1.0f;
    u32 one = pack_half2(x[plane] / up - (plane >= 4 ? last : 0), 0);
    sts16(at + plane / 2 * TILE + element(part + plane % 2 * 8, n), one);
    sum += (FOLDED && plane == 7 ? 85 : up) * half_low(one);
    if (FOLDED && plane == 7) last = half_low(one);
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
        a[i / 2][tile][2 + i % 2] = halves(first[tile], second[tile]);
        if (FOLDED) a[i / 2][tile][2 + i % 2] = hmul2(a[i / 2][tile][2 + i % 2], 0x44004400);  // the query carries 1/4 more
      }
      if (FOLDED) {  // plane 7, and what its query takes off planes 4 to 6
        u32(&to)[4][4] = a[i / 2];
        u32 others = with_sixteenth(with_sixteenth(to[3][i % 2], to[2][2 + i % 2]), to[2][i % 2]);
        to[3][2 + i % 2] = hfma2(others, 0x3c003c00, to[3][2 + i % 2]);
      }
    }
    add_row_products(at, a, g, s, odd);
  }
}

// First of the four channels whose outputs are planes o[half][0..3] of a word.
DEVICE u32 output_channel(u32 word, u32 half) { return 8 * word + 4 * half; }

// Outputs are in units of 2^(shift - 24), of plane k 4^k times as much and the plane before. Keys are plain.
#define SHIFTED 1
DEVICE float unit_of(int shift) { return as_float((u32)(127 + shift - 24) << 23); }
DEVICE float key_unit(int) { return 1.0f; }
DEVICE float plane_factor(int plane) { return (float)(1 << 2 * plane); }
DEVICE void add_planes(float (&o)[4][H2], float sign) {
#pragma unroll
  for (int i = 0; i < 3 * H2; i++) {
    int plane = sign > 0 ? 1 + i / H2 : 3 - i / H2;
    o[plane][i % H2] += sign * o[plane - 1][i % H2];
  }
}
