// What is the same for every width of content, and for folded and direct scores.

// A producer's lane has 4 tokens of a group, and those 8 further.
struct Quads {
  V2 upper, lower;  // scales
  u32 upper_zeros, lower_zeros;
};

// -zero of tokens 0, 1 and of tokens 2, 3: as it is, and 2^-24 of it.
DEVICE u32 first_minus(u32 z) { return hsub2(0x64006400, permute(z, 0x64646464, 0x4140)); }
DEVICE u32 second_minus(u32 z) { return hsub2(0x64006400, permute(z, 0x64646464, 0x4342)); }
DEVICE u32 first_tiny(u32 z) { return permute(z, 0x80808080, 0x4140); }
DEVICE u32 second_tiny(u32 z) { return permute(z, 0x80808080, 0x4342); }

struct Shift {  // 2^shift in two float16 factors
  u32 first, second;
};
DEVICE u32 shifted(u32 x, Shift by) { return hmul2(hmul2(x, by.first), by.second); }

DEVICE void read_means(const Place& at, u32 prepared, float (&s)[H2]) {
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V2 m = lds64(prepared + at.means + j * 32);
    s[4 * j] = s[4 * j + 2] = as_float(m.x), s[4 * j + 1] = s[4 * j + 3] = as_float(m.y);
  }
}

// Subnormal float16 numbers: n 2^-24 of lower nibbles, and (n + 16 m) 2^-24 of whole bytes. A byte stands for
// its upper nibble m: that saves a mask, and who sums up takes n off once, from the query or from the output.
DEVICE void mask_nibbles(u32 x, u32& n0, u32& byte0, u32& n2, u32& byte1) {
  n0 = x & 0x000f000f, byte0 = x & 0x00ff00ff;
  byte1 = permute(x, 0, 0x4341), n2 = byte1 & 0x000f000f;
}
// What bf16 rows want beside the query of a byte, which has no n.
DEVICE u32 with_sixteenth(u32 upper, u32 lower) { return hfma2(lower, 0x2c002c00, upper); }

// ---- bf16 rows

DEVICE u64 row_address(u32 group, u32 i) {
  V2 a = lds64(SHARED_BASE + AT_ROWS + group * 512 + i * 8);
  return (u64)a.y << 32 | a.x;
}

// Groups g and g + 1 of bf16 rows; tiles 1 and 3 of a group may carry 1/16, and have their own sum.
DEVICE void add_row_products(const Place& at, u32 (&a)[2][4][4], u32 g, float (&s)[H2], float (&odd)[H2]) {
  settle(s), settle(odd);
  mma_fence(a[0]), mma_fence(a[1]);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    score_tile(at, s, a[i / 4][i % 4], g * 4 + i);
    score_tile(at, odd, a[i / 4][i % 4 + 1], g * 4 + i + 1);
  }
  finish_scores(s), finish_scores(odd);
}
