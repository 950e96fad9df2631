// A tile of queries to shared memory, by the consumers: each warp 8 rows, four lanes a row.

#define EIGHTS ((LATENT + ROPE) / 32)  // 8 channels each, of a lane

template <int is_bf16> DEVICE void to_floats(const V4& from, float (&x)[8]) {
  u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[2 * i] = is_bf16 ? as_float(words[i] << 16) : half_low(words[i]);
    x[2 * i + 1] = is_bf16 ? as_float(words[i] & 0xffff0000) : half_high(words[i]);
  }
}

// Float16, with one power of two for all rows.
template <int is_bf16> DEVICE void store_row(const Arguments& p, const Place& at, u32 n, const V4 (&raw)[EIGHTS]) {
  float most = 0, x[8];
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
    to_floats<is_bf16>(raw[i], x);
#pragma unroll
    for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(x[j]));
  }
  for (int mask = 16; mask; mask >>= 1) most = fmaxf(most, shuffle_xor(most, mask));
  u32 largest = SHARED_BASE + AT_LARGEST;
  if (at.lane == 0) sts_float(largest + (at.group * 4 + at.warp) * 4, most);
  meet(ALL_CONSUMERS, CONSUMERS);
  for (int i = 0; i < 8; i++) most = fmaxf(most, lds_float(largest + i * 4));
  most *= fabsf(p.scale_log2);
  // largest magnitude in [2^8, 2^9)
  int exponent = most > 0 ? min(max((int)(as_bits(most) >> 23) - 127, -100), 100) : 8;
  float up = power(8 - exponent);
  u32 query = SHARED_BASE + AT_QUERY;
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
    to_floats<is_bf16>(raw[i], x);
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = x[j] * p.scale_log2 * up;
    if (i < LATENT / 32) {
      store_query(query, i, at.pair, n, x);
    } else {  // a band of rope, 4 channels a word: plane 2i of 8 words, then plane 2i + 1 of the same
      u32 to = query + (ROPE_TILE + (i - LATENT / 32) * 2) * TILE;
#pragma unroll
      for (int j = 0; j < 8; j += 2) query_of_bytes(x[j], x[j + 1]);
#pragma unroll
      for (u32 plane = 0; plane < 4; plane++)
        sts32(to + plane / 2 * TILE + element(plane % 2 * 8 + 2 * at.pair, n), pack_half2(x[plane], x[4 + plane]));
    }
  }
  if (at.pair == 0) sts_float(SHARED_BASE + AT_BOUND + n * 4, 0);
  if (n == 0) sts_float(SHARED_BASE + AT_FACTOR, power(exponent - 8));
}

DEVICE void stage_query(const Arguments& p, const Place& at, int b, int tile) {
  u32 n = (at.group * 4 + at.warp) * 8 + at.row;
  int row = tile * HEADS + (int)n;
  bool real = row < p.query_len * p.heads;
  V4 raw[EIGHTS];
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) raw[i] = V4{0, 0, 0, 0};
  if (real) {
    int query = row / p.heads, head = row % p.heads;
    const u16* latent = p.q_latent + b * p.latent_stride[0] + query * p.latent_stride[1] + head * p.latent_stride[2] + 8 * at.pair;
    const u16* rotary = p.q_rope + b * p.rope_stride[0] + query * p.rope_stride[1] + head * p.rope_stride[2] + 8 * at.pair;
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) raw[i] = *(const V4*)(i < LATENT / 32 ? latent + 32 * i : rotary + (32 * i - LATENT));
  }
  if (p.is_bf16) store_row<1>(p, at, n, raw);
  else store_row<0>(p, at, n, raw);
  int length = p.lengths[(i64)b * p.lengths_stride];
  if (at.pair == 0) sts32(SHARED_BASE + AT_LIMIT + n * 4, length - p.query_len + (real ? row / p.heads : p.query_len));
  fence_async_proxy();
}
