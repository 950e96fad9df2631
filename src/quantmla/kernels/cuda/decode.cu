// Decode attention over packed pages (4-bit content and rope, page-centred) for Hopper.
//
// Tokens lie on the rows of the MMA and heads on its columns, so few heads waste nothing. A packed
// 16-bit word holds 4 channels of one token, one per nibble: ldmatrix of the packed page gives, after
// masking, the operand of 4 products K_i Q_i^T; ldmatrix.trans of the same bytes gives V_i^T. Nothing
// dequantised is ever written to memory.
//
// Scores: nibbles are masked in place, four to a register, and read as float8 numbers (e4m3) n * 2^-9,
// exactly: up to 15, the bits of an integer are those of as many of the smallest number. The query is the
// sum of two terms of float8, which holds the 8 bits of a bf16 number. A 64-channel group is two steps of
// k, so its scale multiplies the fp32 result. Zero points are one more product, in float16: -scale * zero
// against the query's sums per group.
// Values of 4 bits are read in place, as subnormal float16 numbers n * 2^-24 (or n * 2^-20), and scaled by
// one FMA under a page's power of two; 2-bit ones are 16 + n or 4 + n by one OR, then one FMA.
//
// The running maximum is raised only when a probability would pass 2^14, which one barrier finds out
// with the warps' probabilities; otherwise nothing is rescaled.
//
// Each warpgroup takes every WARPGROUPS-th page of a part, and keeps its own maximum, sum and output;
// they are merged at the part's end. A last warpgroup of few registers brings the pages and prepares
// their metadata. Compile-time constants: HEADS (16 or 32, columns of a tile), WARPGROUPS, STAGES, and
// the page's offsets, which quant/layout.py decides.

DEVICE void start_item(const Arguments& p, int b, int tile, bool windowed) {
  store_query(p, b, tile, windowed);
  fence_async_proxy();
  meet_apart(ITEM_BARRIER, ITEM_THREADS);
}

DEVICE void start_block() {
  u32 t = thread_index();
  if (t == 0) {
#pragma unroll 1
    for (u32 i = 0; i < WARPGROUPS * STAGES; i++) barrier_init(SHARED_BASE + AT_FULL + i * 8, 1);
#pragma unroll 1
    for (u32 i = 0; i < WARPGROUPS * RING; i++) {
      barrier_init(SHARED_BASE + AT_READY + i * 8, PRODUCERS / WARPGROUPS * ARRIVALS);
      barrier_init(SHARED_BASE + AT_EMPTY + i * 8, 4 * ARRIVALS);
    }
    for (u32 i = 1; i <= WARPGROUPS; i++) init_meeting(i, 128);
    init_meeting(CONSUMERS_BARRIER, CONSUMERS), init_meeting(ITEM_BARRIER, ITEM_THREADS);
  }
  barrier_fence_init();
  // never written again: rows 10 to 15 of the zero points, and of the sums
  const u32 zeros = 6 * ZEROS_ROW / 4;
#pragma unroll 1
  for (u32 i = t; i < WARPGROUPS * RING * zeros; i += THREADS)
    sts32(SHARED_BASE + AT_PREPARED + i / zeros * PREPARED + SCORE_ZEROS + 10 * ZEROS_ROW + i % zeros * 4, 0);
#pragma unroll 1
  for (u32 i = t; i < TILE / 4; i += THREADS) sts32(SHARED_BASE + AT_QUERY + SUMS_TILE * TILE + i * 4, 0);
  fence_async_proxy();
}

// Bytes, whatever they say by now, on their way to L2: the previous kernel may still write them.
DEVICE void prefetch_inputs(const Arguments& p, const TensorMap* map) {
  if (thread_index() == 0) prefetch_map(map);
  if ((int)thread_index() < p.batch) {
    prefetch((u64)(p.lengths + (i64)thread_index() * p.lengths_stride));
    prefetch((u64)(p.sink_pages + (i64)thread_index() * p.sink_stride));
  }
  prefetch_queries(p);
}

DEVICE void clear(float (&o)[2][4][H2], float (&l)[HEADS / 4]) {
#pragma unroll
  for (int i = 0; i < 8 * H2; i++) o[i / H2 / 4][i / H2 % 4][i % H2] = 0;
#pragma unroll
  for (int i = 0; i < HEADS / 4; i++) l[i] = 0;
}

DEVICE void to_unit(float (&o)[2][4][H2], float unit) {
#pragma unroll
  for (int i = 0; i < 8 * H2; i++) o[i / H2 / 4][i / H2 % 4][i % H2] *= unit * plane_factor(i / H2 % 4);
  add_planes(o[0], 1), add_planes(o[1], 1);
}

// The rows of a sequence that are in bf16: the window, and the sinks. The first block's are found before the query is there.
DEVICE void attend_window(const Arguments& p, const Place& at, const Window& w, int b, u32 buffer, float (&o)[2][4][H2],
                          float (&l)[HEADS / 4]) {
  float s[H2];
  int rows = w.length - w.start + w.sinks;
#pragma unroll 1
  for (int block = at.group; block * 64 < rows; block += WARPGROUPS) {
    if (block >= WARPGROUPS) find_rows(p, at, w, b, block);
    score_rows(at, s);
    RowValues x[2];
    load_row_values(at, 0, 0, x[0]), load_row_values(at, 0, 1, x[1]);
    softmax(at, 0, buffer, s, o, l, [] {});
    value_rows(at, buffer, x, o);
  }
}

