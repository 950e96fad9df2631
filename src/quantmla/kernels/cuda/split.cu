// The decode kernel with warpgroups of their own for scores and for values, for 32 columns: what each
// keeps in registers is less, so there are more warps, and none waits for the other's latencies. Two
// warpgroups score pages in turn; two add values, each for one half of the channels, of all pages. Warps
// of the last warpgroup bring pages and prepare their metadata, in turn.
//
// A page's slots: FULL says it is there, READY that its metadata is prepared too, SCORED that its
// probabilities are there, EMPTY that all has been read. Scorers go from pair to pair of pages together,
// so that one running maximum serves both; if it is raised, the pair carries the factors of older sums.

DEVICE u32 scored_barrier(u32 turn) { return SHARED_BASE + AT_SCORED + turn % RING * 8; }
DEVICE u32 raised_flag(u32 pair) { return SHARED_BASE + AT_RAISED + pair % 2 * 8; }
DEVICE u32 raised_factors(u32 pair) { return SHARED_BASE + AT_FACTORS + pair % 2 * HEADS * 4; }

struct Part {  // pages `first` to `last` of a sequence; the window too, if it is the last part
  int b, tile, first, last;
  bool windowed;
  Window window;
};

DEVICE Part find_part(const Arguments& p, const Item& item, int tile) {
  int all = num_pages(p, item.sequence);
  return Part{item.sequence, tile, first_page(item, all, item.part), first_page(item, all, item.part + 1),
              item.part + 1 == item.parts, find_window(p, item.sequence)};
}

DEVICE int window_blocks(const Part& part) {
  const Window& w = part.window;
  return part.windowed ? (w.length - w.start + w.sinks + 63) / 64 : 0;
}

// ---- scores

// Raises the common maximum over both scorers' rows, and scales their sums.
DEVICE void raise_common(const Place& at, Units units, u32 pair, const float (&s)[H2], float (&l)[HEADS / 4]) {
  u32 reduce = SHARED_BASE + AT_REDUCE, n = thread_index();
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V4 b = bound(at, j);
    float x = warp_rows_max(fmaxf(s[4 * j], s[4 * j + 2]) * units.scores * as_float(b.x)) + units.probabilities;
    float y = warp_rows_max(fmaxf(s[4 * j + 1], s[4 * j + 3]) * units.scores * as_float(b.z)) + units.probabilities;
    u32 to = reduce + ((at.group * 4 + at.warp) * HEADS + j * 8 + at.pair * 2) * 4;
    if (at.lane < 4) sts_float(to, x), sts_float(to + 4, y);
  }
  sync_named(SCORERS_BARRIER, SCORERS * 128);
  if (n < HEADS) {
    float old = lds_float(at.bound + n * 8 + 4), raised = old;
    for (int w = 0; w < SCORERS * 4; w++) raised = fmaxf(raised, lds_float(reduce + (w * HEADS + n) * 4) - RAISE_ABOVE);
    sts_float(at.bound + n * 8 + 4, raised);
    sts_float(raised_factors(pair) + n * 4, exp2_fast(old - raised));
  }
  sync_named(SCORERS_BARRIER, SCORERS * 128);
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V2 f = lds64(raised_factors(pair) + (j * 8 + at.pair * 2) * 4);
    l[2 * j] *= as_float(f.x), l[2 * j + 1] *= as_float(f.y);
  }
}

// Probabilities of one page of a pair, or of none; both scorers call it.
DEVICE void softmax_pair(const Place& at, Units units, u32 pair, u32 buffer, bool any, const float (&s)[H2], float (&l)[HEADS / 4]) {
  float e[H2];
  u32 p[H2 / 2], most = 0;
  if (any) {
    most = probabilities(at, units, s, e, p);
    store_probabilities(at, buffer, p);
  }
  bool raise = uniform(any_named(SCORERS_BARRIER, SCORERS * 128, any && most > MOST_HALF));
  if (thread_index() == 0) sts32(raised_flag(pair), raise);
  if (raise) {
    raise_common(at, units, pair, s, l);
    if (any) {
      probabilities(at, units, s, e, p);
      store_probabilities(at, buffer, p);
    }
  }
  if (!any) return;
  float down = SHIFTED ? exp2_fast(-units.probabilities) : 1.0f;
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    l[2 * j] += down * (e[4 * j] + e[4 * j + 2]);
    l[2 * j + 1] += down * (e[4 * j + 1] + e[4 * j + 3]);
  }
}

