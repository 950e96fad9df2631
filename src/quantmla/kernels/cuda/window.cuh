// Rows in bf16: the window and the sinks. Operands come straight from global memory.

DEVICE void place_row(u32 i, const Row& row) {
  sts64(SHARED_BASE + AT_ROWS + i * 8, V2{(u32)row.address, (u32)(row.address >> 32)});
  sts32(SHARED_BASE + AT_TOKENS + i * 4, row.token);
}

// Addresses and tokens of the first 64 rows of every warpgroup, by 128 threads. All rows are on their way to L2 from here on,
// those of a window page by one instruction.
DEVICE void find_first_rows(const Arguments& p, const Window& w, int b) {
  int recent = w.length - w.start, rows = recent + w.sinks;
#pragma unroll 1
  for (int i = thread_index() % 128; i < max(rows, WARPGROUPS * 64); i += 128) {
    Row row = find_row(p, w, b, i);
    if (i < WARPGROUPS * 64) place_row(i, row);
    int within = row.token % p.window_page_size, run = i < recent ? min(p.window_page_size - within, recent - i) : w.sinks;
    if (i < rows && (i == 0 || i == recent || within == 0))
      prefetch_bytes((const void*)row.address, ((run - 1) * (u32)p.window_row_stride + LATENT + ROPE) * 2);
  }
}

// Those of rows 64 block to 64 block + 63.
DEVICE void find_rows(const Arguments& p, const Place& at, const Window& w, int b, int block) {
  u32 i = thread_index() % 128;
  meet(1 + at.group, 128);  // the block before has been read
  if (i < 64) place_row(at.group * 64 + i, find_row(p, w, b, block * 64 + i));
  meet(1 + at.group, 128);
}

DEVICE void score_rows(const Place& at, float (&s)[H2]) {
  u64 upper = row_address(at.group, at.warp * 16 + at.row), lower = row_address(at.group, at.warp * 16 + at.row + 8);
#pragma unroll
  for (int i = 0; i < H2; i++) s[i] = 0;
  V4 y[2][4];  // two groups are on their way
  load_row_group(upper, lower, at.pair, 0, y[0]), load_row_group(upper, lower, at.pair, 1, y[1]);
#pragma unroll 1
  for (u32 g = 0; g < 8; g += 2)
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      u32 tiles[4][4];
      row_operands(y[i], tiles);
      if (g < 6) load_row_group(upper, lower, at.pair, g + 2 + i, y[i]);
      add_row_products(at, tiles, g + i, s);
    }
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

struct RowValues {  // of 16 rows, a half of the channels: word + 8 (i % 2) and tokens + 8 (i / 2), token
  V2 x[4][2];
};

DEVICE void load_row_values(const Place& at, u32 k, u32 half, RowValues& to) {
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int token = 0; token < 2; token++)
      to.x[i][token] = global_8(row_address(at.group, k * 16 + at.pair * 2 + i / 2 * 8 + token),
                                output_channel(at.warp * 16 + at.row + i % 2 * 8, half));
}

// Both halves of the first 16 rows are there, or on their way; those of later rows are asked for early.
DEVICE void value_rows(const Place& at, u32 buffer, RowValues (&x)[2], float (&o)[2][4][H2]) {
  u32 probability = probabilities_at(at, buffer);
#pragma unroll 1
  for (u32 k = 0; k < 4; k++) {
    if (uniform(lds32(SHARED_BASE + AT_TOKENS + at.group * 256 + k * 64)) == 0x7fffffff) break;  // no more rows
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      u32 v[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        V2 first = x[half].x[i][0], second = x[half].x[i][1];
        v[0][i] = halves(first.x << 16, second.x << 16), v[1][i] = halves(first.x, second.x);
        v[2][i] = halves(first.y << 16, second.y << 16), v[3][i] = halves(first.y, second.y);
      }
      if (k < 3) load_row_values(at, k + 1, half, x[half]);
      add_values(o[half], v, probability, k);
      finish_values(o);
    }
  }
}
