// Append: rows into the bf16 window, and the pages that they complete into bytes.
//
// A block takes `tile` consecutive rows of the call. Its first 64 threads find out where each row goes;
// then every warp takes one part of their channels. Content is quantised row by row, so a row goes from
// registers both to the window and to its place in the page, if the page's end is in this call too. The
// rows of such a page that came earlier are read back from the window by the block that has its end, and
// so is the whole page's rope key, for its mean.
#pragma once

struct AppendArguments {
  const u8 *latent, *k_rope;
  const int *sequences, *positions;
  u8* pages;
  const int* block_table;
  i64 latent_stride, rope_stride, page_stride, block_table_stride;  // the first three in bytes
  Window window;
  int num_rows, tile;
  float content_clip, rope_clip;
};

// Of each of 64 rows, as addresses; 0: none. A slot is a page's address plus the token's number in it.
#define AT_FROM SHARED_BASE
#define AT_KEEP (AT_FROM + 512)
#define AT_SINK (AT_KEEP + 512)
#define AT_SLOT (AT_SINK + 512)
#define AT_FROM_ROPE (AT_SLOT + 512)
#define AT_PAGE_ROPE (AT_FROM_ROPE + 512)  // of the page at work
#define AT_ENDS (AT_PAGE_ROPE + 512)       // one bit for each row that ends a page
#define APPEND_SHARED (AT_ENDS + 8 - SHARED_BASE)

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

// One content group of up to 64 rows: 8 lanes a row, 32 rows at a time; then one lane a row for scales.
DEVICE void append_content(const AppendArguments& p, int group, int lane, int rows) {
  const int quarter = lane >> 3, chunk = lane & 7;
  const u32 channel = group * 128 + chunk * 16;
  for (int first = 0; first < rows; first += 32) {
    V4 x[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      x[j] = load16(lds_u64(AT_FROM + 8 * (first + 4 * j + quarter)), channel);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      store16(lds_u64(AT_KEEP + 8 * (first + 4 * j + quarter)), channel, x[j]);
    }
    const u32 own_at = 8 * (first + 4 * chunk + quarter);
    if (vote(lds_u64(AT_SINK + own_at) != 0))
#pragma unroll
      for (int j = 0; j < 8; j++) {
        store16(lds_u64(AT_SINK + 8 * (first + 4 * j + quarter)), channel, x[j]);
      }
    const u64 own_slot = lds_u64(AT_SLOT + own_at);
    if (!vote(own_slot != 0)) continue;
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
      u64 slot = lds_u64(AT_SLOT + 8 * (first + 4 * j + quarter));
      u32 word = content_word(x[j], inverse, least);
      u32 place = (u32)(slot & 63) * (LATENT_BYTES * CONTENT_BITS / 16) + group * (8 * CONTENT_BITS) + chunk * CONTENT_BITS;
      if (CONTENT_BITS == 4)
        store4(slot & ~63ull, place, word);
      else
        store2(slot & ~63ull, place, word);
    }
  }
}

DEVICE void copy_rope(int lane, int rows) {
  const int quarter = lane >> 3;
  const u32 channel = (lane & 7) * 16;
  for (int first = quarter; first < rows; first += 4) {
    V4 x = load16(lds_u64(AT_FROM_ROPE + 8 * first), channel);
    store16(lds_u64(AT_KEEP + 8 * first), LATENT_BYTES + channel, x);
    store16(lds_u64(AT_SINK + 8 * first), LATENT_BYTES + channel, x);
  }
}

