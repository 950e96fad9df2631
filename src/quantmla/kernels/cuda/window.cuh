// Rows in bf16: the window and the sinks. Operands come straight from global memory.

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

DEVICE void score_rows(const Place& at, float (&s)[H2]) {
  float odd[H2];
  u64 upper = row_address(at, at.warp * 16 + at.row), lower = row_address(at, at.warp * 16 + at.row + 8);
#pragma unroll
  for (int i = 0; i < H2; i++) s[i] = odd[i] = 0;
  score_content_rows(at, upper, lower, s, odd);
#pragma unroll
  for (int i = 0; i < H2; i++) s[i] += 16.0f * odd[i];  // their query carries 1/16
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
