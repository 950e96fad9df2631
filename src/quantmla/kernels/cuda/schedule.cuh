// Which thread block computes what: every sequence is cut into equal parts that cost at most `chunk`
// pages; its bf16 rows count as WINDOW_PAGES and belong to the last part. The chunk depends on the batch
// as a set, so a permuted batch gives the same parts, and the same bits.

#define PAGE_SIZE 64
#define WINDOW_PAGES 10  // what a sequence's bf16 rows cost
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
  float* part_out;   // [part, tile][HEADS][LATENT]
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

// The first sequences' costs to shared memory.
DEVICE void stage_costs(const Arguments& p, u32 costs) {
  for (int b = thread_index(); b < min(p.batch, STAGED); b += thread_count()) sts32(costs + b * 4, find_cost(p, b));
  sync_block();
}

// What a sequence costs, in pages.
DEVICE int cost_of(const Arguments& p, u32 costs, int b) { return b < STAGED ? (int)lds32(costs + b * 4) : find_cost(p, b); }

DEVICE int parts(const Arguments& p, int cost, int chunk) {
  if (p.num_splits > 0) return min(p.num_splits, min(cost, max(cost - WINDOW_PAGES, 1)));
  return (cost + chunk - 1) / chunk;
}

// First page of a part.
DEVICE int first_page(const Item& item, int pages, int part) {
  return min((int)((i64)(pages + WINDOW_PAGES) * part / item.parts), pages);
}

// The chunk that ends soonest; all threads call it and get the same. `scratch`: 2 words a warp.
DEVICE int choose_chunk(const Arguments& p, u32 costs, u32 scratch, u32 warps) {
  int lane = thread_index() & 31, warp = thread_index() >> 5;
  if (p.num_splits > 0) return 1;
  int total = 0, most = 0, filled = 0;
  for (int b = lane; b < p.batch; b += 32) {
    int n = cost_of(p, costs, b);
    total += n, most = max(most, n), filled += n > 0;
  }
  for (int mask = 16; mask; mask >>= 1) {
    total += shuffle_xor(total, mask), filled += shuffle_xor(filled, mask);
    most = max(most, shuffle_xor(most, mask));
  }
  int best = 0x7fffffff, chosen = max(most, 1);
  for (int rounds = warp + 1; rounds <= ROUNDS; rounds += warps) {
    int places = rounds * (int)block_count() / p.tiles;
    if (places < filled || places == 0) continue;
    int low = (total + places - 1) / places;
    int high = places > filled ? min(most, total / (places - filled) + 1) : most;
    int chunk = max(low + ((high - low) * lane + 30) / 31, 1);
    int count = 0;
    float inverse = 1.0f / chunk;  // exact below two million pages: the half keeps away from integers
#pragma unroll 8
    for (int b = 0; b < p.batch; b++) count += (int)((cost_of(p, costs, b) + chunk - 0.5f) * inverse);
    u32 fits = vote(count <= places);
    if (!fits) continue;
    chunk = max(shuffle(chunk, first_set(fits)), LEAST_CHUNK);
    int cost = rounds * (chunk + ITEM_COST);
    if (cost < best) best = cost, chosen = chunk;
  }
  if (lane == 0) sts32(scratch + warp * 8, best), sts32(scratch + warp * 8 + 4, chosen);
  sync_block();
  for (u32 w = 0; w < warps; w++) {
    int cost = lds32(scratch + w * 8), chunk = lds32(scratch + w * 8 + 4);
    if (cost < best || (cost == best && chunk < chosen)) best = cost, chosen = chunk;
  }
  return chosen;
}

DEVICE int total_parts(const Arguments& p, u32 costs, int chunk) {
  int total = 0;
  for (int b = thread_index() & 31; b < p.batch; b += 32) total += parts(p, cost_of(p, costs, b), chunk);
  for (int mask = 16; mask; mask >>= 1) total += shuffle_xor(total, mask);
  return total;
}

// Part number `index` of the whole batch; every warp looks for itself.
DEVICE void find_item(const Arguments& p, u32 costs, int index, int chunk, Item& item) {
  int lane = thread_index() & 31, before = 0;
  for (int b0 = 0; b0 < p.batch; b0 += 32) {
    int b = b0 + lane, own = b < p.batch ? parts(p, cost_of(p, costs, b), chunk) : 0, upto = own;
    for (int delta = 1; delta < 32; delta <<= 1) {
      int left = shuffle_up(upto, delta);
      if (lane >= delta) upto += left;
    }
    u32 past = vote(before + upto > index);
    if (past) {
      int who = first_set(past);
      item.sequence = b0 + who;
      item.parts = shuffle(own, who);
      item.first = before + shuffle(upto, who) - item.parts;
      item.part = index - item.first;
      return;
    }
    before += shuffle(upto, 31);
  }
}
