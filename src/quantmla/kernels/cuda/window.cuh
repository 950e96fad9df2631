// Rows in bf16: the window and the sinks. Operands come straight from global memory.

// Addresses and tokens of rows 64 block to 64 block + 63.
DEVICE void find_rows(const Arguments& p, const Place& at, const Window& w, int b, int block) {
  u32 i = thread_index() % 128;
  sync_named(1 + at.group, 128);  // the block before has been read
  if (i < 64) {
    Row row = find_row(p, w, b, block * 64 + i);
    sts64(SHARED_BASE + AT_ROWS + at.group * 512 + i * 8, V2{(u32)row.address, (u32)(row.address >> 32)});
    sts32(SHARED_BASE + AT_TOKENS + at.group * 256 + i * 4, row.token);
  }
  sync_named(1 + at.group, 128);
}

DEVICE void score_rows(const Place& at, float (&s)[H2]) {
  float odd[H2];
  u64 upper = row_address(at.group, at.warp * 16 + at.row), lower = row_address(at.group, at.warp * 16 + at.row + 8);
#pragma unroll
  for (int i = 0; i < H2; i++) s[i] = odd[i] = 0;
  score_content_rows(at, upper, lower, s, odd);
#pragma unroll
  for (int i = 0; i < H2; i++) s[i] += odd[i] / ODD_QUERY;
  u32 x[4][4], a[4][4];
#pragma unroll
  for (int i = 0; i < 16; i++)
    x[i / 4][i % 4] = global_4(i % 2 ? lower : upper, LATENT + i / 4 * 16 + i / 2 % 2 * 8 + at.pair * 2);
#pragma unroll
  for (int i = 0; i < 16; i++) a[i / 4][i % 4] = halves(x[i / 4][i % 4] << 16, x[i / 4][i % 4]);
  settle(s);
  mma_fence(a);
#pragma unroll
  for (int k = 0; k < 4; k++) score_tile(at, s, a[k], MEAN_TILE + k);
  finish_scores(s);
  u32 tokens = SHARED_BASE + AT_TOKENS + at.group * 256 + (at.warp * 16 + at.row) * 4;
  int first = lds32(tokens), second = lds32(tokens + 32);
#pragma unroll
  for (int i = 0; i < H2; i++) {
    int limit = lds32(SHARED_BASE + AT_LIMIT + (i / 4 * 8 + at.pair * 2 + i % 2) * 4);
    if ((i & 2 ? second : first) > limit) s[i] = -INFINITE;
  }
}

DEVICE void value_rows(const Place& at, u32 buffer, float (&o)[2][4][H2]) {
  const u64* probability = probabilities_at(at, buffer);
#pragma unroll 1
  for (u32 k = 0; k < 4; k++) {
    V2 x[2][4][2];  // half, word + 8 (i % 2) and tokens + 8 (i / 2), token
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int token = 0; token < 2; token++) {
        u64 row = row_address(at.group, k * 16 + at.pair * 2 + i / 2 * 8 + token);
#pragma unroll
        for (int half = 0; half < 2; half++)
          x[half][i][token] = global_8(row, output_channel(at.warp * 16 + at.row + i % 2 * 8, half));
      }
    u32 v[2][4][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      V2 first = x[i / 4][i % 4][0], second = x[i / 4][i % 4][1];
      u32(&to)[4][4] = v[i / 4];
      to[0][i % 4] = halves(first.x << 16, second.x << 16), to[1][i % 4] = halves(first.x, second.x);
      to[2][i % 4] = halves(first.y << 16, second.y << 16), to[3][i % 4] = halves(first.y, second.y);
    }
    add_values(o[0], v[0], probability, k);
    add_values(o[1], v[1], probability, k);
    finish_values(o);
  }
}
