// Append: rows into the bf16 window, and the pages that they complete into bytes.
//
// A tile is up to 32 consecutive rows of the call. Of each, one lane finds out where it goes.
// - Blocks for content take a tile, a warp for each group. Content is quantised row by row, so a row goes
//   from registers both to the window and to its place in the page, if the page's end is in this call too.
//   It is on its way from memory while its places are looked up. Rows that came earlier of a page that
//   ends here are read back from the window.
// - Blocks for the rope key take a tile for each warp. A page that ends in it is packed whole, for its mean
//   is of all its rows: much more work for one warp than a content group, so these blocks are the first.
#pragma once

struct AppendArguments {
  const u8 *latent, *k_rope;
  const int *sequences, *positions;
  u8* pages;
  const int* block_table;
  i64 latent_stride, rope_stride, page_stride, block_table_stride;  // the first three in bytes
  Window window;
  int num_rows, tile, rope_blocks;
  float content_clip, rope_clip;
};

#ifndef APPEND_BLOCKS
#define APPEND_BLOCKS 3  // at once on a multiprocessor
#endif
#define APPEND_THREADS 256
#define APPEND_WARPS 8
// Addresses of rows, 0: none. A slot is a page's address plus the token's number in it.
#define AT_KEEP SHARED_BASE        // of the tile
#define AT_SINK (AT_KEEP + 256)
#define AT_SLOT (AT_SINK + 256)
#define AT_OLD (AT_SLOT + 256)     // of a page's rows that came earlier, in the window
#define AT_OLD_SLOT (AT_OLD + 512)
#define AT_ENDS (AT_OLD_SLOT + 512)  // one bit for each row that ends such a page
#define ROPE_PLACES 1024           // of each warp: AT_KEEP, AT_SINK and then the rows of a page
#define APPEND_SHARED (APPEND_WARPS * ROPE_PLACES)

static_assert(AT_ZEROS + 640 == AT_MEAN && AT_MEAN + 128 == PAGE_BYTES, "a page without padding");

struct Codes {
  float scale, least;  // `least` is ROUNDER - zero point
  u32 half;            // bits of the scale
};

// Scale and zero point of a group between low and high: quant/affine.py, float32 throughout.
DEVICE Codes codes_of(float low, float high, float clip, float top) {
  low = lesser(low, 0.0f), high = greater(high, 0.0f);
  float exact = lesser(greater(divide((high - low) * clip, top), 5.9604644775390625e-8f), 65504.0f);
  u32 half = pack_half2(exact, 0.0f) & 0xffff;
  if (half_low(half) < exact) half++;  // up
  float scale = half_low(half);
  float zero = (divide(low * clip * -1.0f, scale) + ROUNDER) - ROUNDER;
  return {scale, ROUNDER - lesser(greater(zero, 0.0f), top), half};
}
DEVICE void write_metadata(u64 slot, int group, Codes c) {
  u32 place = group * TOKENS + (u32)(slot & 63);
  store2(slot & ~63ull, AT_SCALES + 2 * place, c.half);
  store1(slot & ~63ull, AT_ZEROS + place, as_bits(ROUNDER) - as_bits(c.least));
}

// Adds the code of `rounded` (a quotient plus ROUNDER) to a word whose fields are still too large by
// the bits of `least`.
template <int bits> DEVICE u32 with_code(u32 word, float rounded, float least, float most, int field) {
  return word + (as_bits(lesser(greater(rounded, least), most)) << (bits * field));
}

// Eight codes of bf16 values. Quotients are rounded to multiples of 2^-14 first: of values with 8 bits
// and a scale with 11 they are half an integer or at least 2^-12 away from one, so the reciprocal's
// error is lost there. Larger ones than 2^8, of scales at float16's limit, are beyond all codes.
DEVICE u32 content_word(V4 x, float inverse, float least) {
  const float grid = 768.0f;
  float most = least + CODE_TOP;
  u32 pairs[4] = {x.x, x.y, x.z, x.w}, word = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float low = fused(bf16_low(pairs[i]), inverse, grid) + (ROUNDER - grid);
    float high = fused(bf16_high(pairs[i]), inverse, grid) + (ROUNDER - grid);
    word = with_code<CONTENT_BITS>(word, low, least, most, 2 * i);
    word = with_code<CONTENT_BITS>(word, high, least, most, 2 * i + 1);
  }
  return word - as_bits(least) * (CONTENT_BITS == 4 ? 0x11111111u : 0x5555u);
}

