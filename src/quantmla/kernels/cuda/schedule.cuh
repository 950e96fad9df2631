// Which thread block computes what: every sequence is cut into equal parts that cost at most `chunk`
// pages; its bf16 rows count as WINDOW_PAGES and belong to the last part. The chunk depends on the batch
// as a set, so a permuted batch gives the same parts, and the same bits.

#define PAGE_SIZE 64
#define WINDOW_PAGES (HEADS == 16 ? 12 : 10)  // what a sequence's bf16 rows cost
#define LEAST_CHUNK 6
#define ITEM_COST 8  // pages: start, merge and partial results of one part
#define ROUNDS 8     // parts per thread block that are considered
#define STAGED 256   // sequences whose costs are kept in shared memory

struct Arguments {
  const u8* pages;
  const int* block_table;
  const int* lengths;
  const int* window_start;  // may be null
  const int* window_table;
  const int* sink_pages;
  const u16* window;
  const u16* q_latent;
  const u16* q_rope;
  u16* part_out;     // float16 [part, tile][HEADS][LATENT]
  float* part_lse;   // [part, tile][HEADS], base 2
  int* part_of;      // per sequence: its first part, their number
  u16* out;          // [batch, query_len, heads][LATENT]
  float* lse;        // [batch, query_len, heads], natural
  i64 page_stride;   // bytes
  i64 block_table_stride;
  i64 window_page_stride, window_row_stride;  // elements
  i64 window_table_stride;
  i64 latent_stride[3], rope_stride[3];  // batch, query, head
  int lengths_stride, start_stride, sink_stride;
  int window_width, window_page_size;
  int batch, query_len, heads, tiles;
  int num_sinks, recent_window, num_splits;  // num_splits 0: chosen here
  int is_bf16;                               // dtype of query and output: bf16, else fp16
  float scale_log2;                          // softmax scale / ln 2
};

struct Item {
  int sequence, part, parts, first;  // `first`: number of the sequence's first part
};

DEVICE int packed_length(const Arguments& p, int b) {
  int length = p.lengths[(i64)b * p.lengths_stride];
  int packed = max(length - p.recent_window, 0) / PAGE_SIZE * PAGE_SIZE;
  if (p.window_start) packed = max(packed, p.window_start[(i64)b * p.start_stride]);
  return min(packed, length / PAGE_SIZE * PAGE_SIZE);
}

DEVICE int num_pages(const Arguments& p, int b) { return packed_length(p, b) / PAGE_SIZE; }

DEVICE int find_cost(const Arguments& p, int b) {
  return p.lengths[(i64)b * p.lengths_stride] > 0 ? num_pages(p, b) + WINDOW_PAGES : 0;
}

// A line of a sequence's block table on its way to L2, another one in every block.
DEVICE void prefetch_table(const Arguments& p, int b, int cost) {
  int entry = block_index() * 32;
  if (entry < cost - WINDOW_PAGES) prefetch((u64)(p.block_table + b * p.block_table_stride + entry));
}

// The first sequences' costs to shared memory as float32, and zeros up to a multiple of four.
DEVICE void stage_costs(const Arguments& p, u32 costs) {
#pragma unroll 1
  for (int b = thread_index(); b < (min(p.batch, STAGED) + 3) / 4 * 4; b += thread_count()) {
    int cost = b < p.batch ? find_cost(p, b) : 0;
    sts_float(costs + b * 4, (float)cost);
    prefetch_table(p, b, cost);
  }
  sync_block();
}

// What a sequence costs, in pages.
DEVICE int cost_of(const Arguments& p, u32 costs, int b) { return b < STAGED ? (int)lds_float(costs + b * 4) : find_cost(p, b); }

DEVICE int parts(const Arguments& p, int cost, int chunk) {
  if (p.num_splits > 0) return min(p.num_splits, min(cost, max(cost - WINDOW_PAGES, 1)));
  return (u32)(cost + chunk - 1) / (u32)chunk;
}

// First page of a part; pages times parts are below 2^32.
DEVICE int first_page(const Item& item, int pages, int part) {
  return min((int)((u32)(pages + WINDOW_PAGES) * (u32)part / (u32)item.parts), pages);
}

