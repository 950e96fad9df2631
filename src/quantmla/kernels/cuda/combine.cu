// The second kernel: parts of a sequence to its output.

#define NOTHING -1e30f
#define BATCHED 4  // LSEs of a lane that are on their way at once
#define OUTPUTS 8  // and partial outputs

struct Partials {  // of a row: part i's LSE is element i step, its output's four channels i step LATENT
  const float* lse;
  const u16* out;  // float16
  int step, count;
};

DEVICE void load_outputs(const Partials& from, int i0, int sharing, V2 (&x)[OUTPUTS]) {
#pragma unroll
  for (int j = 0; j < OUTPUTS; j++) {
    int i = i0 + j * sharing;
    x[j] = i < from.count ? *(const V2*)(from.out + (i64)i * from.step * LATENT) : V2{0, 0};
  }
}

// The largest LSE of all parts, and the sum of what they weigh beside it.
DEVICE void weigh(const Partials& from, int lane, float& most, float& sum) {
  most = NOTHING, sum = 0;
#pragma unroll 1
  for (int i0 = lane; i0 < from.count; i0 += 32 * BATCHED) {
    float x[BATCHED], before = most;
#pragma unroll
    for (int j = 0; j < BATCHED; j++) x[j] = i0 + j * 32 < from.count ? from.lse[(i0 + j * 32) * from.step] : -INFINITE;
#pragma unroll
    for (int j = 0; j < BATCHED; j++) most = fmaxf(most, x[j]);
    sum *= exp2_fast(before - most);
#pragma unroll
    for (int j = 0; j < BATCHED; j++) sum += exp2_fast(x[j] - most);
  }
  float own = most;
  for (int mask = 16; mask; mask >>= 1) most = fmaxf(most, shuffle_xor(most, mask));
  sum *= exp2_fast(own - most);
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
}

// One row of the output from the parts of its sequence, in 4 slices. Four warps a block: a slice each; blocks
// [batch * rows]. More warps: they share a slice; blocks [batch * rows, 4], for few rows of many parts.
extern "C" __global__ void __launch_bounds__(512) combine(const __grid_constant__ Arguments p) {
  release_next_kernel();  // once all blocks have started, it takes the multiprocessors that they leave
  u32 base = SHARED_BASE, lane = thread_index() % 32, warp = thread_index() / 32, warps = thread_count() / 32;
  bool alone = warps == 4;
  u32 rows = p.query_len * p.heads, b = block_index() / rows, row = block_index() % rows;
  u32 slice = alone ? warp : block_index_y();
  int channel = slice * 128 + lane * 4;
  u16* out = p.out + (i64)block_index() * LATENT + channel;
  // decode's blocks let this one start when they know that all before them has ended, so lengths are there
  int length = p.lengths[(i64)b * p.lengths_stride];
  wait_for_previous_kernel();
  int first = p.part_of[2 * b], count = p.part_of[2 * b + 1];
  if (length <= 0) {
    if (alone || warp == 0) *(V2*)out = V2{0, 0};
    if (thread_index() == 0) p.lse[block_index()] = -INFINITE;
    return;
  }
  if (count == 1) return;
  int step = p.tiles * HEADS, sharing = alone ? 1 : warps, i0 = alone ? 0 : warp;
  i64 at = (i64)first * step + row;
  Partials from = {p.part_lse + at, p.part_out + at * LATENT + channel, step, count};
  V2 x[OUTPUTS];
  load_outputs(from, i0, sharing, x);
  float most, sum, x0 = 0, x1 = 0, x2 = 0, x3 = 0;
  weigh(from, lane, most, sum);
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int j = 0; j < OUTPUTS; j++) {
      int i = i0 + j * sharing;
      float weight = i < count ? exp2_fast(from.lse[i * step] - most) : 0;
      x0 += weight * half_low(x[j].x), x1 += weight * half_high(x[j].x);
      x2 += weight * half_low(x[j].y), x3 += weight * half_high(x[j].y);
    }
    i0 += sharing * OUTPUTS;
    if (i0 >= count) break;
    load_outputs(from, i0, sharing, x);
  }
  if (!alone) {
    sts128(base + thread_index() * 16, V4{as_bits(x0), as_bits(x1), as_bits(x2), as_bits(x3)});
    sync_block();
    if (warp > 0) return;
#pragma unroll 5
    for (u32 w = 1; w < warps; w++) {
      V4 y = lds128(base + (w * 32 + lane) * 16);
      x0 += as_float(y.x), x1 += as_float(y.y), x2 += as_float(y.z), x3 += as_float(y.w);
    }
  }
  float inverse = sum == 0 ? 0 : 1 / sum;
  x0 *= inverse, x1 *= inverse, x2 *= inverse, x3 *= inverse;
  *(V2*)out = p.is_bf16 ? V2{pack_bf162(x0, x1), pack_bf162(x2, x3)} : V2{pack_half2(x0, x1), pack_half2(x2, x3)};
  if (lane == 0 && slice == 0)
    p.lse[block_index()] = sum == 0 ? -INFINITE : (most + log2_fast(sum)) * 0.6931471805599453f;
}
