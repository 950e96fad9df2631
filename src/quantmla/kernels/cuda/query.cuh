// A tile of queries to shared memory.

DEVICE float to_float(u32 bits16, int is_bf16) { return is_bf16 ? as_float(bits16 << 16) : half_low(bits16); }

struct QueryRow {  // a lane's 18 channels, as they are in memory
  V4 low, high;
  u32 rope;
};

// Rows are aligned to 16 bytes.
DEVICE QueryRow read_query_row(const Arguments& p, u32 lane, int b, int row) {
  if (row >= p.query_len * p.heads) return QueryRow{V4{0, 0, 0, 0}, V4{0, 0, 0, 0}, 0};
  int query = row / p.heads, head = row % p.heads;
  const u16* latent = p.q_latent + b * p.latent_stride[0] + query * p.latent_stride[1] + head * p.latent_stride[2];
  const u16* rotary = p.q_rope + b * p.rope_stride[0] + query * p.rope_stride[1] + head * p.rope_stride[2];
  return QueryRow{*(const V4*)(latent + 8 * lane), *(const V4*)(latent + 256 + 8 * lane), *(const u32*)(rotary + 2 * lane)};
}

DEVICE void to_floats(V4 from, int is_bf16, float scale, float (&x)[8]) {
  u32 word[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = to_float(i % 2 ? word[i / 2] >> 16 : word[i / 2] & 0xffff, is_bf16) * scale;
}

// One warp brings one row of the query to shared memory: float16 with its own power of two.
DEVICE void store_query_row(const Arguments& p, const Place& at, int b, u32 n, int row, const QueryRow& from) {
  float low[8], high[8];
  u32 lane = at.lane;
  bool real = row < p.query_len * p.heads;
  to_floats(from.low, p.is_bf16, p.scale_log2, low), to_floats(from.high, p.is_bf16, p.scale_log2, high);
  float rope[2] = {to_float(from.rope & 0xffff, p.is_bf16) * p.scale_log2, to_float(from.rope >> 16, p.is_bf16) * p.scale_log2};
  float most = fmaxf(fabsf(rope[0]), fabsf(rope[1]));
  for (int i = 0; i < 8; i++) most = fmaxf(most, fmaxf(fabsf(low[i]), fabsf(high[i])));
  for (int mask = 16; mask; mask >>= 1) most = fmaxf(most, shuffle_xor(most, mask));
  // largest magnitude in [2^8, 2^9): a sum of 64 fits float16
  int exponent = most > 0 ? min(max((int)(as_bits(most) >> 23) - 127, -100), 100) : 8;
  float up = as_float((u32)(127 + 8 - exponent) << 23), down = as_float((u32)(127 - 8 + exponent) << 23);
  for (int i = 0; i < 8; i++) low[i] *= up, high[i] *= up;
  rope[0] *= up, rope[1] *= up;

  u32 query = SHARED_BASE + AT_QUERY, group = lane / 8;
  float sum_low = store_planes(query + group * 4 * TILE, lane % 8, n, low);
  float sum_high = store_planes(query + (4 + group) * 4 * TILE, lane % 8, n, high);

  u32 as_is = pack_half2(rope[0], rope[1]);
  sts32(query + (MEAN_TILE + lane / 8) * TILE + element(2 * lane % 16, n), as_is);
  // channel 4 word + plane; a k step is plane 2i of 8 words, then plane 2i + 1 of the same
  u32 word = lane / 2, pair = query + (ROPE_TILE + word / 8 * 2 + lane % 2) * TILE;
  u32 odd = pack_half2(rope[1] * ODD_QUERY, 0);
  u32 even = BYTES ? pack_half2(rope[0] - half_low(odd), 0) : as_is;
  sts16(pair + element(word % 8, n), even);
  sts16(pair + element(8 + word % 8, n), odd);
  float sum_rope = half_low(even) + half_low(odd) * (BYTES ? 17 : 1);

  for (int mask = 1; mask < 8; mask <<= 1) {
    sum_low += shuffle_xor(sum_low, mask), sum_high += shuffle_xor(sum_high, mask);
    sum_rope += shuffle_xor(sum_rope, mask);
  }
  sum_rope += shuffle_xor(sum_rope, 8);
  u32 sums = query + SUMS_TILE * TILE;
  if (lane % 8 == 0) {
    sts16(sums + element(group, n), pack_half2(sum_low, 0));
    sts16(sums + element(4 + group, n), pack_half2(sum_high, 0));
  }
  if (lane % 16 == 0) sts16(sums + element(8 + lane / 16, n), pack_half2(sum_rope, 0));
  if (lane == 0) {
    sts_float(SHARED_BASE + AT_FACTOR + n * 4, down);
    int length = p.lengths[(i64)b * p.lengths_stride];
    sts32(SHARED_BASE + AT_LIMIT + n * 4, length - p.query_len + (real ? row / p.heads : p.query_len));
  }
}

// A tile of queries; two rows of a warp are on their way at once.
DEVICE void store_query(const Arguments& p, const Place& at, int b, int tile) {
  const u32 warps = CONSUMERS / 32;
#pragma unroll 1
  for (u32 n = thread_index() / 32; n < HEADS; n += 2 * warps) {
    int row = tile * HEADS + n;
    QueryRow first = read_query_row(p, at.lane, b, row), second = first;
    if (n + warps < HEADS) second = read_query_row(p, at.lane, b, row + warps);
    store_query_row(p, at, b, n, row, first);
    if (n + warps < HEADS) store_query_row(p, at, b, n + warps, row + warps, second);
  }
}
