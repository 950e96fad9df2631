// The end of a part.

struct Output {
  int sequence, tile;
  i64 slot;    // of part_out and part_lse
  bool whole;  // there is no other part: `out` and `lse` instead
};

// Writes the part's normalised output, or the sequence's if it is whole. Run once, this code costs what
// fetching it costs: it is short.
DEVICE void finish(const Arguments& p, const Place& at, const Output& to, float (&o)[4][H2]) {
  meet_apart(SUMS_DONE, CONSUMERS + 32);
  int rows = p.query_len * p.heads, n = thread_index(), row = to.tile * HEADS + n;
  u32 factors = SHARED_BASE + AT_LIMIT;
  if (n < HEADS) {
    float sum = lds_float(SHARED_BASE + AT_SUM + n * 4), most = lds_float(SHARED_BASE + AT_BOUND + n * 4);
    float lse = sum == 0 ? -INFINITE : most + log2_fast(sum);
    sts_float(factors + n * 4, sum == 0 ? 0 : power(24 - OUTPUT_SHIFT) / sum);
    if (!to.whole) p.part_lse[to.slot * HEADS + n] = lse;
    else if (row < rows) p.lse[(i64)to.sequence * rows + row] = lse * 0.6931471805599453f;
  }
  meet(ALL_CONSUMERS, CONSUMERS);
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V2 f = lds64(factors + (j * 8 + at.pair * 2) * 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      o[i][4 * j] *= as_float(f.x), o[i][4 * j + 1] *= as_float(f.y);
      o[i][4 * j + 2] *= as_float(f.x), o[i][4 * j + 3] *= as_float(f.y);
    }
  }
  const int down = output_channel(8, 0);  // from a row to the one 8 below
  u32 channel = output_channel(at.warp * 16 + at.row, at.group);
  row = to.tile * HEADS + (int)at.pair * 2;
  u16* part = p.part_out + (to.slot * HEADS + at.pair * 2) * LATENT + channel;
  u16* out = p.out + ((i64)to.sequence * rows + row) * LATENT + channel;
#pragma unroll
  for (int k = 0; k < H2; k++) {
    int head = k / 4 * 8 + k % 2, away = head * LATENT + (k & 2 ? down : 0);
    float x0 = o[0][k], x1 = o[1][k], x2 = o[2][k], x3 = o[3][k];
    if (!to.whole) {
      stg64(part + away, V2{pack_half2(x0, x1), pack_half2(x2, x3)});
    } else if (row + head < rows) {
      V2 packed = p.is_bf16 ? V2{pack_bf162(x0, x1), pack_bf162(x2, x3)} : V2{pack_half2(x0, x1), pack_half2(x2, x3)};
      *(V2*)(out + away) = packed;
    }
  }
}
