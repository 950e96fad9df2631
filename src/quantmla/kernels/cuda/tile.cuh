// Sizes, places in shared memory, and where a thread stands.

#define LATENT 512
#define ROPE 64
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1
#endif
#define THREADS (WARPGROUPS * 128)
#define H2 (HEADS / 2)     // accumulators of a 64-row product, per thread
#define TILE (32 * HEADS)  // bytes of a B operand [16, HEADS]
#define HALF (64 * 128)    // bytes of 64 rows of 128 bytes

// Query tiles: content [8 groups][4], rope [2 bands][2], rope as it is [4], sums per group.
#define ROPE_TILE 32
#define MEAN_TILE 36
#define SUMS_TILE 40
#define QUERY_TILES 41

// What a warp makes of a page's scales and zero points, for itself.
#define SCORE_SCALES 0        // float32 [10 groups][8 rows][row, row + 8], rows of 72 bytes
#define SCORE_ZEROS 720       // float16 [16 groups][16 tokens], rows of 48 bytes: -scale * zero
#if CONTENT_BITS == 4
#define VALUE_BYTES 8          // of an entry: scale, -scale (64 + zero)
#define VALUE_PAIR_BYTES 80    // of 8 entries, and room against bank conflicts
#define VALUE_GROUP_BYTES 320
#define VALUE_GROUP(warp, i) (warp + 4 * i)  // groups of the words that are a warp's rows
#else
#define VALUE_BYTES 16         // scale, -scale (16 + zero), -scale (4 + zero), unused
#define VALUE_PAIR_BYTES 144
#define VALUE_GROUP_BYTES 576
#define VALUE_GROUP(warp, i) (2 * warp + i)
#endif
#define VALUE_SCALES 1488     // for values, of token pairs [2 groups][4][8]: entries as content*.cuh says
#define PREPARED (VALUE_SCALES + 2 * VALUE_GROUP_BYTES)

#define AT_QUERY (WARPGROUPS * STAGES * PAGE_BYTES)
// Probabilities [WARPGROUPS][2][4]: a warp may write the next while another still reads the last.
#define AT_P (AT_QUERY + QUERY_TILES * TILE)
#define AT_PREPARED (AT_P + WARPGROUPS * 8 * TILE)
#define AT_BOUND (AT_PREPARED + WARPGROUPS * 4 * PREPARED)  // {query factor, maximum} [WARPGROUPS][HEADS]
#define AT_REDUCE (AT_BOUND + WARPGROUPS * HEADS * 8)       // float [WARPGROUPS][4 warps][HEADS]
#define AT_SUM (AT_REDUCE + WARPGROUPS * HEADS * 16)        // {maximum, sum} [WARPGROUPS][HEADS]
#define AT_ROWS (AT_SUM + WARPGROUPS * HEADS * 8)           // addresses of 64 bf16 rows [WARPGROUPS]
#define AT_TOKENS (AT_ROWS + WARPGROUPS * 512)              // their tokens
#define AT_LIMIT (AT_TOKENS + WARPGROUPS * 256)             // last token that a column sees [HEADS]
#define AT_FACTOR (AT_LIMIT + HEADS * 4)                    // [HEADS]
#define AT_BARRIER (AT_FACTOR + HEADS * 4)                  // [WARPGROUPS][STAGES]
#define AT_COUNT (AT_BARRIER + WARPGROUPS * STAGES * 8)     // warps that are done with a stage
#define AT_SCHEDULE (AT_COUNT + WARPGROUPS * STAGES * 8)
#ifdef MEANS_AHEAD
#define AT_MEANS (AT_SCHEDULE + WARPGROUPS * 32)  // query times mean rope keys [WARPGROUPS][64 pages][HEADS]
#define SHARED_BYTES (AT_MEANS + WARPGROUPS * 256 * HEADS)
#else
#define SHARED_BYTES (AT_SCHEDULE + WARPGROUPS * 32)
#endif