DEVICE void no_scores(float (&s)[H2]) {
#pragma unroll
  for (int i = 0; i < H2; i++) s[i] = -INFINITE;
}

DEVICE void score_window(const Arguments& p, const Place& at, const Part& part, u32& pair, float (&l)[HEADS / 4]) {
  float s[H2];
  int blocks = window_blocks(part);
  for (int block = at.group; block < blocks + (int)at.group; block += SCORERS, pair++) {
    bool any = block < blocks;
    if (any) {
      find_rows(p, at, part.window, part.b, block);
      score_rows(at, s);
    } else {
      no_scores(s);
    }
    softmax_pair(at, Units{1, 0}, pair, at.group, any, s, l);
    sync_named(CONSUMERS_BARRIER, CONSUMERS);  // probabilities are there
    sync_named(CONSUMERS_BARRIER, CONSUMERS);  // and have been read, as have the rows
  }
}

DEVICE void score_part(const Arguments& p, const Place& at, const Part& part, u32& turn, u32& pair) {
  float s[H2], l[HEADS / 4];
#pragma unroll
  for (int i = 0; i < HEADS / 4; i++) l[i] = 0;
  if (window_blocks(part)) score_window(p, at, part, pair, l);
  int unit = SHIFTED ? 24 : 0, count = part.last - part.first;
  if (SHIFTED && count > 0) {
    barrier_wait(ready_barrier(0, turn), turn / RING % 2);
    unit = lds32(prepared_address(0, turn) + SHIFT);
  }
#pragma unroll 1
  for (int i = at.group; i < count + (int)at.group; i += SCORERS, pair++) {
    u32 t = turn + i;
    bool any = i < count;
    int shift = 0;
    no_scores(s);
    if (any) {
      u32 prepared = prepared_address(0, t);
      barrier_wait(ready_barrier(0, t), t / RING % 2);
      if (SHIFTED) shift = lds32(prepared + SHIFT);
      score_page(at, page_address(0, t % STAGES), prepared, s);
      int token = (part.first + i) * PAGE_SIZE + at.warp * 16 + at.row;
      if ((part.first + i) * PAGE_SIZE < part.window.sinks)  // these are read in bf16
#pragma unroll
        for (int k = 0; k < H2; k++)
          if (token + (k & 2 ? 8 : 0) < part.window.sinks) s[k] = -INFINITE;
    }
    softmax_pair(at, Units{score_factor(shift), (float)(unit - shift)}, pair, t % RING, any, s, l);
    sync_warp();
    barrier_arrive(scored_barrier(t), any && at.lane == 0);
  }
  turn += count;
  u32 reduce = SHARED_BASE + AT_REDUCE + (at.group * 4 + at.warp) * HEADS * 4;
#pragma unroll
  for (int j = 0; j < HEADS / 4; j++) {
    float x = l[j];
    x += shuffle_xor(x, 4), x += shuffle_xor(x, 8), x += shuffle_xor(x, 16);
    if (at.lane < 4) sts_float(reduce + (j / 2 * 8 + at.pair * 2 + j % 2) * 4, x);
  }
  sync_named(CONSUMERS_BARRIER, CONSUMERS);
}

// ---- values, of words 64 half to 64 half + 63

DEVICE void scale_older(const Place& at, u32 pair, float (&o)[4][H2]) {
  if (!uniform(lds32(raised_flag(pair)))) return;
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V2 f = lds64(raised_factors(pair) + (j * 8 + at.pair * 2) * 4);
    float f0 = as_float(f.x), f1 = as_float(f.y);
#pragma unroll
    for (int i = 0; i < 4; i++) o[i][4 * j] *= f0, o[i][4 * j + 1] *= f1, o[i][4 * j + 2] *= f0, o[i][4 * j + 3] *= f1;
  }
}

