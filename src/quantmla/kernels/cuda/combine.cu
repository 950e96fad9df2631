// The second kernel: parts of a sequence to its output.

#define NOTHING -1e30f
#define BATCHED 4  // loads of partial results that are on their way at once

// One row of the output from the parts of its sequence, in 4 slices. Four warps a block: a slice each; blocks
// [batch * rows]. More warps: they share a slice; blocks [batch * rows, 4], for few rows of many parts.
extern "C" __global__ void __launch_bounds__(512) combine(const __grid_constant__ Arguments p) {
  u32 base = SHARED_BASE, lane = thread_index() % 32, warp = thread_index() / 32, warps = thread_count() / 32;
  bool alone = warps == 4;
  int rows = p.query_len * p.heads, b = block_index() / rows, row = block_index() % rows;
  u32 slice = alone ? warp : block_index_y();
  int channel = slice * 128 + lane * 4;
  u16* out = p.out + (i64)block_index() * LATENT + channel;
  release_next_kernel();  // all blocks of this one have started
  // decode's blocks allow this one to start after what was before them, so lengths are there
  int length = p.lengths[(i64)b * p.lengths_stride];
  wait_for_previous_kernel();
  if (length <= 0) {
    if (alone || warp == 0) *(V2*)out = V2{0, 0};
    if (thread_index() == 0) p.lse[block_index()] = -INFINITE;
    return;
  }
  int first = p.part_of[2 * b], count = p.part_of[2 * b + 1], tile = row / HEADS, n = row % HEADS;
  if (count == 1) return;
  // element [part][n] of the sequence's tile
  auto at = [&](int i) { return ((i64)(first + i) * p.tiles + tile) * HEADS + n; };
  float most = NOTHING, sum = 0, lse[BATCHED];
  for (int i0 = lane; i0 < count; i0 += 32 * BATCHED) {
#pragma unroll
    for (int j = 0; j < BATCHED; j++) lse[j] = i0 + j * 32 < count ? p.part_lse[at(i0 + j * 32)] : NOTHING;
#pragma unroll
    for (int j = 0; j < BATCHED; j++) most = fmaxf(most, lse[j]);
  }
  for (int mask = 16; mask; mask >>= 1) most = fmaxf(most, shuffle_xor(most, mask));
  for (int i = lane; i < count; i += 32) sum += exp2_fast(p.part_lse[at(i)] - most);
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  float x0 = 0, x1 = 0, x2 = 0, x3 = 0;
  u32 sharing = alone ? 1 : warps;
  for (int i0 = alone ? 0 : warp; i0 < count; i0 += sharing * BATCHED) {
    V4 x[BATCHED];
#pragma unroll
    for (int j = 0; j < BATCHED; j++) {
      int i = i0 + j * (int)sharing;
      lse[j] = i < count ? p.part_lse[at(i)] : NOTHING;
      x[j] = i < count ? *(const V4*)(p.part_out + at(i) * LATENT + channel) : V4{0, 0, 0, 0};
    }
#pragma unroll
    for (int j = 0; j < BATCHED; j++) {
      float weight = exp2_fast(lse[j] - most);
      x0 += weight * as_float(x[j].x), x1 += weight * as_float(x[j].y);
      x2 += weight * as_float(x[j].z), x3 += weight * as_float(x[j].w);
    }
  }
  if (!alone) {
    sts128(base + thread_index() * 16, V4{as_bits(x0), as_bits(x1), as_bits(x2), as_bits(x3)});
    sync_block();
    if (warp > 0) return;
    for (u32 w = 1; w < warps; w++) {
      V4 x = lds128(base + (w * 32 + lane) * 16);
      x0 += as_float(x.x), x1 += as_float(x.y), x2 += as_float(x.z), x3 += as_float(x.w);
    }
  }
  float inverse = sum == 0 ? 0 : 1 / sum;
  x0 *= inverse, x1 *= inverse, x2 *= inverse, x3 *= inverse;
  *(V2*)out = p.is_bf16 ? V2{pack_bf162(x0, x1), pack_bf162(x2, x3)} : V2{pack_half2(x0, x1), pack_half2(x2, x3)};
  if (lane == 0 && slice == 0)
    p.lse[block_index()] = sum == 0 ? -INFINITE : (most + log2_fast(sum)) * 0.6931471805599453f;
}
