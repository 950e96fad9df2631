// The end of a part.

// Merges the warpgroups' sums; writes the part's normalised output, or the sequence's if it is whole.
struct Output {
  int sequence, tile;
  i64 slot;    // of part_out and part_lse
  bool whole;  // there is no other part: `out` and `lse` instead
};

DEVICE void write_half(const Arguments& p, const Place& at, const Output& to, const float (&o)[4][H2], u32 half) {
  int rows = p.query_len * p.heads;
#pragma unroll
  for (int k = 0; k < H2; k++) {
    int n = k / 4 * 8 + at.pair * 2 + k % 2, row = to.tile * HEADS + n;
    u32 channel = output_channel(at.warp * 16 + at.row + (k & 2 ? 8 : 0), half);
    float x0 = o[0][k], x1 = o[1][k], x2 = o[2][k], x3 = o[3][k];
    if (!to.whole) {
      *(V4*)(p.part_out + (to.slot * HEADS + n) * LATENT + channel) = V4{as_bits(x0), as_bits(x1), as_bits(x2), as_bits(x3)};
    } else if (row < rows) {
      V2 packed = p.is_bf16 ? V2{pack_bf162(x0, x1), pack_bf162(x2, x3)} : V2{pack_half2(x0, x1), pack_half2(x2, x3)};
      *(V2*)(p.out + ((i64)to.sequence * rows + row) * LATENT + channel) = packed;
    }
  }
}

// Gives the other half to the other warpgroup, and adds what that one has of its own half.
template <int half> DEVICE void exchange_half(const Arguments& p, const Place& at, const Output& to, float (&o)[2][4][H2]) {
  u32 scratch = SHARED_BASE + thread_index() % 128 * 4;
#pragma unroll
  for (int k = 0; k < 4 * H2; k++) sts_float(scratch + ((1 - half) * 4 * H2 + k) * 512, o[1 - half][k / H2][k % H2]);
  fence_async_proxy();  // the next pages land here
  sync_named(CONSUMERS_BARRIER, CONSUMERS);
#pragma unroll
  for (int k = 0; k < 4 * H2; k++) o[half][k / H2][k % H2] += lds_float(scratch + (half * 4 * H2 + k) * 512);
  write_half(p, at, to, o[half], half);
}

// `unit`: what the sums are to be multiplied by.
DEVICE void finish(const Arguments& p, const Place& at, const Output& to, float unit, float (&o)[2][4][H2], float (&l)[HEADS / 4]) {
  u32 i = thread_index() % 128, reduce = SHARED_BASE + AT_REDUCE + at.group * HEADS * 16;
#pragma unroll
  for (int j = 0; j < HEADS / 4; j++) {
    float x = l[j];
    x += shuffle_xor(x, 4), x += shuffle_xor(x, 8), x += shuffle_xor(x, 16);
    if (at.lane < 4) sts_float(reduce + (at.warp * HEADS + j / 2 * 8 + at.pair * 2 + j % 2) * 4, x);
  }
  sync_named(1 + at.group, 128);
  if (i < HEADS) {
    float sum = 0;
    for (int w = 0; w < 4; w++) sum += lds_float(reduce + (w * HEADS + i) * 4);
    sts64(SHARED_BASE + AT_SUM + (at.group * HEADS + i) * 8, V2{lds32(at.bound + i * 8 + 4), as_bits(sum)});
  }
  sync_named(CONSUMERS_BARRIER, CONSUMERS);
  u32 scratch = SHARED_BASE + i * 4;
  int rows = p.query_len * p.heads;
#pragma unroll
  for (int j = 0; j < HEADS / 4; j++) {
    u32 n = j / 2 * 8 + at.pair * 2 + j % 2;
    float most = LOWEST, sum = 0;
    for (int g = 0; g < WARPGROUPS; g++) most = fmaxf(most, lds_float(SHARED_BASE + AT_SUM + (g * HEADS + n) * 8));
    for (int g = 0; g < WARPGROUPS; g++) {
      V2 x = lds64(SHARED_BASE + AT_SUM + (g * HEADS + n) * 8);
      sum += as_float(x.y) * exp2_fast(as_float(x.x) - most);
    }
    float own = lds_float(SHARED_BASE + AT_SUM + (at.group * HEADS + n) * 8);
    float factor = sum == 0 ? 0 : unit * exp2_fast(own - most) / sum;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      float(&block)[H2] = o[k / 4][k % 4];
      float own_factor = factor / plane_factor(k % 4);
      block[j / 2 * 4 + j % 2] *= own_factor, block[j / 2 * 4 + j % 2 + 2] *= own_factor;
    }
    if (at.group == 0 && at.warp == 0 && at.lane < 4) {
      float lse = sum == 0 ? -INFINITE : most + log2_fast(sum);
      int row = to.tile * HEADS + n;
      if (!to.whole) p.part_lse[to.slot * HEADS + n] = lse;
      else if (row < rows) p.lse[(i64)to.sequence * rows + row] = lse * 0.6931471805599453f;
    }
  }
#if WARPGROUPS == 2  // each brings together one half
  if (at.group == 0) exchange_half<0>(p, at, to, o);
  else exchange_half<1>(p, at, to, o);
#else
  if (at.group > 0) {
#pragma unroll
    for (int k = 0; k < 8 * H2; k++) sts_float(scratch + ((at.group - 1) * 8 * H2 + k) * 512, o[k / H2 / 4][k / H2 % 4][k % H2]);
    fence_async_proxy();  // the next pages land here
  }
  sync_named(CONSUMERS_BARRIER, CONSUMERS);
  if (at.group > 0) return;
#pragma unroll
  for (int k = 0; k < 8 * H2; k++)
    for (int g = 0; g < WARPGROUPS - 1; g++) o[k / H2 / 4][k / H2 % 4][k % H2] += lds_float(scratch + (g * 8 * H2 + k) * 512);
  write_half(p, at, to, o[0], 0);
  write_half(p, at, to, o[1], 1);
#endif
}
