// The end of a part.

// Merges the warpgroups' sums; writes the part's normalised output, or the sequence's if it is whole.
struct Output {
  int sequence, tile;
  i64 slot;    // of part_out and part_lse
  bool whole;  // there is no other part: `out` and `lse` instead
};

// The factor of a warpgroup's outputs in column n, and the LSE, by a thread for each of both. `units`: what outputs are to be
// multiplied by.
DEVICE void combine_sums(const Arguments& p, const Output& to, u32 group, u32 n, u32 units, u32 factors) {
  float most = LOWEST, total = 0, bound[WARPGROUPS];
#pragma unroll
  for (u32 g = 0; g < WARPGROUPS; g++) {
    bound[g] = lds_float(SHARED_BASE + AT_BOUND + (g * HEADS + n) * 8 + 4);
    most = fmaxf(most, bound[g]);
  }
#pragma unroll
  for (u32 g = 0; g < WARPGROUPS; g++) {
    float sum = 0;
    for (u32 w = 0; w < 4; w++) sum += lds_float(SHARED_BASE + AT_REDUCE + ((g * 4 + w) * HEADS + n) * 4);
    total += sum * exp2_fast(bound[g] - most);
  }
  float own = lds_float(SHARED_BASE + AT_BOUND + (group * HEADS + n) * 8 + 4);
  sts_float(factors + (group * HEADS + n) * 4, total == 0 ? 0 : lds_float(units + group * 4) * exp2_fast(own - most) / total);
  if (group > 0) return;
  float lse = total == 0 ? -INFINITE : most + log2_fast(total);
  int rows = p.query_len * p.heads, row = to.tile * HEADS + n;
  if (!to.whole) p.part_lse[to.slot * HEADS + n] = lse;
  else if (row < rows) p.lse[(i64)to.sequence * rows + row] = lse * 0.6931471805599453f;
}

// Four channels of a column: warpgroup g brings together every WARPGROUPS-th k of a half.
DEVICE void merge(const Arguments& p, const Place& at, const Output& to, u32 half, u32 scratch, u32 factors) {
  int rows = p.query_len * p.heads;
#pragma unroll 1
  for (u32 k = at.group; k < H2; k += WARPGROUPS) {
    u32 n = k / 4 * 8 + at.pair * 2 + k % 2, channel = output_channel(at.warp * 16 + at.row + (k & 2) * 4, half);
    float x[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 g = 0; g < WARPGROUPS; g++) {
      float factor = lds_float(factors + (g * HEADS + n) * 4);
      V4 y = lds128(scratch + (g * H2 + k) * 2048);
      x[0] += as_float(y.x) * factor, x[1] += as_float(y.y) * factor;
      x[2] += as_float(y.z) * factor, x[3] += as_float(y.w) * factor;
    }
#pragma unroll
    for (int plane = 0; plane < 4; plane++) x[plane] *= 1.0f / plane_factor(plane);
    int row = to.tile * HEADS + n;
    if (!to.whole) {
      stg64(p.part_out + (to.slot * HEADS + n) * LATENT + channel, V2{pack_half2(x[0], x[1]), pack_half2(x[2], x[3])});
    } else if (row < rows) {
      V2 packed = p.is_bf16 ? V2{pack_bf162(x[0], x[1]), pack_bf162(x[2], x[3])} : V2{pack_half2(x[0], x[1]), pack_half2(x[2], x[3])};
      *(V2*)(p.out + ((i64)to.sequence * rows + row) * LATENT + channel) = packed;
    }
  }
}

DEVICE void give(u32 scratch, const float (&o)[4][H2]) {
#pragma unroll
  for (u32 k = 0; k < H2; k++)
    sts128(scratch + k * 2048, V4{as_bits(o[0][k]), as_bits(o[1][k]), as_bits(o[2][k]), as_bits(o[3][k])});
}

// All outputs go through the pages' memory, a half of the channels at a time. Run once for a part, this code costs what
// fetching it costs, so all that can be is a loop. `unit`: what this warpgroup's outputs are to be multiplied by.
DEVICE void finish(const Arguments& p, const Place& at, const Output& to, float unit, float (&o)[2][4][H2], float (&l)[HEADS / 4]) {
  const u32 bytes = WARPGROUPS * H2 * 2048;  // of a half
  const bool room = 2 * bytes <= AT_QUERY;   // for both
  u32 reduce = SHARED_BASE + AT_REDUCE + (at.group * 4 + at.warp) * HEADS * 4, scratch = SHARED_BASE + thread_index() % 128 * 16;
  u32 factors = SHARED_BASE + AT_SUM, units = factors + WARPGROUPS * HEADS * 4;
#pragma unroll
  for (int j = 0; j < HEADS / 4; j++) {
    float x = l[j];
    x += shuffle_xor(x, 4), x += shuffle_xor(x, 8), x += shuffle_xor(x, 16);
    if (at.lane < 4) sts_float(reduce + (j / 2 * 8 + at.pair * 2 + j % 2) * 4, x);
  }
  if (at.warp == 0 && at.lane == 0) sts_float(units + at.group * 4, unit);
  meet(CONSUMERS_BARRIER, CONSUMERS);  // all pages have been read
  u32 t = thread_index();
  if (t < WARPGROUPS * HEADS) combine_sums(p, to, t / HEADS, t % HEADS, units, factors);
#pragma unroll 1
  for (u32 half = 0; half < 2; half++) {
    u32 from = scratch + (room ? half * bytes : 0);
    if (!room && half > 0) meet(CONSUMERS_BARRIER, CONSUMERS);  // the first half has been read
    if (half == 0) give(from + at.group * H2 * 2048, o[0]);
    else give(from + at.group * H2 * 2048, o[1]);
    fence_async_proxy();  // the next pages land here
    meet(CONSUMERS_BARRIER, CONSUMERS);
    merge(p, at, to, half, from, factors);
  }
}
