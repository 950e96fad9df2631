// Sizes, places in shared memory, and where a thread stands.

#define LATENT 512
#define ROPE 64
#define CONSUMERS (WARPGROUPS * 128)  // threads that attend; the last warpgroup prepares pages for them
#define THREADS (CONSUMERS + 128)
// registers a thread; all have 65536 / THREADS at first
#if WARPGROUPS == 3
#define CONSUMER_REGISTERS 160
#define PRODUCER_REGISTERS 32
#else
#define CONSUMER_REGISTERS 232
#define PRODUCER_REGISTERS 40
#endif
#define PRODUCERS (WARPGROUPS == 2 ? 4 : WARPGROUPS)  // warps
#define RING 2  // pages whose metadata is prepared, for each warpgroup
#define P_BUFFERS (2 * WARPGROUPS)
#define H2 (HEADS / 2)     // accumulators of a 64-row product, per thread
#define TILE (32 * HEADS)  // bytes of a B operand [16, HEADS]
#define HALF (64 * 128)    // bytes of 64 rows of 128 bytes

// Query tiles. In float16, for bf16 rows and for means: content [8 groups][4], rope [4]; sums per group. In float8,
// for packed keys, as a sum of two terms: content [8 groups][2 steps of 32][2 terms], rope [2 bands][2 terms].
#define MEAN_TILE 32
#define SUMS_TILE 36
#define KEY_TILE 37
#define ROPE_TILE 69
#define QUERY_TILES 73

// What a producer makes of a page's metadata, for the threads that want it.
#define SCORE_SCALES 0
#define SCORE_GROUP_BYTES 256  // float32 [10 groups][4 warps][8 rows][row, row + 8]
#define SCORE_ROW_BYTES 8
#define SCORE_ZEROS 2560  // float16 [16 groups][64 tokens], rows of 144 bytes: -scale * zero
#define ZEROS_ROW 144
#define VALUE_SCALES 4864
// VALUE_SCALES: for values, [8 groups][4 pairs of tokens][8]: entries as content*.cuh says
#if CONTENT_BITS == 4
#define VALUE_PAIR_BYTES 80  // of 8 entries, and room against bank conflicts
#define VALUE_GROUP(warp) (warp)
#define VALUE_STEP 4  // from a warp's first group of words to its second
#else
#define VALUE_PAIR_BYTES 144
#define VALUE_GROUP(warp) (2 * warp)
#define VALUE_STEP 1
#endif
#define VALUE_GROUP_BYTES (4 * VALUE_PAIR_BYTES)
#define MEANS (VALUE_SCALES + 8 * VALUE_GROUP_BYTES)  // float [HEADS / 2][2 rows][2]: query times the mean rope key
#define SHIFT (MEANS + HEADS * 8)  // int: scales of values, and of keys that are scaled, carry 2^shift
#define PREPARED (SHIFT + 16)

#define AT_QUERY (WARPGROUPS * STAGES * PAGE_BYTES)
// Probabilities [WARPGROUPS][2][4]: a warp may write the next while another still reads the last.
#define AT_P (AT_QUERY + QUERY_TILES * TILE)
#define AT_PREPARED (AT_P + P_BUFFERS * 4 * TILE)              // [WARPGROUPS][RING]
#define AT_BOUND (AT_PREPARED + WARPGROUPS * RING * PREPARED)      // {query factor, maximum} [WARPGROUPS][HEADS]
#define AT_REDUCE (AT_BOUND + WARPGROUPS * HEADS * 8)          // float [WARPGROUPS][4 warps][HEADS]
#define AT_SUM (AT_REDUCE + WARPGROUPS * HEADS * 16)           // two words [WARPGROUPS][HEADS]: factors of outputs, and their units
#define AT_OUTPUT (AT_SUM + WARPGROUPS * HEADS * 4 + 16)       // where the part's output goes, in the second half of these
#define AT_ROWS (AT_SUM + WARPGROUPS * HEADS * 8)              // addresses of 64 bf16 rows [WARPGROUPS]
#define AT_TOKENS (AT_ROWS + WARPGROUPS * 512)                 // their tokens
#define AT_LIMIT (AT_TOKENS + WARPGROUPS * 256)                // last token that a column sees [HEADS]
#define AT_FACTOR (AT_LIMIT + HEADS * 4)                       // [HEADS]
#define AT_FULL (AT_FACTOR + HEADS * 4)                        // a page is there [WARPGROUPS][STAGES]
#define AT_READY (AT_FULL + WARPGROUPS * STAGES * 8)               // and its metadata is prepared [WARPGROUPS][RING]
#define AT_EMPTY (AT_READY + WARPGROUPS * RING * 8)                // all has been read [WARPGROUPS][RING]
#define AT_SCHEDULE (AT_EMPTY + WARPGROUPS * RING * 8)
#define AT_COSTS (AT_SCHEDULE + THREADS / 4)
#define AT_MEETING (AT_COSTS + STAGED * 4)
#define SHARED_BYTES (AT_MEETING + MEETING_BYTES)