// Parts of all sequences, without divisions or conversions: cost / chunk rounded up is (cost + chunk - 1/2) / chunk
// rounded down, and that less 1/2 rounded to the nearest, by adding 2^23. Exact below two million pages: the half keeps
// away from integers.
DEVICE int count_parts(const Arguments& p, u32 costs, int chunk) {
  const float rounder = 8388608.0f;
  float inverse = 1.0f / chunk, offset = 0.5f - 0.5f * inverse;
  u32 count = 0, added = 0;
#pragma unroll 1
  for (int b = 0; b < min(p.batch, STAGED); b += 4, added += 4) {
    V4 x = lds128(costs + b * 4);
    count += as_bits(as_float(x.x) * inverse + offset + rounder) + as_bits(as_float(x.y) * inverse + offset + rounder);
    count += as_bits(as_float(x.z) * inverse + offset + rounder) + as_bits(as_float(x.w) * inverse + offset + rounder);
  }
#pragma unroll 1
  for (int b = STAGED; b < p.batch; b++, added++) count += as_bits(find_cost(p, b) * inverse + offset + rounder);
  return count - added * as_bits(rounder);
}

// The chunk that ends soonest; all threads call it and get the same. `scratch`: 2 words a warp.
DEVICE int choose_chunk(const Arguments& p, u32 costs, u32 scratch, u32 warps) {
  int lane = thread_index() & 31, warp = thread_index() >> 5;
  if (p.num_splits > 0) return 1;
  int total = 0, most = 0, filled = 0;
#pragma unroll 1
  for (int b = lane; b < p.batch; b += 32) {
    int n = cost_of(p, costs, b);
    total += n, most = max(most, n), filled += n > 0;
  }
  total = warp_sum(total), filled = warp_sum(filled), most = warp_most(most);
  int best = 0x7fffffff, chosen = max(most, 1);
#pragma unroll 1
  for (int rounds = warp + 1; rounds <= ROUNDS; rounds += warps) {
    int places = rounds * block_count() / (u32)p.tiles;
    if (places < filled || places == 0) continue;
    int low = (u32)(total + places - 1) / (u32)places;
    int high = places > filled ? min(most, (int)((u32)total / (u32)(places - filled)) + 1) : most;
    int chunk = max(low + ((high - low) * lane + 30) / 31, 1);
    u32 fits = vote(count_parts(p, costs, chunk) <= places);
    if (!fits) continue;
    chunk = max(shuffle(chunk, first_set(fits)), LEAST_CHUNK);
    int cost = rounds * (chunk + ITEM_COST);
    if (cost < best) best = cost, chosen = chunk;
  }
  if (lane == 0 && warp < ROUNDS) sts64(scratch + warp * 8, V2{(u32)best, (u32)chosen});
  sync_block();
  for (u32 w = 0; w < min(warps, (u32)ROUNDS); w++) {
    V2 found = lds64(scratch + w * 8);
    int cost = found.x, chunk = found.y;
    if (cost < best || (cost == best && chunk < chosen)) best = cost, chosen = chunk;
  }
  return chosen;
}

DEVICE int total_parts(const Arguments& p, u32 costs, int chunk) {
  int total = 0;
#pragma unroll 1
  for (int b = thread_index() & 31; b < p.batch; b += 32) total += parts(p, cost_of(p, costs, b), chunk);
  return warp_sum(total);
}

// Part number `index` of the whole batch, if there is one; every warp looks for itself. Returns the number of parts.
DEVICE int find_item(const Arguments& p, u32 costs, int index, int chunk, Item& item) {
  int lane = thread_index() & 31, before = 0;
#pragma unroll 1
  for (int b0 = 0; b0 < p.batch; b0 += 32) {
    int b = b0 + lane, own = b < p.batch ? parts(p, cost_of(p, costs, b), chunk) : 0, upto = own;
    for (int delta = 1; delta < 32; delta <<= 1) {
      int left = shuffle_up(upto, delta);
      if (lane >= delta) upto += left;
    }
    u32 past = vote(before + upto > index);
    if (past && before <= index) {
      int who = first_set(past);
      item.sequence = b0 + who;
      item.parts = shuffle(own, who);
      item.first = before + shuffle(upto, who) - item.parts;
      item.part = index - item.first;
    }
    before += shuffle(upto, 31);
  }
  return before;
}
