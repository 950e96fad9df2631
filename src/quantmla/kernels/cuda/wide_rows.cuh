// Steps of 64 rows in bf16: the window and the sinks. Operands come straight from global memory.

DEVICE u32 rows_at(u32 step) { return SHARED_BASE + AT_ROWS + step % 2 * 512; }
DEVICE u32 tokens_at(u32 step) { return SHARED_BASE + AT_TOKENS + step % 2 * 256; }
DEVICE u64 row_address(u32 step, u32 i) {
  V2 a = lds64(rows_at(step) + i * 8);
  return (u64)a.y << 32 | a.x;
}

// Addresses and tokens of rows 64 block to 64 block + 63.
DEVICE void find_rows(const Arguments& p, const Place& at, const Window& w, int b, u32 step, int block) {
  await_freed(step_of(step));
  u32 i = thread_index() % 128;
  if (i < 64) {
    Row row = find_row(p, w, b, block * 64 + i);
    sts64(rows_at(step) + i * 8, V2{(u32)row.address, (u32)(row.address >> 32)});
    sts32(tokens_at(step) + i * 4, row.token);
  }
  meet(1 + at.group, 128);
}

DEVICE void score_rows(const Place& at, u32 step, float (&s)[H2]) {
  u64 upper = row_address(step, at.warp * 16 + at.row), lower = row_address(step, at.warp * 16 + at.row + 8);
#pragma unroll
  for (int i = 0; i < H2; i++) s[i] = 0;
#pragma unroll 1
  for (u32 g = 0; g < 8; g += 2) {
    u32 a[2][4][4];
    row_operands(upper, lower, g, at, a[0]), row_operands(upper, lower, g + 1, at, a[1]);
    settle(s);
    add_scores<0>(a[0], g, s), add_scores<0>(a[1], g + 1, s);
    mma_wait<0>();
    settle(s);
  }
  u32 a[2][2][4];
#pragma unroll
  for (u32 band = 0; band < 2; band++)
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      V4 x = global_16(i ? lower : upper, LATENT + band * 32 + at.pair * 8);
      a[band][0][i] = halves(x.x << 16, x.z << 16), a[band][0][2 + i] = halves(x.x, x.z);
      a[band][1][i] = halves(x.y << 16, x.w << 16), a[band][1][2 + i] = halves(x.y, x.w);
      row_bytes(a[band][0][i], a[band][0][2 + i]), row_bytes(a[band][1][i], a[band][1][2 + i]);
    }
  settle(s);
  mma_fence(a[0]), mma_fence(a[1]);
#pragma unroll
  for (u32 i = 0; i < 4; i++) mma<1>(s, a[i / 2][i % 2], query_tile(ROPE_TILE + i));
  mma_commit();
  mma_wait<0>();
  settle(s);
  u32 tokens = tokens_at(step) + (at.warp * 16 + at.row) * 4;
  int first = lds32(tokens), second = lds32(tokens + 32);
#pragma unroll
  for (int i = 0; i < H2; i++) {
    int limit = lds32(SHARED_BASE + AT_LIMIT + (i / 4 * 8 + at.pair * 2 + i % 2) * 4);
    s[i] = (i & 2 ? second : first) > limit ? -INFINITE : s[i] * ROWS_UNIT;
  }
}

DEVICE void value_rows(const Place& at, u32 step, float (&o)[4][H2]) {
  u32 probability = probability_tiles(step % 2);
#pragma unroll 1
  for (u32 k = 0; k < 4; k++) {
    V2 x[4][2];  // word + 8 (i % 2) and tokens + 8 (i / 2), token
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u64 row = row_address(step, k * 16 + at.pair * 2 + i / 4 * 8 + i % 2);
      x[i / 2][i % 2] = global_8(row, output_channel(at.warp * 16 + at.row + i / 2 % 2 * 8, at.group));
    }
    u32 v[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[0][i] = halves(x[i][0].x << 16, x[i][1].x << 16), v[1][i] = halves(x[i][0].x, x[i][1].x);
      v[2][i] = halves(x[i][0].y << 16, x[i][1].y << 16), v[3][i] = halves(x[i][0].y, x[i][1].y);
    }
    settle_output(o);
    add_values(o, v, probability, k);
    mma_wait<0>();
    settle_output(o);
  }
}

// Steps of the window, one after another: every other step's scores, and all steps' values.
DEVICE void attend_rows(const Arguments& p, const Place& at, const Window& w, int b, u32 first, u32 count, float (&o)[4][H2]) {
  u32 end = first + count;
  for (u32 step = first + ((first ^ at.group) & 1); step <= end; step += 2) {
    if (step < end) {
      float s[H2], x[H2];
      u32 probability[H2 / 2];
      find_rows(p, at, w, b, step, step - first);
      score_rows(at, step, s);
      if (step > first) await_published(step_of(step - 1));
      weigh(at, NO_SHIFT, s, x);
      bool raise = any_named(1 + at.group, 128, any_above(MOST, x) || step == first);
      if (raise) raise_bounds(at, step_of(step), step == first, x);
      exponentiate<0, HEADS / 8>(x, probability);
      publish(at, step_of(step), NO_SHIFT, raise, probability);
    }
    for (u32 other = 1; other < 2; other--) {  // values of the step before, then of this one
      u32 which = step - other;
      if (which < first || which >= end) continue;
      await_step(at, step_of(which), o);
      value_rows(at, which, o);
      leave_step(at, step_of(which));
    }
  }
}