// Named barriers beside 1 + group: of all consumers, and of those with the producers.
#define CONSUMERS_BARRIER 8
#define ITEM_BARRIER 9
#define ITEM_THREADS (CONSUMERS + PRODUCERS * 32)

#define INFINITE as_float(0x7f800000u)
#define LOWEST -1e30f
#define MOST_HALF 0x7400u   // 2^14
#define RAISE_ABOVE 7.0f    // a new maximum makes the largest probability 2^7

struct Place {  // of a thread
  u32 lane, row, pair, warp, group;  // row = lane / 4, pair = lane % 4; warp of its warpgroup
  u32 bound, p_tile;
  // addresses of this lane: in a page, in its prepared metadata, of probabilities
  u32 score_rows, rope_rows, value_rows;
  u32 score_scales, value_scales, means;
  u32 zero_matrix;
  u32 p_store;
};

// Descriptor of a B operand: steps between 8 values of k, and between 8 columns, in 16 bytes.
#define STEPS ((u32)HEADS << 16)
#define OTHER_STEP 8
DEVICE u32 descriptor(u32 address) { return address >> 4 | STEPS; }
DEVICE u64 operand(u32 descriptor_low, u32 tile) { return join(descriptor_low + tile * (TILE / 16), OTHER_STEP); }
DEVICE u64 query_tile(u32 tile) { return operand(descriptor(SHARED_BASE + AT_QUERY), tile); }
// Byte of element (k, n) of a B operand, of float16 and of float8.
DEVICE u32 element(u32 k, u32 n) { return (k / 8) * (HEADS * 16) + n * 16 + (k % 8) * 2; }
DEVICE u32 element8(u32 k, u32 n) { return (k / 16) * (HEADS * 16) + n * 16 + k % 16; }
DEVICE void find_place(Place& at) {
  u32 lane = thread_index() % 32, warp = uniform(thread_index() / 32);
  at.lane = lane, at.row = kept(lane / 4), at.pair = kept(lane % 4), at.warp = warp % 4, at.group = warp / 4;
  at.bound = SHARED_BASE + AT_BOUND + at.group * HEADS * 8;
  at.p_tile = SHARED_BASE + AT_P + at.group * 8 * TILE;

  u32 token = at.warp * 16 + lane % 16, eighth = lane % 8, half = lane / 16;
  at.score_rows = kept(token * 128 + (half ^ eighth) * 16);
  at.rope_rows = kept(AT_ROPE + token * 32 + half * 16);
  at.value_rows = kept((eighth + half * 8) * 128 + ((2 * at.warp + lane / 8 % 2) ^ eighth) * 16);
  at.zero_matrix = kept(SCORE_ZEROS + (eighth + half * 8) * ZEROS_ROW + (2 * at.warp + lane / 8 % 2) * 16);
  at.score_scales = kept(SCORE_SCALES + (at.warp * 8 + at.row) * SCORE_ROW_BYTES);
  at.value_scales = kept(VALUE_SCALES + VALUE_GROUP(at.warp) * VALUE_GROUP_BYTES + at.pair * VALUE_PAIR_BYTES);
  at.means = kept(MEANS + at.pair * 16);
  at.p_store = kept(at.p_tile + (2 * at.warp + lane / 8 % 2) * (HEADS * 16) + half * 128 + eighth * 16);
}

DEVICE u32 page_address(u32 group, u32 slot) { return SHARED_BASE + (group * STAGES + slot) * PAGE_BYTES; }
DEVICE u32 full_barrier(u32 group, u32 slot) { return SHARED_BASE + AT_FULL + (group * STAGES + slot) * 8; }
DEVICE u32 prepared_address(u32 group, u32 turn) { return SHARED_BASE + AT_PREPARED + (group * RING + turn % RING) * PREPARED; }
DEVICE u32 ready_barrier(u32 group, u32 turn) { return SHARED_BASE + AT_READY + (group * RING + turn % RING) * 8; }
DEVICE u32 empty_barrier(u32 group, u32 turn) { return SHARED_BASE + AT_EMPTY + (group * RING + turn % RING) * 8; }
