// Content of 4 bits: word j of a row holds channels 4j to 4j + 3, a group is 16 words.

// Integers are read in place as subnormal float16 numbers, n 2^-24 and, for odd planes, whole bytes, which
// are the plane before + 16 n. Scales carry the page's 2^shift, so that the largest is near 2^15 and
// products keep their bits; what is summed is in units of 2^(shift - 24).

// Entries {scale, -scale zero 2^-24} of two pairs of tokens, and of those 8 further.
DEVICE void prepare_values(u32 to, u32 warp, u32 quad, const Quads& x, Shift shift) {
  u32 entry = to + 2 * quad * VALUE_PAIR_BYTES + warp * 16;
  u32 scale[4] = {shifted(x.upper.x, shift), shifted(x.upper.y, shift), shifted(x.lower.x, shift), shifted(x.lower.y, shift)};
  sts128(entry, V4{scale[0], hmul2(scale[0], first_tiny(x.upper_zeros)), scale[2], hmul2(scale[2], first_tiny(x.lower_zeros))});
  sts128(entry + VALUE_PAIR_BYTES,
         V4{scale[1], hmul2(scale[1], second_tiny(x.upper_zeros)), scale[3], hmul2(scale[3], second_tiny(x.lower_zeros))});
}

DEVICE void scale_in_place(u32 x, u32 scale, u32 offset, u32 offset_17, u32& v0, u32& v1, u32& v2, u32& v3) {
  u32 n0, byte0, n2, byte1;
  mask_nibbles(x, n0, byte0, n2, byte1);
  v0 = hfma2(n0, scale, offset), v1 = hfma2(byte0, scale, offset_17);
  v2 = hfma2(n2, scale, offset), v3 = hfma2(byte1, scale, offset_17);
}
DEVICE u32 times_17(u32 x) { return hmul2(x, 0x4c404c40); }

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
struct RowScales {  // {scale, -scale zero 2^-24} of a thread's two tokens
  V2 upper, lower;
};
DEVICE RowScales read_row_scales(u32 from) {
  V4 x = lds128(from);
  return RowScales{V2{x.x, x.y}, V2{x.z, x.w}};
}
DEVICE void store_row_scales(u32 to, u32, V2 scale, V2 tiny, Shift shift) {
  u32 upper = shifted(scale.x, shift), lower = shifted(scale.y, shift);
  sts128(to, V4{upper, hmul2(upper, tiny.x), lower, hmul2(lower, tiny.y)});
}

// Operands of a group's four products, one for each plane.
DEVICE void scale_group(V4 x, const RowScales& row, u32, u32 (&a)[4][4]) {
  V2 upper = row.upper, lower = row.lower;
  u32 upper_17 = times_17(upper.y), lower_17 = times_17(lower.y);
  scale_in_place(x.x, upper.x, upper.y, upper_17, a[0][0], a[1][0], a[2][0], a[3][0]);
  scale_in_place(x.y, lower.x, lower.y, lower_17, a[0][1], a[1][1], a[2][1], a[3][1]);
  scale_in_place(x.z, upper.x, upper.y, upper_17, a[0][2], a[1][2], a[2][2], a[3][2]);
  scale_in_place(x.w, lower.x, lower.y, lower_17, a[0][3], a[1][3], a[2][3], a[3][3]);
}

// Operands of a band's two products: plane 2i of both rows, then plane 2i + 1.
DEVICE void scale_band(u32 x, u32 y, const RowScales& row, u32 (&a)[2][4]) {
  scale_in_place(x, row.upper.x, row.upper.y, times_17(row.upper.y), a[0][0], a[0][2], a[1][0], a[1][2]);
  scale_in_place(y, row.lower.x, row.lower.y, times_17(row.lower.y), a[0][1], a[0][3], a[1][1], a[1][3]);
}
#endif

