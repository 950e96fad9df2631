// Decode attention over packed pages for Hopper, tiles of 64 columns (heads x query length).
//
// As decode.cu: tokens on the rows of the MMA, operands from registers. With 64 columns the tensor cores
// are what limits, and the output alone, 512 x 64, takes half of the registers. So two warpgroups of
// consumers share every page: each has the outputs of half the channels. They take turns with the scores
// of a step (a page, or 64 bf16 rows): while one does softmax, the other one's products go on. A step's
// probabilities are in shared memory, and both consumers multiply their half of its values by them.
//
// Scores: keys are unpacked and scaled as values are, so that all products of a page add to one sum; the
// mean rope key is added to the rope's operands. To fold scales into sums, as decode.cu does, would cost more
// with 64 columns.
//
// The third warpgroup has few registers: one warp asks for pages, two prepare their scales, and one
// adds up probabilities.

struct Part {  // of a sequence, and what is read for it
  Item item;
  int sequence, tile, first, pages, windowed;
  Window window;
};

DEVICE u32 window_steps(const Part& part) {
  return part.windowed ? (part.window.length - part.window.start + part.window.sinks + 63) / 64 : 0;
}

DEVICE Part find_part(const Arguments& p, int k, int chunk) {
  Part part;
  find_item(p, SHARED_BASE + AT_COSTS, k / p.tiles, chunk, part.item);
  part.sequence = part.item.sequence, part.tile = k % p.tiles;
  int all = num_pages(p, part.sequence);
  part.first = first_page(part.item, all, part.item.part);
  part.pages = first_page(part.item, all, part.item.part + 1) - part.first;
  part.windowed = part.item.part + 1 == part.item.parts;
  part.window = find_window(p, part.sequence);
  return part;
}

DEVICE void start_block() {
  if (thread_index() == 0) {
    for (u32 i = 0; i < STAGES; i++) {
      barrier_init(SHARED_BASE + AT_LOADED + i * 8, 1);
      barrier_init(SHARED_BASE + AT_READY + i * 8, 2 * ARRIVALS);
      barrier_init(SHARED_BASE + AT_EMPTY + i * 8, 8 * ARRIVALS);
    }
    for (u32 i = 0; i < 2; i++) barrier_init(published(step_of(i)), 4 * ARRIVALS), barrier_init(freed(step_of(i)), 9 * ARRIVALS);
    init_meeting(1, 128), init_meeting(2, 128);
    init_meeting(ALL_CONSUMERS, CONSUMERS), init_meeting(SUMS_DONE, CONSUMERS + 32);
  }
  barrier_fence_init();
  sync_block();
}

// ---- producer

DEVICE void load_pages(const Arguments& p, const TensorMap* map, u32 lane, const Part& part, u32& turn) {
  const int* table = p.block_table + part.sequence * p.block_table_stride + part.first;
  int numbers = 0;
  for (int i = 0; i < part.pages; i++, turn++) {
    u32 slot = turn % STAGES;
    if (i % 32 == 0) numbers = i + (int)lane < part.pages ? table[i + lane] : 0;
    int number = shuffle(numbers, i % 32);
    barrier_sleep(SHARED_BASE + AT_EMPTY + slot * 8, turn / STAGES % 2 ^ 1);
    if (lane == 0) load_page(p, map, slot, number);
  }
}

DEVICE void prepare_pages(u32 thread, u32 pages, u32& turn) {
  for (u32 end = turn + pages; turn < end; turn++) {
    u32 slot = turn % STAGES;
    barrier_sleep(SHARED_BASE + AT_LOADED + slot * 8, turn / STAGES % 2);
    prepare_page(page_at(slot), prepared_at(slot), thread ^ turn % 2 * 32);  // one warp has more to do: in turn
    sync_warp();
    warp_arrives(SHARED_BASE + AT_READY + slot * 8, thread % 32);
  }
}

DEVICE void produce(const Arguments& p, const TensorMap* map, int chunk, int items) {
  u32 lane = thread_index() % 32, warp = uniform(thread_index() / 32) - 8, turn = 0;
  for (int k = block_index(); k < items; k += block_count()) {
    Part part = find_part(p, k, chunk);
    if (warp == 0) load_pages(p, map, lane, part, turn);
    if (warp == 1) {
      float sum[2] = {0, 0};
      add_up(lane, window_steps(part) + part.pages, turn, sum);
      sts_float(SHARED_BASE + AT_SUM + lane * 4, sum[0]), sts_float(SHARED_BASE + AT_SUM + lane * 4 + 128, sum[1]);
      meet_apart(SUMS_DONE, CONSUMERS + 32);
    }
    if (warp > 1) prepare_pages(thread_index() - 320, part.pages, turn);
  }
}

// ---- consumers

DEVICE void consume(const Arguments& p, int chunk, int items) {
  Place at;
  find_place(at);
  u32 step = 0, turn = 0;
  for (int k = block_index(); k < items; k += block_count()) {
    Part part = find_part(p, k, chunk);
    const Item& item = part.item;
    if (item.part == 0 && thread_index() == 0)
      p.part_of[2 * item.sequence] = item.first, p.part_of[2 * item.sequence + 1] = item.parts;
    if (part.windowed) prefetch_rows(p, part.window, part.sequence);
    meet(ALL_CONSUMERS, CONSUMERS);  // the part before is finished
    stage_query(p, at, part.sequence, part.tile);
    meet(ALL_CONSUMERS, CONSUMERS);
    float o[4][H2];
#pragma unroll
    for (int i = 0; i < 4 * H2; i++) o[i / H2][i % H2] = 0;
    u32 bf16 = window_steps(part);
    attend_rows(p, at, part.window, part.sequence, step, bf16, o);
    to_bytes(o);
    settle_output(o);  // the loop below has its own registers
    step += bf16;
    attend_pages(at, step, part.pages, turn, part.window.sinks - part.first * PAGE_SIZE, bf16 > 0, o);
    step += part.pages, turn += part.pages;
    to_planes(o);
    finish(p, at, Output{part.sequence, part.tile, (i64)(item.first + item.part) * p.tiles + part.tile, item.parts == 1}, o);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(const __grid_constant__ Arguments p, const __grid_constant__ TensorMap map) {
  check_shared_base();
  start_block();
  wait_for_previous_kernel();
  const u32 costs = SHARED_BASE + AT_COSTS;
  stage_costs(p, costs);
  int chunk = choose_chunk(p, costs, SHARED_BASE + AT_SCHEDULE, THREADS / 32);
  int items = total_parts(p, costs, chunk) * p.tiles;
  if (uniform(thread_index() / 128) == 2) {
    fewer_registers<PRODUCER_REGISTERS>();
    produce(p, &map, chunk, items);
  } else {
    more_registers<CONSUMER_REGISTERS>();
    consume(p, chunk, items);
  }
  release_next_kernel();
}