// {low, -high} of a row's group, in every one of its 8 lanes.
DEVICE u32 group_range(V4 x) {
  u32 low = min_bf162(min_bf162(x.x, x.y), min_bf162(x.z, x.w));
  u32 high = max_bf162(max_bf162(x.x, x.y), max_bf162(x.z, x.w)) ^ 0x80008000u;
  u32 range = min_bf162(permute(low, high, 0x5410), permute(low, high, 0x7632));
#pragma unroll
  for (int mask = 1; mask < 8; mask *= 2) range = min_bf162(range, (u32)shuffle_xor((int)range, mask));
  return range;
}

// One content group of 32 rows, whose slots are at `slots`: 8 lanes a row; then one lane a row for scales.
DEVICE void pack_content(const AppendArguments& p, const V4 (&x)[8], u32 slots, int group, int lane) {
  const int quarter = lane >> 3, chunk = lane & 7;
  const u64 own_slot = lds_u64(slots + 8 * (4 * chunk + quarter));
  if (!vote(own_slot != 0)) return;
  u32 own = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    u32 range = group_range(x[j]);
    if (j == chunk) own = range;
  }
  Codes c = codes_of(bf16_low(own), -bf16_high(own), p.content_clip, CODE_TOP);
  write_metadata(own_slot, group, c);
  float own_inverse = reciprocal(c.scale);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    int lender = (lane & 24) | j;
    float inverse = as_float((u32)shuffle((int)as_bits(own_inverse), lender));
    float least = as_float((u32)shuffle((int)as_bits(c.least), lender));
    u64 slot = lds_u64(slots + 8 * (4 * j + quarter));
    u32 word = content_word(x[j], inverse, least);
    u32 place = (u32)(slot & 63) * (LATENT_BYTES * CONTENT_BITS / 16) + group * (8 * CONTENT_BITS) + chunk * CONTENT_BITS;
    if (CONTENT_BITS == 4)
      store4(slot & ~63ull, place, word);
    else
      store2(slot & ~63ull, place, word);
  }
}

// 16 bytes of each of 8 rows of a tile, for this lane.
DEVICE void load_rows(V4 (&x)[8], const AppendArguments& p, u64 rows, i64 stride, int start, int lane) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    int r = 4 * j + (lane >> 3), row = start + r;
    x[j] = load16(r < p.tile && row < p.num_rows ? rows + row * stride : 0, (lane & 7) * 16);
  }
}
// The same to the window, and to sinks if there are any: addresses at `keep` and `sink`.
DEVICE void store_rows(const V4 (&x)[8], u32 keep, u32 sink, u32 channel, int lane) {
  const int quarter = lane >> 3;
#pragma unroll
  for (int j = 0; j < 8; j++) store16(lds_u64(keep + 8 * (4 * j + quarter)), channel + (lane & 7) * 16, x[j]);
  if (vote(lds_u64(sink + 8 * lane) != 0))
#pragma unroll
    for (int j = 0; j < 8; j++) store16(lds_u64(sink + 8 * (4 * j + quarter)), channel + (lane & 7) * 16, x[j]);
}

// The mean of 8 channels over the page, as stored. Sums of bf16 values are exact in float64.
DEVICE void rope_mean(u64 page, u32 rows, int lane, float (&mean)[8]) {
  const int quarter = lane >> 3, chunk = lane & 7;
  double sum[8] = {};
#pragma unroll 8
  for (int j = 0; j < 16; j++) {
    V4 x = load16(lds_u64(rows + 8 * (4 * j + quarter)), chunk * 16);
    u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) sum[2 * i] += (double)bf16_low(pairs[i]), sum[2 * i + 1] += (double)bf16_high(pairs[i]);
  }
  u32 halves[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    sum[i] += shuffle_xor(sum[i], 8);
    sum[i] += shuffle_xor(sum[i], 16);
    double exact = sum[i] * (1.0 / TOKENS);
    exact = exact < -65504.0 ? -65504.0 : exact > 65504.0 ? 65504.0 : exact;
    halves[i] = pack_half2((float)exact, 0.0f) & 0xffff;
    mean[i] = half_low(halves[i]);
  }
  if (quarter == 0)
    store16(page, AT_MEAN + chunk * 16, V4{halves[0] | halves[1] << 16, halves[2] | halves[3] << 16,
                                              halves[4] | halves[5] << 16, halves[6] | halves[7] << 16});
}

