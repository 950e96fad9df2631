// What is the same for every width of content.

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
    V4 m = lds128(prepared + at.means + j * 64);
    s[4 * j] = as_float(m.x), s[4 * j + 1] = as_float(m.y), s[4 * j + 2] = as_float(m.z), s[4 * j + 3] = as_float(m.w);
  }
}

// Float8 numbers n 2^-9: up to 15 an integer's bits are those of as many of the smallest number.
DEVICE u32 lower_nibbles(u32 x) { return x & 0x0f0f0f0f; }
DEVICE u32 upper_nibbles(u32 x) { return x >> 4 & 0x0f0f0f0f; }

// ---- the query

struct TwoTerms {  // of two numbers: each the sum of two of float8
  u32 high, low, both;  // `both`: the sums, in float16
};
// Of float16 numbers. Exact for 8 bits of a number, so for bf16, down to 2^-9 of 2^8; below that to 2^-10.
DEVICE TwoTerms two_terms(u32 x) {
  u32 high = pack_float8(x), first = float8_halves(high), low = pack_float8(hsub2(x, first));
  return TwoTerms{high, low, hadd2(first, float8_halves(low))};
}
DEVICE float sum_of(u32 halves) { return half_low(halves) + half_high(halves); }
DEVICE u32 low_halves(u32 x, u32 y) { return permute(x, y, 0x5410); }
DEVICE u32 high_halves(u32 x, u32 y) { return permute(x, y, 0x7632); }

// ---- bf16 rows

DEVICE u64 row_address(u32 group, u32 i) {
  V2 a = lds64(SHARED_BASE + AT_ROWS + group * 512 + i * 8);
  return (u64)a.y << 32 | a.x;
}

// Group g of bf16 rows.
DEVICE void add_row_products(const Place& at, u32 (&a)[4][4], u32 g, float (&s)[H2]) {
  settle(s);
  mma_fence(a);
#pragma unroll
  for (int i = 0; i < 4; i++) score_tile(at, s, a[i], g * 4 + i);
  finish_scores(s);
}