// bf16 rows of the block that scorer `group` has found; its probabilities are in buffer `group`.
DEVICE void value_half_rows(const Place& at, u32 group, u32 half, float (&o)[4][H2]) {
  const u64* probability = probabilities_at(at, group);
#pragma unroll 1
  for (u32 k = 0; k < 4; k++) {
    V2 x[4][2];  // word + 8 (i % 2) and tokens + 8 (i / 2), token
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u64 row = row_address(group, k * 16 + at.pair * 2 + i / 4 * 8 + i % 2);
      x[i / 4 * 2 + i / 2 % 2][i % 2] = global_8(row, output_channel(at.warp * 16 + at.row + i / 2 % 2 * 8, half));
    }
    u32 v[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      V2 first = x[i][0], second = x[i][1];
      v[0][i] = halves(first.x << 16, second.x << 16), v[1][i] = halves(first.x, second.x);
      v[2][i] = halves(first.y << 16, second.y << 16), v[3][i] = halves(first.y, second.y);
    }
    add_values(o, v, probability, k);
    mma_wait<0>();
#pragma unroll
    for (int i = 0; i < 4; i++) settle(o[i]);
  }
}

DEVICE void value_window(const Place& at, const Part& part, u32 half, u32& pair, float (&o)[4][H2]) {
  int blocks = window_blocks(part);
  for (int block = 0; block < blocks; block += SCORERS, pair++) {
    sync_named(CONSUMERS_BARRIER, CONSUMERS);
    scale_older(at, pair, o);
    value_half_rows(at, 0, half, o);
    if (block + 1 < blocks) value_half_rows(at, 1, half, o);
    sync_named(CONSUMERS_BARRIER, CONSUMERS);
  }
}

// The part's normalised output, or the sequence's if it is whole.
DEVICE void finish_half(const Arguments& p, const Place& at, const Part& part, const Output& to, u32 half, float unit, float (&o)[4][H2]) {
  sync_named(CONSUMERS_BARRIER, CONSUMERS);
  int rows = p.query_len * p.heads;
#pragma unroll
  for (int j = 0; j < HEADS / 4; j++) {
    u32 n = j / 2 * 8 + at.pair * 2 + j % 2;
    float sum = 0, most = lds_float(at.bound + n * 8 + 4);
    for (int w = 0; w < SCORERS * 4; w++) sum += lds_float(SHARED_BASE + AT_REDUCE + (w * HEADS + n) * 4);
    float factor = sum == 0 ? 0 : unit / sum;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float own = factor / plane_factor(k);
      o[k][j / 2 * 4 + j % 2] *= own, o[k][j / 2 * 4 + j % 2 + 2] *= own;
    }
    if (half == 0 && at.warp == 0 && at.lane < 4) {
      float lse = sum == 0 ? -INFINITE : most + log2_fast(sum);
      int row = to.tile * HEADS + n;
      if (!to.whole) p.part_lse[to.slot * HEADS + n] = lse;
      else if (row < rows) p.lse[(i64)to.sequence * rows + row] = lse * 0.6931471805599453f;
    }
  }
  write_half(p, at, to, o, half);
}

DEVICE void value_part(const Arguments& p, const Place& at, const Part& part, const Output& to, u32& turn, u32& pair) {
  u32 half = at.group - SCORERS;
  float o[4][H2];
#pragma unroll
  for (int i = 0; i < 4 * H2; i++) o[i / H2][i % H2] = 0;
  if (window_blocks(part)) value_window(at, part, half, pair, o);
  int unit = SHIFTED ? 24 : 0, count = part.last - part.first;
  if (SHIFTED && count > 0) {
    barrier_wait(scored_barrier(turn), turn / RING % 2);
    unit = lds32(prepared_address(0, turn) + SHIFT);
  }
#pragma unroll
  for (int i = 0; i < 4 * H2; i++) o[i / H2][i % H2] *= unit_of(unit) * plane_factor(i / H2);
  add_planes(o, 1);
#pragma unroll
  for (int i = 0; i < 4; i++) settle(o[i]);
#pragma unroll 1
  for (int i = 0; i < count; i++, turn++) {
    barrier_wait(scored_barrier(turn), turn / RING % 2);
    if (i % SCORERS == 0) scale_older(at, pair + i / SCORERS, o);
    value_half_page(at, half, page_address(0, turn % STAGES), prepared_address(0, turn), turn % RING, o);
    sync_warp();
    barrier_arrive(empty_barrier(0, turn), at.lane == 0);
  }
  pair += (count + SCORERS - 1) / SCORERS;
  add_planes(o, -1);
  finish_half(p, at, part, to, half, 1.0f / unit_of(unit), o);
}

// ---- pages

