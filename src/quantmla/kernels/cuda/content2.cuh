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

// Operands of a group's two products: planes 0 and 4, 1 and 5; then 2 and 6, 3 and 7. Odd planes are 4 times as
// large, which the query makes good.
DEVICE void mask_group(V4 words, u32 g, u32 (&a)[2][4]) {
  u32 x = g % 2 ? words.z : words.x, y = g % 2 ? words.w : words.y;
  a[0][0] = x & 0x03030303, a[0][1] = y & 0x03030303, a[0][2] = x & 0x0c0c0c0c, a[0][3] = y & 0x0c0c0c0c;
  x >>= 4, y >>= 4;
  a[1][0] = x & 0x03030303, a[1][1] = y & 0x03030303, a[1][2] = x & 0x0c0c0c0c, a[1][3] = y & 0x0c0c0c0c;
}

struct FirstValues {  // what the first operands are made of
  V4 words;
};
DEVICE void first_values(const Place& at, u32 stage, u32, FirstValues& first) { first.words = ldmatrix_transposed(stage + at.value_rows); }

// O[channel 8 word + plane][head] += V^T P; rows are words 16 warp + row and + 8.
DEVICE void value_page(const Place& at, u32 stage, u32 prepared, u32 buffer, FirstValues& first, float (&o)[2][4][H2]) {
  u32 probability = probabilities_at(at, buffer);
  u32 rows = stage + at.value_rows, scales = prepared + at.value_scales;
  V4 next = first.words;
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

// Query channels 8 part to 8 part + 7 of a group, one word, to tiles for packed keys; for bf16 rows too, if `rows`. Returns
// the sum of the former.
DEVICE float store_group(u32 keys, u32 planes, u32 part, u32 n, const float (&x)[8], bool rows) {
  float sum = 0;
#pragma unroll
  for (int plane = 0; plane < 4; plane++) {
    u32 pair = pack_half2(x[plane], x[4 + plane]);
    TwoTerms both = two_terms(plane % 2 ? hmul2(pair, 0x34003400) : pair);
    u32 to = keys + plane / 2 * 2 * TILE + element8(plane % 2 * 16 + 2 * part, n);
    sts16(to, both.high), sts16(to + TILE, both.low);
    sum += (plane % 2 ? 4.0f : 1.0f) * sum_of(both.both);
    u32 row = planes + plane / 2 * TILE + element(plane % 2 * 8 + part, n);
    if (rows) sts16(row, pair), sts16(row + 2 * TILE, pair >> 16);
  }
  return sum;
}

// A thread's 16 channels of group g of two bf16 rows: words 2 pair and 2 pair + 1 of both.
DEVICE void load_row_group(u64 upper, u64 lower, u32 pair, u32 g, V4 (&x)[4]) {
  u32 channel = g * 64 + pair * 16;
  x[0] = global_16(upper, channel), x[1] = global_16(lower, channel);
  x[2] = global_16(upper, channel + 8), x[3] = global_16(lower, channel + 8);
}

// Operands of the query's four tiles of a group.
DEVICE void row_operands(const V4 (&x)[4], u32 (&a)[4][4]) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    V4 one = x[row], two = x[2 + row];
    u32 first[4] = {one.x, one.y, one.z, one.w}, second[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      a[tile][row] = halves(first[tile] << 16, second[tile] << 16);
      a[tile][2 + row] = halves(first[tile], second[tile]);
    }
  }
}

// First of the four channels whose outputs are planes o[half][0..3] of a word.
DEVICE u32 output_channel(u32 word, u32 half) { return 8 * word + 4 * half; }

// Outputs are in units of 2^(shift - 24), of plane k 4^k times as much and the plane before. Keys are plain.
#define SHIFTED 1
DEVICE float unit_of(int shift) { return as_float((u32)(127 + shift - 24) << 23); }
DEVICE float plane_factor(int plane) { return (float)(1 << 2 * plane); }
DEVICE void add_planes(float (&o)[4][H2], float sign) {
#pragma unroll
  for (int i = 0; i < 3 * H2; i++) {
    int plane = sign > 0 ? 1 + i / H2 : 3 - i / H2;
    o[plane][i % H2] += sign * o[plane - 1][i % H2];
  }
}
