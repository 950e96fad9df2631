// A tile of queries to shared memory: float16, each row with its own power of two. Half a warp brings a row, all rows at
// once. Run once for a part, this code costs what fetching it costs: it is short.

struct QueryRow {
  const u16 *latent, *rope;
};

DEVICE QueryRow query_row(const Arguments& p, int b, u32 row) {
  u32 query = row / (u32)p.heads, head = row % (u32)p.heads;
  return QueryRow{p.q_latent + b * p.latent_stride[0] + query * p.latent_stride[1] + head * p.latent_stride[2],
                  p.q_rope + b * p.rope_stride[0] + query * p.rope_stride[1] + head * p.rope_stride[2]};
}

// Rows of the queries on their way to L2: those of another sequence in every block.
DEVICE void prefetch_queries(const Arguments& p) {
#pragma unroll 1
  for (int b = block_index(); b < p.batch; b += block_count())
#pragma unroll 1
    for (int row = thread_index(); row < p.query_len * p.heads; row += THREADS) {
      QueryRow from = query_row(p, b, row);
      prefetch_bytes(from.latent, LATENT * 2), prefetch_bytes(from.rope, ROPE * 2);
    }
}

// Two values of 16 bits.
DEVICE V2 to_floats(u32 x, int is_bf16) {
  return is_bf16 ? V2{x << 16, x & 0xffff0000} : V2{as_bits(half_low(x)), as_bits(half_high(x))};
}

// Rows are aligned to 16 bytes.
DEVICE void store_query_row(const Arguments& p, int b, u32 n, int row, bool windowed) {
  u32 lane = thread_index() % 16, query = SHARED_BASE + AT_QUERY;
  bool real = row < p.query_len * p.heads;
  QueryRow from = query_row(p, b, real ? row : 0);
  const V4* latent = (const V4*)from.latent + lane;
  V4 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = latent[16 * i];
  V2 rope = ((const V2*)from.rope)[lane];
  int length = p.lengths[(i64)b * p.lengths_stride];

  const u32 magnitudes = 0x7fff7fff;  // ordered as integers are
  u32 most = max_u16x2(rope.x & magnitudes, rope.y & magnitudes);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    most = max_u16x2(most, max_u16x2(x[i].x & magnitudes, x[i].y & magnitudes));
    most = max_u16x2(most, max_u16x2(x[i].z & magnitudes, x[i].w & magnitudes));
  }
  for (int mask = 8; mask; mask >>= 1) most = max_u16x2(most, shuffle_xor((int)most, mask));
  float largest = as_float(to_floats(max(most & 0xffff, most >> 16), p.is_bf16).x);
  // Largest magnitude in [2^7, 2^8): it fits float8, and a sum of 64 float16. A power of two keeps all bits.
  int exponent = largest > 0 ? min(max((int)(as_bits(largest) >> 23) - 127, -100), 100) : 7;
  float factor = as_float((u32)(127 + 7 - exponent) << 23), down = fabsf(p.scale_log2) * as_float((u32)(127 - 7 + exponent) << 23);
  factor = !real ? 0 : p.scale_log2 < 0 ? -factor : factor;

  u32 group = lane / 8, sums = query + SUMS_TILE * TILE;
#pragma unroll 1
  for (u32 i = 0; i < 4; i++, group += 2, latent += 16) {
    V4 bits = *latent;  // from L1 now
    u32 word[4] = {bits.x, bits.y, bits.z, bits.w};
    float y[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      V2 two = to_floats(word[j], p.is_bf16);
      y[2 * j] = as_float(two.x) * factor, y[2 * j + 1] = as_float(two.y) * factor;
    }
    float sum = store_group(query + (KEY_TILE + group * 4) * TILE, query + group * 4 * TILE, lane % 8, n, y, windowed);
    for (int mask = 1; mask < 8; mask <<= 1) sum += shuffle_xor(sum, mask);
    if (lane % 8 == 0) sts16(sums + element(group, n), pack_half2(sum, 0));
  }

  V2 first = to_floats(rope.x, p.is_bf16), second = to_floats(rope.y, p.is_bf16);
  float even[2] = {as_float(first.x) * factor, as_float(second.x) * factor};
  float odd[2] = {as_float(first.y) * factor, as_float(second.y) * factor};
  u32 evens = pack_half2(even[0], even[1]), odds = pack_half2(odd[0], odd[1]);
  V2 as_is = {low_halves(evens, odds), high_halves(evens, odds)};
  sts64(query + (MEAN_TILE + lane / 4) * TILE + element(4 * lane % 16, n), as_is);
  // word `lane`: planes 0 and 2 of a band's 8 words, then planes 1 and 3
  u32 to = query + (ROPE_TILE + lane / 8 * 2) * TILE + element8(lane % 8 * 2, n);
  TwoTerms low = two_terms(evens), high = two_terms(odds);
  sts16(to, low.high), sts16(to + TILE, low.low);
  sts16(to + element8(16, 0), high.high), sts16(to + TILE + element8(16, 0), high.low);
  float sum = sum_of(low.both) + sum_of(high.both);
  for (int mask = 1; mask < 8; mask <<= 1) sum += shuffle_xor(sum, mask);
  if (lane % 8 == 0) sts16(sums + element(8 + lane / 8, n), pack_half2(sum, 0));
  if (lane == 0) {
    sts_float(SHARED_BASE + AT_FACTOR + n * 4, down);
    for (u32 g = 0; g < WARPGROUPS; g++) sts64(SHARED_BASE + AT_BOUND + (g * HEADS + n) * 8, V2{as_bits(down), as_bits(LOWEST)});
    sts32(SHARED_BASE + AT_LIMIT + n * 4, length - p.query_len + (real ? row / p.heads : p.query_len));
  }
}

// `windowed`: for bf16 rows too.
DEVICE void store_query(const Arguments& p, int b, int tile, bool windowed) {
#pragma unroll 1
  for (u32 n = thread_index() / 16; n < HEADS; n += CONSUMERS / 16) store_query_row(p, b, n, tile * HEADS + n, windowed);
}