// Every second page of a part.
DEVICE void produce_turns(const Arguments& p, const TensorMap* map, u32 warp, const Part& part, u32& turn) {
  const int* table = p.block_table + part.b * p.block_table_stride + part.first;
  int count = part.last - part.first;
  u32 lane = thread_index() % 32;
#pragma unroll 1
  for (int i = warp; i < STAGES && i < count; i += 2)
    if (lane == 0) load_page(p, map, 0, (turn + i) % STAGES, table[i]);
  sync_named(ITEM_BARRIER, ITEM_THREADS);  // the query is there
#pragma unroll 1
  for (int i = warp; i < count; i += 2) {
    u32 t = turn + i, slot = t % STAGES, stage = page_address(0, slot), prepared = prepared_address(0, t);
    int later = i - RING + STAGES;  // its slot is that of page i - RING
    int number = i >= RING && later < count ? table[later] : -1;
    barrier_wait(empty_barrier(0, t), t / RING % 2 ^ 1);
    if (number >= 0 && lane == 0) load_page(p, map, 0, (t - RING) % STAGES, number);
    barrier_wait(full_barrier(0, slot), t / STAGES % 2);
    prepare_page(stage, prepared, lane);
    sync_warp();
    barrier_arrive(ready_barrier(0, t), lane == 0);
  }
  turn += count;
}

DEVICE void start_split_block() {
  u32 t = thread_index();
  if (t < STAGES) barrier_init(SHARED_BASE + AT_FULL + t * 8, 1);
  if (t < RING) {
    barrier_init(ready_barrier(0, t), 1);
    barrier_init(scored_barrier(t), 4);
    barrier_init(empty_barrier(0, t), 8);
  }
  barrier_fence_init();
}

// Consumers bring the query; the producers wait for it.
DEVICE void start_split_item(const Arguments& p, const Place& at, const Part& part) {
  if (part.windowed) prefetch_rows(p, part.window, part.b);
  store_query(p, at, part.b, part.tile);
  fence_async_proxy();
  sync_named(CONSUMERS_BARRIER, CONSUMERS);
  u32 n = thread_index();
  if (n < HEADS) sts64(at.bound + n * 8, V2{lds32(SHARED_BASE + AT_FACTOR + n * 4), as_bits(LOWEST)});
  sync_named(ITEM_BARRIER, ITEM_THREADS);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(const __grid_constant__ Arguments p, const __grid_constant__ TensorMap map) {
  Place at;
  find_place(at);
  check_shared_base();
  start_split_block();
  wait_for_previous_kernel();

  const u32 costs = SHARED_BASE + AT_COSTS;
  stage_costs(p, costs);
  int blocks = block_count(), chunk = choose_chunk(p, costs, SHARED_BASE + AT_SCHEDULE, THREADS / 32);
  int items = total_parts(p, costs, chunk) * p.tiles;
  u32 turn = 0, pair = 0;
  Item item;
  if (at.group == 2 * SCORERS) {
    fewer_registers<PRODUCER_REGISTERS>();
    if (at.warp < 2)
      for (int k = block_index(); k < items; k += blocks) {
        find_item(p, costs, k / p.tiles, chunk, item);
        produce_turns(p, &map, at.warp, find_part(p, item, k % p.tiles), turn);
        sync_named(ITEM_BARRIER, ITEM_THREADS);
      }
  } else if (at.group < SCORERS) {
    more_registers<SCORER_REGISTERS>();
    for (int k = block_index(); k < items; k += blocks) {
      find_item(p, costs, k / p.tiles, chunk, item);
      Part part = find_part(p, item, k % p.tiles);
      if (item.part == 0 && thread_index() == 0)
        p.part_of[2 * item.sequence] = item.first, p.part_of[2 * item.sequence + 1] = item.parts;
      start_split_item(p, at, part);
      score_part(p, at, part, turn, pair);
      sync_named(ITEM_BARRIER, ITEM_THREADS);
    }
  } else {
    more_registers<VALUER_REGISTERS>();
    for (int k = block_index(); k < items; k += blocks) {
      find_item(p, costs, k / p.tiles, chunk, item);
      Part part = find_part(p, item, k % p.tiles);
      start_split_item(p, at, part);
      value_part(p, at, part, Output{part.b, part.tile, (i64)(item.first + item.part) * p.tiles + part.tile, item.parts == 1}, turn, pair);
      sync_named(ITEM_BARRIER, ITEM_THREADS);
    }
  }
  if (at.group < 2 * SCORERS) release_next_kernel();  // not earlier, as in decode.cu
}