#define INFINITE as_float(0x7f800000u)
#define LOWEST -1e30f
#define MOST_HALF 0x7400u   // 2^14
#define RAISE_ABOVE 7.0f    // a new maximum makes the largest probability 2^7

struct Place {  // of a thread
  u32 lane, row, pair, warp, group;  // row = lane / 4, pair = lane % 4; warp of its warpgroup
  u32 prepared, bound, p_tile;
  u32 probability;  // descriptor
  // addresses of this lane, those in a page relative to it
  u32 score_rows, rope_rows, value_rows, mean;
  u32 score_source, score_scales, score_zeros, zero_matrix, fold_scales;
  u32 value_source, value_target, value_scales;
  u32 p_store;
};

// Descriptor of a B operand: steps between 8 values of k, and between 8 columns, in 16 bytes.
#ifdef SWAP_STRIDES
#define STEPS (8u << 16)
#define OTHER_STEP HEADS
#else
#define STEPS ((u32)HEADS << 16)
#define OTHER_STEP 8
#endif
DEVICE u32 descriptor(u32 address) { return address >> 4 | STEPS; }
DEVICE u64 operand(u32 descriptor_low, u32 tile) { return join(descriptor_low + tile * (TILE / 16), OTHER_STEP); }
DEVICE u64 query_tile(u32 tile) { return operand(descriptor(SHARED_BASE + AT_QUERY), tile); }
// Byte of element (k, n) of a B operand.
DEVICE u32 element(u32 k, u32 n) { return (k / 8) * (HEADS * 16) + n * 16 + (k % 8) * 2; }

DEVICE void find_place(Place& at) {
  u32 lane = thread_index() % 32, warp = uniform(thread_index() / 32);
  at.lane = lane, at.row = lane / 4, at.pair = lane % 4, at.warp = warp % 4, at.group = warp / 4;
  at.prepared = SHARED_BASE + AT_PREPARED + warp * PREPARED;
  at.bound = SHARED_BASE + AT_BOUND + at.group * HEADS * 8;
  at.p_tile = SHARED_BASE + AT_P + at.group * 8 * TILE;
  at.probability = descriptor(at.p_tile);

  u32 token = at.warp * 16 + lane % 16, eighth = lane % 8, half = lane / 16;
  at.score_rows = kept(token * 128 + (half ^ eighth) * 16);
  at.rope_rows = kept(AT_ROPE + token * 32 + half * 16);
  at.value_rows = kept((eighth + half * 8) * 128 + ((2 * at.warp + lane / 8 % 2) ^ eighth) * 16);
  at.mean = kept(AT_MEAN + at.pair * 4);
  u32 group = lane / 2, part = lane % 2, four = lane % 16;
  at.score_source = kept(group * PAGE_SIZE + at.warp * 16 + part * 8);
  at.score_scales = kept(at.prepared + SCORE_SCALES + group * 72 + part * 4);
  at.score_zeros = kept(at.prepared + SCORE_ZEROS + group * 48 + part * 16);
  at.zero_matrix = kept(at.prepared + SCORE_ZEROS + (eighth + half * 8) * 48 + lane / 8 % 2 * 16);
  at.fold_scales = kept(at.prepared + SCORE_SCALES + at.row * 8);
  at.value_source = kept(VALUE_GROUP(at.warp, half) * PAGE_SIZE + four * 4);
  at.value_target = kept(at.prepared + VALUE_SCALES + half * VALUE_GROUP_BYTES + four % 2 * 2 * VALUE_PAIR_BYTES +
                         four / 2 * VALUE_BYTES);
  at.value_scales = kept(at.prepared + VALUE_SCALES + at.pair * VALUE_PAIR_BYTES);
  at.p_store = kept(at.p_tile + (2 * at.warp + lane / 8 % 2) * (HEADS * 16) + half * 128 + eighth * 16);
}