// The mean of 8 channels over the page, as stored. Sums of bf16 values are exact in float64.
DEVICE void rope_mean(u64 page, int lane, float (&mean)[8]) {
  const int quarter = lane >> 3, chunk = lane & 7;
  double sum[8] = {};
#pragma unroll 4
  for (int j = 0; j < 16; j++) {
    V4 x = load16(lds_u64(AT_PAGE_ROPE + 8 * (4 * j + quarter)), chunk * 16);
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

// A whole page's rope key, whose rows are at AT_PAGE_ROPE: 8 lanes a row, 4 lanes a band.
DEVICE void append_rope(const AppendArguments& p, u64 page, int lane) {
  const int quarter = lane >> 3, chunk = lane & 7;
  float mean[8], y[8];
  rope_mean(page, lane, mean);
  for (int first = 0; first < TOKENS; first += 32) {
    V4 x[8];
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = load16(lds_u64(AT_PAGE_ROPE + 8 * (first + 4 * j + quarter)), chunk * 16);
    float low[2] = {}, high[2] = {};  // of the rows j = chunk % 4 and chunk % 4 + 4
#pragma unroll
    for (int j = 0; j < 8; j++) {
      centred(x[j], mean, y);
      float least = y[0], most = y[0];
#pragma unroll
      for (int i = 1; i < 8; i++) least = lesser(least, y[i]), most = greater(most, y[i]);
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2)
        least = lesser(least, shuffle_xor(least, mask)), most = greater(most, shuffle_xor(most, mask));
      if ((j & 3) == (chunk & 3)) low[j >> 2] = least, high[j >> 2] = most;
    }
    Codes c[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      c[k] = codes_of(low[k], high[k], p.rope_clip, ROPE_TOP);
      write_metadata(page + first + 4 * (4 * k + (chunk & 3)) + quarter, GROUPS + (chunk >> 2), c[k]);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      int lender = (lane & 28) | (j & 3);
      float scale = as_float((u32)shuffle((int)as_bits(c[j >> 2].scale), lender));
      float least = as_float((u32)shuffle((int)as_bits(c[j >> 2].least), lender));
      centred(x[j], mean, y);
      store4(page, AT_ROPE + (first + 4 * j + quarter) * 32 + chunk * 4, rope_word(y, scale, least));
    }
  }
}

DEVICE u64 page_of(const AppendArguments& p, int sequence, int position) {
  int number = p.block_table[sequence * p.block_table_stride + position / TOKENS];
  return number < 0 ? 0 : (u64)p.pages + number * p.page_stride;
}

// What becomes of row `row`, into place r; true if it ends a page.
DEVICE bool place_row(const AppendArguments& p, int r, int row) {
  u64 from = 0, from_rope = 0, keep = 0, sink = 0, slot = 0;
  bool end = false;
  int sequence = r < p.tile && row < p.num_rows ? p.sequences[row] : -1;
  if (sequence >= 0) {
    int position = p.positions[row], offset = position % TOKENS, last = row + TOKENS - 1 - offset;
    from = (u64)p.latent + row * p.latent_stride, from_rope = (u64)p.k_rope + row * p.rope_stride;
    end = offset == TOKENS - 1;
    bool whole = end || (last < p.num_rows && p.sequences[last] == sequence);
    keep = window_row(p.window, sequence, position), sink = sink_row(p.window, sequence, position);
    if (whole) slot = page_of(p, sequence, position);
    if (slot) slot += offset;
  }
  sts_u64(AT_FROM + 8 * r, from), sts_u64(AT_FROM_ROPE + 8 * r, from_rope), sts_u64(AT_KEEP + 8 * r, keep);
  sts_u64(AT_SINK + 8 * r, sink), sts_u64(AT_SLOT + 8 * r, slot);
  return end && slot;
}

// The page that ends with row `row`: places of all its rope keys, and of latents that came before this call.
DEVICE void place_page(const AppendArguments& p, u64 page, int row, int r) {
  int sequence = p.sequences[row], source = row - (TOKENS - 1) + r;
  bool here = source >= 0 && p.sequences[source] == sequence;
  u64 kept = here ? 0 : window_row(p.window, sequence, p.positions[row] - (TOKENS - 1) + r);
  sts_u64(AT_FROM + 8 * r, kept), sts_u64(AT_KEEP + 8 * r, 0), sts_u64(AT_SINK + 8 * r, 0);
  sts_u64(AT_SLOT + 8 * r, here ? 0 : page + r);
  sts_u64(AT_PAGE_ROPE + 8 * r, here ? (u64)p.k_rope + source * p.rope_stride : kept ? kept + LATENT_BYTES : 0);
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, ROW_BLOCKS) append(const __grid_constant__ AppendArguments p) {
  check_shared_base();
  const int thread = thread_index(), warp = uniform(thread >> 5), lane = thread & 31;
  const int start = block_index() * p.tile;
  if (warp < 2) {
    u32 ends = vote(place_row(p, thread, start + thread));
    if (lane == 0) sts32(AT_ENDS + 4 * warp, ends);
  }
  sync_block();
  if (warp < GROUPS)
    append_content(p, warp, lane, p.tile);
  else
    copy_rope(lane, p.tile);
  u64 ends = lds_u64(AT_ENDS);
  for (; ends; ends &= ends - 1) {
    u32 low = (u32)ends;
    int r = low ? first_set(low) : 32 + first_set((u32)(ends >> 32)), row = start + r;
    u64 page = page_of(p, p.sequences[row], p.positions[row]);
    sync_block();  // places of the rows before are not needed any more
    if (warp < 2) place_page(p, page, row, thread);
    sync_block();
    if (warp == GROUPS)
      append_rope(p, page, lane);
    else if (row < TOKENS - 1 || p.sequences[row - (TOKENS - 1)] != p.sequences[row])
      append_content(p, warp, lane, TOKENS);
  }
}