// One part of a sequence; `turn` counts the pages that this warpgroup has read.
DEVICE void attend(const Arguments& p, const Place& at, const Item& item, int tile, u32& turn) {
  int b = item.sequence;
  bool windowed = item.part + 1 == item.parts;
  if (windowed && at.group == WARPGROUPS - 1) find_first_rows(p, find_window(p, b), b);  // it has the fewest rows of the query
  u32 slot = (item.first + item.part) * p.tiles + tile;
  if (thread_index() == 0) sts128(SHARED_BASE + AT_OUTPUT, V4{(u32)b, (u32)tile, slot, item.parts == 1});
  start_item(p, b, tile, windowed);

  int all = num_pages(p, b);
  int last = first_page(item, all, item.part + 1), page = first_page(item, all, item.part) + at.group;
  Window w = find_window(p, b);
  float o[2][4][H2], s[H2], l[HEADS / 4];
  clear(o, l);
  // the first page's probabilities go to the other buffer: other warps may still read this one
  if (windowed) attend_window(p, at, w, b, (turn + 1) % 2, o, l);
  settle_output(o);  // the compiler spills in the loop below without
  bool ready = false;
  int unit = SHIFTED ? 24 : 0;  // outputs are in the unit of the first page's values
  if (SHIFTED && page < last) {
    barrier_wait(ready_barrier(at.group, turn), turn / RING % 2);
    ready = true, unit = lds32(prepared_address(at.group, turn) + SHIFT);
  }
  if (windowed) to_unit(o, unit_of(unit));
#pragma unroll 1
  for (; page < last; page += WARPGROUPS, turn++) {
    u32 stage = page_address(at.group, turn % STAGES), prepared = prepared_address(at.group, turn);
    if (!ready) barrier_wait(ready_barrier(at.group, turn), turn / RING % 2);
    int shift = SHIFTED ? lds32(prepared + SHIFT) : 0;
    score_page(at, stage, prepared, s);
    if (page * PAGE_SIZE < w.sinks) {  // these are read in bf16
      int token = page * PAGE_SIZE + at.warp * 16 + at.row;
#pragma unroll
      for (int i = 0; i < H2; i++)
        if (token + (i & 2 ? 8 : 0) < w.sinks) s[i] = -INFINITE;
    }
    FirstValues first;
    softmax(at, unit - shift, turn % 2, s, o, l, [&] { first_values(at, stage, prepared, first); });
    ready = barrier_test(ready_barrier(at.group, turn + 1), (turn + 1) / RING % 2);
    value_page(at, stage, prepared, turn % 2, first, o);
    sync_warp();
    warp_arrives(empty_barrier(at.group, turn), at.lane);
  }
  add_planes(o[0], -1), add_planes(o[1], -1);
  V4 to = lds128(SHARED_BASE + AT_OUTPUT);  // from shared memory: the loop's registers are few
  finish(p, at, Output{(int)to.x, (int)to.y, to.z, to.w != 0}, 1.0f / unit_of(unit), o, l);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(const __grid_constant__ Arguments p, const __grid_constant__ TensorMap map) {
  check_shared_base();
  prefetch_inputs(p, &map);
  start_block();
  wait_for_previous_kernel();  // nothing before this depends on what others write

  const u32 costs = SHARED_BASE + AT_COSTS;
  stage_costs(p, costs);
  int blocks = block_count(), chunk = choose_chunk(p, costs, SHARED_BASE + AT_SCHEDULE, THREADS / 32);
  Item item;
  int items = find_item(p, costs, block_index() / p.tiles, chunk, item) * p.tiles;
  Place at;
  find_place(at);
  u32 turn = 0;
  if (at.group == WARPGROUPS) {
    fewer_registers<PRODUCER_REGISTERS>();
    if (at.warp < PRODUCERS)
      for (int k = block_index(); k < items; k += blocks) {
        if (k >= blocks) find_item(p, costs, k / p.tiles, chunk, item);
        produce(p, &map, at.warp % WARPGROUPS, at.warp / WARPGROUPS, item, turn);
        meet_apart(ITEM_BARRIER, ITEM_THREADS);  // `finish` uses the pages' memory
      }
  } else {
    more_registers<CONSUMER_REGISTERS>();
    for (int k = block_index(); k < items; k += blocks) {
      if (k >= blocks) find_item(p, costs, k / p.tiles, chunk, item);
      if (item.part == 0 && thread_index() == 0)
        p.part_of[2 * item.sequence] = item.first, p.part_of[2 * item.sequence + 1] = item.parts;
      attend(p, at, item, k % p.tiles, turn);
      meet_apart(ITEM_BARRIER, ITEM_THREADS);
    }
    release_next_kernel();  // not earlier: it would crowd onto the multiprocessors that end first
  }
}