// Operands of 16 tokens' products, one for each plane.
DEVICE void value_operands(V4 x, V4 s, u32 (&v)[4][4]) {
  u32 first_17 = times_17(s.y), second_17 = times_17(s.w);
  scale_in_place(x.x, s.x, s.y, first_17, v[0][0], v[1][0], v[2][0], v[3][0]);
  scale_in_place(x.y, s.x, s.y, first_17, v[0][1], v[1][1], v[2][1], v[3][1]);
  scale_in_place(x.z, s.z, s.w, second_17, v[0][2], v[1][2], v[2][2], v[3][2]);
  scale_in_place(x.w, s.z, s.w, second_17, v[0][3], v[1][3], v[2][3], v[3][3]);
}

// O[channel 4 word + plane][head] += V^T P; rows are words 64 half + 16 warp + row and + 8.
DEVICE void value_page(const Place& at, u32 stage, u32 prepared, u32 buffer, float (&o)[2][4][H2]) {
  const u64* probability = probabilities_at(at, buffer);
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
    value_operands(x, s, v);
    add_values(o[i % 2], v, probability, i / 2);
    if (i < 7) wait_for_values<1>();
  }
  finish_values(o);
}

// The same for one half of the words; operands are not made while products of others go on, for want of
// registers.
DEVICE void value_half_page(const Place& at, u32 half, u32 stage, u32 prepared, u32 buffer, float (&o)[4][H2]) {
  const u64* probability = probabilities_at(at, buffer);
  u32 rows = stage + at.value_rows + half * HALF, scales = prepared + at.value_scales + half * (VALUE_STEP * VALUE_GROUP_BYTES);
  V4 next = ldmatrix_transposed(rows), next_scale = lds128(scales);
#pragma unroll
  for (u32 k = 0; k < 4; k++) {
    V4 x = next, s = next_scale;
    if (k < 3) next = ldmatrix_transposed(rows + (k + 1) * 2048), next_scale = lds128(scales + (k + 1) * 16);
    u32 v[4][4];
    value_operands(x, s, v);
    add_values(o, v, probability, k);
    mma_wait<0>();
  }
#pragma unroll
  for (int plane = 0; plane < 4; plane++) settle(o[plane]);
}

// Query channels 8 part to 8 part + 7 of a group, two words: to 4 tiles, one for each plane. Those of
// odd planes carry 1/16, which is taken off the plane before. Returns the sum of the rounded values.
DEVICE float store_planes(u32 at, u32 part, u32 n, const float (&x)[8]) {
  float sum = 0;
#pragma unroll
  for (int plane = 0; plane < 4; plane += 2) {
    u32 to = at + plane * TILE + element(2 * part, n);
    u32 odd = pack_half2(x[plane + 1] * 0.0625f, x[plane + 5] * 0.0625f);
    u32 even = pack_half2(x[plane] - half_low(odd), x[plane + 4] - half_high(odd));
    sts32(to, even), sts32(to + TILE, odd);
    sum += half_low(even) + half_high(even) + 17 * (half_low(odd) + half_high(odd));
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
      to[0][i % 4] = halves(y.x << 16, y.z << 16), to[1][i % 4] = with_sixteenth(halves(y.x, y.z), to[0][i % 4]);
      to[2][i % 4] = halves(y.y << 16, y.w << 16), to[3][i % 4] = with_sixteenth(halves(y.y, y.w), to[2][i % 4]);
    }
    add_row_products(at, a, g, s, odd);
  }
}

// First of the four channels whose outputs are planes o[half][0..3] of a word.
DEVICE u32 output_channel(u32 word, u32 half) { return 4 * (half * 64 + word); }

// Outputs are in units of 2^(shift - 24), of odd planes 16 times as much and the plane before.
#define SHIFTED 1
DEVICE float unit_of(int shift) { return as_float((u32)(127 + shift - 24) << 23); }
DEVICE float key_unit(int shift) { return unit_of(shift); }
DEVICE float plane_factor(int plane) { return plane % 2 ? 16.0f : 1.0f; }
DEVICE void add_planes(float (&o)[4][H2], float sign) {
#pragma unroll
  for (int i = 0; i < H2; i++) o[1][i] += sign * o[0][i], o[3][i] += sign * o[2][i];
}