DEVICE void centred(V4 x, const float (&mean)[8], float (&y)[8]) {
  u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    y[2 * i] = bf16_low(pairs[i]) - mean[2 * i];
    y[2 * i + 1] = bf16_high(pairs[i]) - mean[2 * i + 1];
  }
}

// Eight codes. The quotient is rounded as IEEE asks: two steps of correction, as for any division here.
DEVICE u32 rope_word(const float (&y)[8], float scale, float least) {
  float r = reciprocal(scale), most = least + ROPE_TOP;
  r = fused(fused(-scale, r, 1.0f), r, r);
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float q = y[i] * r;
    q = fused(fused(-q, scale, y[i]), r, q);
    q = fused(fused(-q, scale, y[i]), r, q);
    word = with_code<4>(word, q + ROUNDER, least, most, i);
  }
  return word - as_bits(least) * 0x11111111u;
}

// A whole page's rope key, whose rows' addresses are at `rows`: 8 lanes a row, 4 lanes a band.
DEVICE void pack_rope(const AppendArguments& p, u64 page, u32 rows, int lane) {
  const int quarter = lane >> 3, chunk = lane & 7;
  float mean[8], y[8];
  rope_mean(page, rows, lane, mean);
  for (int first = 0; first < TOKENS; first += 16) {
    V4 x[4];
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = load16(lds_u64(rows + 8 * (first + 4 * j + quarter)), chunk * 16);
    float low = 0.0f, high = 0.0f;  // of the row j = chunk % 4: one lane for each band of a row
#pragma unroll
    for (int j = 0; j < 4; j++) {
      centred(x[j], mean, y);
      float least = y[0], most = y[0];
#pragma unroll
      for (int i = 1; i < 8; i++) least = lesser(least, y[i]), most = greater(most, y[i]);
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2)
        least = lesser(least, shuffle_xor(least, mask)), most = greater(most, shuffle_xor(most, mask));
      if (j == (chunk & 3)) low = least, high = most;
    }
    Codes c = codes_of(low, high, p.rope_clip, ROPE_TOP);
    write_metadata(page + first + 4 * (chunk & 3) + quarter, GROUPS + (chunk >> 2), c);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int lender = (lane & 28) | j;
      float scale = as_float((u32)shuffle((int)as_bits(c.scale), lender));
      float least = as_float((u32)shuffle((int)as_bits(c.least), lender));
      centred(x[j], mean, y);
      store4(page, AT_ROPE + (first + 4 * j + quarter) * 32 + chunk * 4, rope_word(y, scale, least));
    }
  }
}

DEVICE u64 page_of(const AppendArguments& p, int sequence, int position) {
  int number = p.block_table[sequence * p.block_table_stride + position / TOKENS];
  return number < 0 ? 0 : (u64)p.pages + number * p.page_stride;
}

