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

// Operands of a group's two products: planes 0 and 2, then 1 and 3, of words 0 to 7 and of words 8 to 15.
DEVICE void mask_group(V4 x, u32, u32 (&a)[2][4]) {
  a[0][0] = lower_nibbles(x.x), a[0][1] = lower_nibbles(x.y), a[0][2] = lower_nibbles(x.z), a[0][3] = lower_nibbles(x.w);
  a[1][0] = upper_nibbles(x.x), a[1][1] = upper_nibbles(x.y), a[1][2] = upper_nibbles(x.z), a[1][3] = upper_nibbles(x.w);
}

// Operands of 16 tokens' products, one for each plane.
DEVICE void value_operands(V4 x, V4 s, u32 (&v)[4][4]) {
  u32 first_17 = times_17(s.y), second_17 = times_17(s.w);
  scale_in_place(x.x, s.x, s.y, first_17, v[0][0], v[1][0], v[2][0], v[3][0]);
  scale_in_place(x.y, s.x, s.y, first_17, v[0][1], v[1][1], v[2][1], v[3][1]);
  scale_in_place(x.z, s.z, s.w, second_17, v[0][2], v[1][2], v[2][2], v[3][2]);
  scale_in_place(x.w, s.z, s.w, second_17, v[0][3], v[1][3], v[2][3], v[3][3]);
}

struct FirstValues {  // operands of the first products, and what the next ones are made of
  u32 v[4][4];
  V4 next, next_scale;
};
DEVICE void first_values(const Place& at, u32 stage, u32 prepared, FirstValues& first) {
  u32 rows = stage + at.value_rows, scales = prepared + at.value_scales;
  V4 x = ldmatrix_transposed(rows), scale = lds128(scales);
  first.next = ldmatrix_transposed(rows + HALF), first.next_scale = lds128(scales + VALUE_STEP * VALUE_GROUP_BYTES);
  value_operands(x, scale, first.v);
}

// O[channel 4 word + plane][head] += V^T P; rows are words 64 half + 16 warp + row and + 8.
DEVICE void value_page(const Place& at, u32 stage, u32 prepared, u32 buffer, FirstValues& first, float (&o)[2][4][H2]) {
  u32 probability = probabilities_at(at, buffer);
  u32 rows = stage + at.value_rows, scales = prepared + at.value_scales;
  V4 next = first.next, next_scale = first.next_scale;
  add_values(o[0], first.v, probability, 0);
#pragma unroll
  for (u32 i = 1; i < 8; i++) {
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

// Query channels 8 part to 8 part + 7 of a group, two words, to tiles for packed keys; for bf16 rows too, if `rows`:
// one tile for each plane. Returns the sum of the former.
DEVICE float store_group(u32 keys, u32 planes, u32 part, u32 n, const float (&x)[8], bool rows) {
  float sum = 0;
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    u32 first = pack_half2(x[odd], x[2 + odd]), second = pack_half2(x[4 + odd], x[6 + odd]);
    TwoTerms one = two_terms(first), two = two_terms(second);
    u32 to = keys + odd * 2 * TILE + element8(4 * part, n);
    sts32(to, low_halves(one.high, two.high)), sts32(to + TILE, low_halves(one.low, two.low));
    sum += sum_of(one.both) + sum_of(two.both);
    u32 plane = planes + odd * TILE + element(2 * part, n);
    if (rows) sts32(plane, low_halves(first, second)), sts32(plane + 2 * TILE, high_halves(first, second));
  }
  return sum;
}

// A thread's 8 channels of group g of two bf16 rows: words 2 pair and 2 pair + 1 of the upper and of the lower 8 words.
DEVICE void load_row_group(u64 upper, u64 lower, u32 pair, u32 g, V4 (&x)[4]) {
  u32 channel = g * 64 + pair * 8;
  x[0] = global_16(upper, channel), x[1] = global_16(lower, channel);
  x[2] = global_16(upper, channel + 32), x[3] = global_16(lower, channel + 32);
}

// Operands of the query's four tiles of a group.
DEVICE void row_operands(const V4 (&x)[4], u32 (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    a[0][i] = halves(x[i].x << 16, x[i].z << 16), a[1][i] = halves(x[i].x, x[i].z);
    a[2][i] = halves(x[i].y << 16, x[i].w << 16), a[3][i] = halves(x[i].y, x[i].w);
  }
}

// First of the four channels whose outputs are planes o[half][0..3] of a word.
DEVICE u32 output_channel(u32 word, u32 half) { return 4 * (half * 64 + word); }

// Outputs are in units of 2^(shift - 24), of odd planes 16 times as much and the plane before.
#define SHIFTED 1
DEVICE float unit_of(int shift) { return as_float((u32)(127 + shift - 24) << 23); }
DEVICE float plane_factor(int plane) { return plane % 2 ? 16.0f : 1.0f; }
DEVICE void add_planes(float (&o)[4][H2], float sign) {
#pragma unroll
  for (int i = 0; i < H2; i++) o[1][i] += sign * o[0][i], o[3][i] += sign * o[2][i];
}
