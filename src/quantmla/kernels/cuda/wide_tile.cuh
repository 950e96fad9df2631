// Sizes, places in shared memory, and where a thread stands, for tiles of 64 columns.

#define LATENT 512
#define ROPE 64
#define THREADS 384
#define CONSUMERS 256      // two warpgroups; the third brings pages
#define CONSUMER_REGISTERS 232
#define PRODUCER_REGISTERS 40
#define H2 (HEADS / 2)     // accumulators of a 64-row product, per thread
#define TILE (32 * HEADS)  // bytes of a B operand [16, HEADS]
#define HALF (64 * 128)    // bytes of 64 rows of 128 bytes

// Query tiles: content [8 groups][4], rope [2 bands][2].
#define ROPE_TILE 32
#define QUERY_TILES 36

#if CONTENT_BITS == 4
#define VALUE_HALF(group) ((group)*HALF)                 // bytes to a consumer's words
#define VALUE_GROUP(group, warp) (4 * (group) + (warp))  // scale group of a warp's words
#define VALUE_PAIR_BYTES 16
#else
#define VALUE_HALF(group) 0                       // both consumers take all words, four planes each
#define VALUE_GROUP(group, warp) (2 * (warp))     // scale group of a warp's upper 8 words
#define VALUE_PAIR_BYTES 32
#endif

// Integers are read in place, as subnormal float16 numbers n 2^-24 (an upper nibble with the one below, a crumb with those
// below in its byte), and scales carry the page's 2^shift, so that the largest is near 2^15: keys and values of a page are in
// units of 2^(shift - 24). Rows in bf16 are in units of 1, as if shift were 24. Outputs are in units of
// 2^(OUTPUT_SHIFT - 24): a page's probabilities make up for the difference.
#define OUTPUT_SHIFT 15
#define NO_SHIFT 24

// What is made of a page's scales and zero points, in float16.
// For scores [10 groups][4 warps][8 rows]: {scale, offset} of a row, {scale, 17 offset} or, for content of 2 bits,
// {5 offset, 21 offset}, and both of row + 8.
// For values [8 groups][4 steps of 16 tokens][4]: scales, offsets, for 2 bits 5 and 21 times as much, of tokens 2i and
// 2i + 1, then of those + 8.
#define SCORE_SCALES 0
#define SCORE_GROUP_BYTES 512
#define VALUE_SCALES 5120
#define VALUE_GROUP_BYTES (16 * VALUE_PAIR_BYTES)
#define MEANS (VALUE_SCALES + 8 * VALUE_GROUP_BYTES)  // of rope keys, in the page's unit, odd planes
// with the one below [2 bands][4][4 planes]: of words 2i and 2i + 1
#define SHIFT (MEANS + 128)
#define PREPARED (SHIFT + 16)

#define AT_QUERY (STAGES * PAGE_BYTES)
#define AT_P (AT_QUERY + QUERY_TILES * TILE)     // probabilities of a step [2][4 tiles]
#define AT_PREPARED (AT_P + 8 * TILE)            // [STAGES]
#define AT_BOUND (AT_PREPARED + STAGES * PREPARED)  // maximum [HEADS]
#define AT_REDUCE (AT_BOUND + HEADS * 4)         // float [4 warps][HEADS]
#define AT_RAISED (AT_REDUCE + HEADS * 16)       // what a raised maximum does to sums before it [2][HEADS]
#define AT_SUM (AT_RAISED + HEADS * 8)           // [HEADS]
#define AT_ROWS (AT_SUM + HEADS * 4)             // addresses of 64 bf16 rows [2]
#define AT_TOKENS (AT_ROWS + 1024)               // their tokens
#define AT_LIMIT (AT_TOKENS + 512)               // last token that a column sees [HEADS]
#define AT_STEP (AT_LIMIT + HEADS * 4)           // {is its maximum raised, weight of its probabilities in the sum} [2]
#define AT_LARGEST (AT_STEP + 16)                // of the query's rows, by warps [8]
#define AT_FACTOR (AT_LARGEST + 32)              // of the query, undoes what brought it to float16
#define AT_LOADED (AT_FACTOR + 16)               // barriers [STAGES]: the page is there,
#define AT_READY (AT_LOADED + STAGES * 8)        // its scales are prepared,
#define AT_EMPTY (AT_READY + STAGES * 8)         // nobody wants it any more
#define AT_PUBLISHED (AT_EMPTY + STAGES * 8)     // barriers [2]: a step's probabilities and maxima are there,
#define AT_FREE (AT_PUBLISHED + 16)              // have been read
#define AT_SCHEDULE (AT_FREE + 16)
#define AT_COSTS (AT_SCHEDULE + THREADS / 32 * 8)
#define AT_MEETING (AT_COSTS + STAGED * 4)
#define SHARED_BYTES (AT_MEETING + MEETING_BYTES)

#define INFINITE as_float(0x7f800000u)
#define LOWEST -3e4f       // of a maximum: columns that see no token
#define MOST 12.99f        // largest binary logarithm of a probability: float16 has room for the sum of eight
#define RAISE_ABOVE 7.0f    // a new maximum makes the largest probability 2^7

// Named barriers: 1 and 2 are a consumer warpgroup's own.
#define ALL_CONSUMERS 3
#define SUMS_DONE 4

struct Place {  // of a consumer thread
  u32 lane, row, pair, warp, group;  // row = lane / 4, pair = lane % 4; warp of its warpgroup
  // addresses of this lane; those in a page, or in what is prepared of it, relative to it
  u32 score_rows, rope_rows, value_rows, score_scales, value_scales, bound, p_store;
};

// Descriptor of a B operand: steps between 8 values of k, and between 8 columns, in 16 bytes.
DEVICE u32 descriptor(u32 address) { return address >> 4 | (u32)HEADS << 16; }
DEVICE u64 operand(u32 descriptor_low, u32 tile) { return join(descriptor_low + tile * (TILE / 16), 8); }
DEVICE u64 query_tile(u32 tile) { return operand(descriptor(SHARED_BASE + AT_QUERY), tile); }
// Byte of element (k, n) of a B operand.
DEVICE u32 element(u32 k, u32 n) { return (k / 8) * (HEADS * 16) + n * 16 + (k % 8) * 2; }

DEVICE void find_place(Place& at) {
  u32 lane = thread_index() % 32, warp = uniform(thread_index() / 32);
  at.lane = lane, at.row = lane / 4, at.pair = lane % 4, at.warp = warp % 4, at.group = warp / 4;
  u32 token = at.warp * 16 + lane % 16, eighth = lane % 8, half = lane / 16;
  at.score_rows = kept(token * 128 + (half ^ eighth) * 16);
  at.rope_rows = kept(AT_ROPE + token * 32 + half * 16);
  at.value_rows = kept(VALUE_HALF(at.group) + (eighth + half * 8) * 128 + ((2 * at.warp + lane / 8 % 2) ^ eighth) * 16);
  at.score_scales = kept(SCORE_SCALES + (at.warp * 8 + at.row) * 16);
  at.value_scales = kept(VALUE_SCALES + VALUE_GROUP(at.group, at.warp) * VALUE_GROUP_BYTES + at.pair * VALUE_PAIR_BYTES);
  at.bound = kept(SHARED_BASE + AT_BOUND + at.pair * 8);
  at.p_store = kept(SHARED_BASE + AT_P + at.group * 4 * TILE + (2 * at.warp + lane / 8 % 2) * (HEADS * 16) + half * 128 + eighth * 16);
}
