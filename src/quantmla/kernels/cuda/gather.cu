// Gather: tokens as decode reads them, into rows of bf16.
//
// A block takes GATHER_ROWS rows of the output. As many threads find out where each token is; then every warp
// takes one part of the channels, 8 lanes a row, 32 rows at a time, and one lane a row for the scales.
#pragma once

#define GATHER_THREADS 288  // eight warps with a content group each, and one for the rope key
#ifndef GATHER_ROWS
#define GATHER_ROWS 32  // of a block
#endif
#ifndef GATHER_BLOCKS
#define GATHER_BLOCKS 2  // at once on a multiprocessor
#endif

struct GatherArguments {
  const int *sequences, *positions;
  const u8* pages;
  const int *block_table, *lengths, *window_start;
  u8* out;
  i64 page_stride, block_table_stride, out_stride;  // the first and the last in bytes
  Window window;
  int num_rows, recent_window, lengths_stride, start_stride;
};

// Of each row: the address of its bf16 row, or of its page plus its number in it; 0: none.
#define AT_PLAIN SHARED_BASE
#define AT_PACKED (AT_PLAIN + 512)
#define GATHER_SHARED 1024

DEVICE void find_token(const GatherArguments& p, int r, int row) {
  u64 plain = 0, packed = 0;
  int sequence = row < p.num_rows ? p.sequences[row] : -1;
  if (sequence >= 0) {
    int position = p.positions[row], length = p.lengths[(i64)sequence * p.lengths_stride];
    int start = p.window_start ? p.window_start[(i64)sequence * p.start_stride] : 0;
    int old = max(max(length - p.recent_window, 0) / TOKENS * TOKENS, start);
    if (position < length) plain = sink_row(p.window, sequence, position);
    if (!plain && position < old) {
      int number = p.block_table[sequence * p.block_table_stride + position / TOKENS];
      packed = (u64)p.pages + number * p.page_stride + position % TOKENS;
    } else if (!plain) {
      plain = window_row(p.window, sequence, position);
    }
  }
  sts_u64(AT_PLAIN + 8 * r, plain), sts_u64(AT_PACKED + 8 * r, packed);
}

// scale * (code - zero point) + mean of eight channels, rounded to bf16. `zero` holds 2^23 as well.
template <int bits, bool rope> DEVICE V4 values(u32 word, float scale, float zero, const float (&mean)[8]) {
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 code = word >> (bits * i) & ((1 << bits) - 1);
    y[i] = scale * (as_float(code | 0x4b000000u) - zero);
    if (rope) y[i] = apart(y[i]) + mean[i];
  }
  return {pack_bf162(y[0], y[1]), pack_bf162(y[2], y[3]), pack_bf162(y[4], y[5]), pack_bf162(y[6], y[7])};
}

DEVICE void page_mean(u64 page, int chunk, float (&mean)[8]) {
  V4 x = load16(page, AT_MEAN + chunk * 16);
  u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) mean[2 * i] = half_low(pairs[i]), mean[2 * i + 1] = half_high(pairs[i]);
}

// One part of the channels: a content group, or (GROUPS) the rope key.
template <bool rope> DEVICE void gather_part(const GatherArguments& p, int part, int lane, int start) {
  const int quarter = lane >> 3, chunk = lane & 7, bits = rope ? 4 : CONTENT_BITS;
  const u32 channel = part * 128 + chunk * 16;
  for (int first = 0; first < GATHER_ROWS; first += 32) {
    V4 x[8];
    u32 words[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      int r = first + 4 * j + quarter;
      u64 packed = lds_u64(AT_PACKED + 8 * r);
      u32 token = (u32)(packed & 63), at = (rope ? AT_ROPE + token * 32 : token * (64 * CONTENT_BITS) + part * (8 * CONTENT_BITS)) + chunk * bits;
      words[j] = bits == 4 ? load4(packed & ~63ull, at) : load2(packed & ~63ull, at);
      x[j] = load16(lds_u64(AT_PLAIN + 8 * r), channel);
    }
    // a lane's own row, and own bands of two rows
    float scale[2], zero[2];
#pragma unroll
    for (int k = 0; k < (rope ? 2 : 1); k++) {
      int r = first + quarter + 4 * (rope ? 4 * k + (chunk & 3) : chunk), group = rope ? part + (chunk >> 2) : part;
      u64 packed = lds_u64(AT_PACKED + 8 * r), page = packed & ~63ull;
      u32 place = group * TOKENS + (u32)(packed & 63);
      scale[k] = half_low(load2(page, AT_SCALES + 2 * place));
      zero[k] = as_float(0x4b000000u | load1(page, AT_ZEROS + place));
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      int r = first + 4 * j + quarter, lender = rope ? (lane & 28) | (j & 3) : (lane & 24) | j;
      float row_scale = as_float((u32)shuffle((int)as_bits(scale[rope ? j >> 2 : 0]), lender));
      float row_zero = as_float((u32)shuffle((int)as_bits(zero[rope ? j >> 2 : 0]), lender));
      u64 packed = lds_u64(AT_PACKED + 8 * r);
      float mean[8] = {};
      if (rope) page_mean(packed & ~63ull, chunk, mean);
      if (packed) x[j] = values<bits, rope>(words[j], row_scale, row_zero, mean);
      u64 row = packed || lds_u64(AT_PLAIN + 8 * r) ? (u64)p.out + (start + r) * p.out_stride : 0;
      store16(row, channel, x[j]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(GATHER_THREADS, GATHER_BLOCKS) gather(const __grid_constant__ GatherArguments p) {
  check_shared_base();
  const int thread = thread_index(), warp = uniform(thread >> 5), lane = thread & 31;
  const int start = block_index() * GATHER_ROWS;
  if (thread < GATHER_ROWS) find_token(p, thread, start + thread);
  sync_block();
  if (warp < GROUPS)
    gather_part<false>(p, warp, lane, start);
  else
    gather_part<true>(p, GROUPS, lane, start);
}
