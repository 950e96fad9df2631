// Rows in bf16: the window and the sinks. Operands come straight from global memory.

DEVICE u32 halves(u32 low, u32 high) {  // two bf16 in the upper 16 bits to float16
  return pack_half2(as_float(low & 0xffff0000), as_float(high & 0xffff0000));
}

DEVICE V4 global_16(u64 row, u32 channel) {
  return row ? *(const V4*)(row + channel * 2) : V4{0, 0, 0, 0};
}

// Addresses of rows 64 block ... of the sequence's bf16 tokens: the window's, then the sinks.
DEVICE void find_rows(const Arguments& p, const Place& at, int b, int block) {
  u32 i = thread_index() % 128;
  sync_named(1 + at.group, 128);  // the block before has been read
  if (i < 64) {
    int length = p.lengths[(i64)b * p.lengths_stride], page = p.sink_pages[(i64)b * p.sink_stride];
    int sinks = page >= 0 ? min(p.num_sinks, length) : 0, start = max(packed_length(p, b), sinks);
    int k = block * 64 + i, token = k < length - start ? start + k : k - (length - start);
    u64 row = 0;
    bool real = k < length - start + sinks;
    if (real) {
      i64 within = token;
      if (token >= sinks) {
        page = p.window_table[b * p.window_table_stride + token / p.window_page_size % p.window_width];
        within = token % p.window_page_size;
      }
      row = (u64)(p.window + page * p.window_page_stride + within * p.window_row_stride);
    }
    sts64(SHARED_BASE + AT_ROWS + at.group * 512 + i * 8, V2{(u32)row, (u32)(row >> 32)});
    sts32(SHARED_BASE + AT_TOKENS + at.group * 256 + i * 4, real ? token : 0x7fffffff);
  }
  sync_named(1 + at.group, 128);
}

DEVICE u64 row_address(const Place& at, u32 i) {
  V2 a = lds64(SHARED_BASE + AT_ROWS + at.group * 512 + i * 8);
  return (u64)a.y << 32 | a.x;
}

DEVICE void score_rows(const Place& at, float (&s)[H2]) {
  float odd[H2];
  u64 upper = row_address(at, at.warp * 16 + at.row), lower = row_address(at, at.warp * 16 + at.row + 8);
#pragma unroll
  for (int i = 0; i < H2; i++) s[i] = odd[i] = 0;
#pragma unroll 1
  for (u32 g = 0; g < 8; g++) {
    // 8 channels: the words 2 pair and 2 pair + 1 of the upper and the lower 8 words of the group
    u32 channel = g * 64 + at.pair * 8;
    V4 x[4] = {global_16(upper, channel), global_16(lower, channel), global_16(upper, channel + 32),
               global_16(lower, channel + 32)};
    u32 a[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[0][i] = halves(x[i].x << 16, x[i].z << 16), a[1][i] = halves(x[i].x, x[i].z);
      a[2][i] = halves(x[i].y << 16, x[i].w << 16), a[3][i] = halves(x[i].y, x[i].w);
    }
    settle(s), settle(odd);
    mma_fence(a);
    mma<1>(s, a[0], query_tile(g * 4));
    mma<1>(odd, a[1], query_tile(g * 4 + 1));
    mma<1>(s, a[2], query_tile(g * 4 + 2));
    mma<1>(odd, a[3], query_tile(g * 4 + 3));
    mma_commit();
    mma_wait<0>();
    settle(s), settle(odd);
  }
#pragma unroll
  for (int i = 0; i < H2; i++) s[i] += 16.0f * odd[i];  // odd planes of the query carry 1/16
#pragma unroll 1
  for (u32 k = 0; k < 4; k++) {
    u32 channel = LATENT + k * 16 + at.pair * 2, a[1][4];
    u32 x[4] = {upper ? *(const u32*)(upper + channel * 2) : 0, lower ? *(const u32*)(lower + channel * 2) : 0,
                upper ? *(const u32*)(upper + channel * 2 + 16) : 0, lower ? *(const u32*)(lower + channel * 2 + 16) : 0};
#pragma unroll
    for (int i = 0; i < 4; i++) a[0][i] = halves(x[i] << 16, x[i]);
    settle(s);
    mma_fence(a);
    mma<1>(s, a[0], query_tile(MEAN_TILE + k));
    mma_commit();
    mma_wait<0>();
    settle(s);
  }
  u32 tokens = SHARED_BASE + AT_TOKENS + at.group * 256 + (at.warp * 16 + at.row) * 4;
  int first = lds32(tokens), second = lds32(tokens + 32);
#pragma unroll
  for (int i = 0; i < H2; i++) {
    int limit = lds32(SHARED_BASE + AT_LIMIT + (i / 4 * 8 + at.pair * 2 + i % 2) * 4);
    if ((i & 2 ? second : first) > limit) s[i] = -INFINITE;
  }
}

DEVICE void value_rows(const Place& at, u32 buffer, float (&o)[2][4][H2]) {
  u32 probability = uniform(at.probability + buffer * (4 * TILE / 16));
#pragma unroll 1
  for (u32 k = 0; k < 4; k++) {
    u64 row[4];
#pragma unroll
    for (int i = 0; i < 4; i++) row[i] = row_address(at, k * 16 + at.pair * 2 + i / 2 * 8 + i % 2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 v[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {  // word + 8 (i % 2), tokens + 8 (i / 2)
        u32 bytes = (half * 64 + at.warp * 16 + at.row + i % 2 * 8) * 8;
        u64 r0 = row[i / 2 * 2], r1 = row[i / 2 * 2 + 1];
        V2 x = r0 ? *(const V2*)(r0 + bytes) : V2{0, 0}, y = r1 ? *(const V2*)(r1 + bytes) : V2{0, 0};
        v[0][i] = halves(x.x << 16, y.x << 16), v[1][i] = halves(x.x, y.x);
        v[2][i] = halves(x.y << 16, y.y << 16), v[3][i] = halves(x.y, y.y);
      }
      settle_output(o);
      add_values(o[half], v, probability, k);
      mma_wait<0>();
      settle_output(o);
    }
  }
}