struct Place {
  int sequence, position;  // sequence < 0: padding
  bool end, old;           // it ends a page, some of whose rows came earlier
  u64 slot;
};
// Where row `row` goes: a lane's own row of a tile.
DEVICE Place place_row(const AppendArguments& p, int r, int row, u32 keep, u32 sink) {
  bool there = r < p.tile && row < p.num_rows;
  Place q = {there ? p.sequences[row] : -1, there ? p.positions[row] : 0, false, false, 0};
  u64 kept = 0, sunk = 0;
  if (q.sequence >= 0) {
    int offset = q.position % TOKENS, last = row + TOKENS - 1 - offset;
    bool whole = last < p.num_rows && p.sequences[last] == q.sequence;
    kept = window_row(p.window, q.sequence, q.position), sunk = sink_row(p.window, q.sequence, q.position);
    if (whole) q.slot = page_of(p, q.sequence, q.position);
    if (q.slot) q.slot += offset;
    q.end = offset == TOKENS - 1 && q.slot;
    q.old = q.end && (row < TOKENS - 1 || p.sequences[row - (TOKENS - 1)] != q.sequence);
  }
  sts_u64(keep + 8 * r, kept), sts_u64(sink + 8 * r, sunk);
  return q;
}
// Row r of the page that ends with row `row`: its row in this call, or else (returned) its place in the window.
DEVICE u64 place_old(const AppendArguments& p, int sequence, int position, int row, int r, int& here) {
  here = row - (TOKENS - 1) + r;
  if (here >= 0 && p.sequences[here] == sequence) return 0;
  here = -1;
  return window_row(p.window, sequence, position - (TOKENS - 1) + r);
}

DEVICE void append_content(const AppendArguments& p, int start, int warp, int lane) {
  V4 x[8];
  load_rows(x, p, (u64)p.latent + warp * 128, p.latent_stride, start, lane);
  if (warp == 0) {
    Place q = place_row(p, lane, start + lane, AT_KEEP, AT_SINK);
    sts_u64(AT_SLOT + 8 * lane, q.slot);
    u32 ends = vote(q.old);
    if (lane == 0) sts32(AT_ENDS, ends);
  }
  sync_block();
  store_rows(x, AT_KEEP, AT_SINK, warp * 128, lane);
  pack_content(p, x, AT_SLOT, warp, lane);
  for (u32 ends = lds32(AT_ENDS); ends; ends &= ends - 1) {
    const int row = start + first_set(ends), thread = warp * 32 + lane;
    sync_block();  // the page before is done
    if (warp < 2) {
      int here, sequence = p.sequences[row], position = p.positions[row];
      u64 old = place_old(p, sequence, position, row, thread, here);
      sts_u64(AT_OLD + 8 * thread, old);
      sts_u64(AT_OLD_SLOT + 8 * thread, old ? page_of(p, sequence, position) + thread : 0);
    }
    sync_block();
    for (int first = 0; first < TOKENS; first += 32) {
#pragma unroll
      for (int j = 0; j < 8; j++)
        x[j] = load16(lds_u64(AT_OLD + 8 * (first + 4 * j + (lane >> 3))), warp * 128 + (lane & 7) * 16);
      pack_content(p, x, AT_OLD_SLOT + 8 * first, warp, lane);
    }
  }
}

DEVICE void append_rope(const AppendArguments& p, int start, int warp, int lane) {
  const u32 keep = SHARED_BASE + warp * ROPE_PLACES, sink = keep + 256, rows = keep + 512;
  V4 x[8];
  load_rows(x, p, (u64)p.k_rope, p.rope_stride, start, lane);
  Place q = place_row(p, lane, start + lane, keep, sink);
  sync_warp();
  store_rows(x, keep, sink, LATENT_BYTES, lane);
  for (u32 ends = vote(q.end); ends; ends &= ends - 1) {
    const int r = first_set(ends), sequence = shuffle(q.sequence, r), position = shuffle(q.position, r);
    for (int i = lane; i < TOKENS; i += 32) {
      int here;
      u64 old = place_old(p, sequence, position, start + r, i, here);
      sts_u64(rows + 8 * i, here >= 0 ? (u64)p.k_rope + here * p.rope_stride : old ? old + LATENT_BYTES : 0);
    }
    sync_warp();
    pack_rope(p, page_of(p, sequence, position), rows, lane);
    sync_warp();  // before the next page's rows
  }
}

extern "C" __global__ void __launch_bounds__(APPEND_THREADS, APPEND_BLOCKS) append(const __grid_constant__ AppendArguments p) {
  check_shared_base();
  const int thread = thread_index(), warp = uniform(thread >> 5), lane = thread & 31, block = block_index();
  if (block < p.rope_blocks)
    append_rope(p, (block * APPEND_WARPS + warp) * p.tile, warp, lane);
  else
    append_content(p, (block - p.rope_blocks) * p.tile, warp, lane);
}
