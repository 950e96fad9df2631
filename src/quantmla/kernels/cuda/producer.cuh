// The warpgroup that attends to nothing: its warp g brings the pages of warpgroup g, and prepares their
// metadata, so that no consumer waits for any of it. Of two warpgroups, warp 2 + g prepares a part of it.

DEVICE void load_page(const Arguments& p, const TensorMap* map, u32 group, u32 slot, int number) {
  u32 to = page_address(group, slot), bar = full_barrier(group, slot);
  const u8* page = p.pages + number * p.page_stride;
  barrier_expect(bar, PAGE_BYTES);
  copy_tile(to, map, number, bar);
  copy_bulk(to + AT_ROPE, page + AT_ROPE, PAGE_BYTES - AT_ROPE, bar);
}

DEVICE u32 power_of_two(int exponent) { return (u32)(exponent + 15) << 10 | (u32)(exponent + 15) << 26; }  // -14 to 15

// The shift that brings a page's largest scale to [2^14, 2^15).
DEVICE int find_shift(u32 stage, u32 lane) {
#if SHIFTED
  u32 most = 0, from = stage + AT_SCALES + lane * 16;
#pragma unroll
  for (u32 i = 0; i < 3; i++) {
    V4 x = lds128(from + (i < 2 || lane < 16 ? i * 512 : 0));
    most = hmax2(most, hmax2(hmax2(x.x, x.y), hmax2(x.z, x.w)));
  }
  int value = max(most & 0xffff, most >> 16);
  for (int mask = 16; mask; mask >>= 1) value = max(value, shuffle_xor(value, mask));
  return 29 - (value >> 10);
#else
  return 0;
#endif
}

// Scales and zero points of four groups.
DEVICE void prepare_groups(u32 stage, u32 prepared, u32 lane, u32 first, Shift shift) {
  u32 group = first + lane / 8, warp = lane / 2 % 4, quad = lane % 2, token = warp * 16 + quad * 4;
  if (group >= 10) return;
  u32 from = stage + AT_SCALES + (group * PAGE_SIZE + token) * 2, zeros = stage + AT_ZEROS + group * PAGE_SIZE + token;
  Quads x = {lds64(from), lds64(from + 16), lds32(zeros), lds32(zeros + 8)};
  prepare_scores(prepared, group, warp, quad, x);
  if (group < 8) prepare_values(prepared + VALUE_SCALES + group * VALUE_GROUP_BYTES, warp, quad, x, shift);
}

// B operand of a warp: columns 8j to 8j + 7 in x and y, the next 8 in z and w.
DEVICE V4 mean_query(u32 lane, u32 k, u32 j) {
  u32 tile = SHARED_BASE + AT_QUERY + (MEAN_TILE + k) * TILE;
  return ldmatrix(tile + j * 128 + lane / 8 % 2 * (HEADS * 16) + lane / 16 * 128 + lane % 8 * 16);
}

// The query times the page's mean rope key, which is the same in all rows of the operand.
DEVICE void prepare_means(u32 stage, u32 prepared, u32 lane) {
#pragma unroll
  for (u32 j = 0; j < HEADS / 8; j += 2) {
    float d[8] = {};
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
      u32 mean = stage + AT_MEAN + lane % 4 * 4 + k * 32, low = lds32(mean), high = lds32(mean + 16);
      u32 a[4] = {low, low, high, high};
      V4 b = mean_query(lane, k, j);
      mma_warp(d, a, b.x, b.y);
      mma_warp(d + 4, a, b.z, b.w);
    }
    if (lane < 4) {
      sts128(prepared + MEANS + lane * 16 + j * 64, V4{as_bits(d[0]), as_bits(d[1]), as_bits(d[0]), as_bits(d[1])});
      sts128(prepared + MEANS + lane * 16 + j * 64 + 64, V4{as_bits(d[4]), as_bits(d[5]), as_bits(d[4]), as_bits(d[5])});
    }
  }
}

// Means and the rope's groups by the second of two warps.
DEVICE void prepare_page(u32 stage, u32 prepared, u32 lane, u32 second) {
  const bool alone = PRODUCERS == WARPGROUPS;
  if (alone || second) prepare_means(stage, prepared, lane);
  if (!alone && second) return prepare_groups(stage, prepared, lane, 8, Shift{});
  int exponent = find_shift(stage, lane);
  Shift shift = {power_of_two(min(exponent, 15)), power_of_two(exponent - min(exponent, 15))};
#pragma unroll 1
  for (u32 first = 0; first < (alone ? 10 : 8); first += 4) prepare_groups(stage, prepared, lane, first, shift);
  if (lane == 0) sts32(prepared + SHIFT, exponent);
}

// All pages that warpgroup `group` reads of a part; `turn` counts them, over all parts.
DEVICE void produce(const Arguments& p, const TensorMap* map, u32 group, u32 second, const Item& item, u32& turn) {
  int all = num_pages(p, item.sequence), last = first_page(item, all, item.part + 1);
  int page = first_page(item, all, item.part) + group;
  const int* table = p.block_table + item.sequence * p.block_table_stride;
  u32 lane = thread_index() % 32;
  bool loads = lane == 0 && !second;
#pragma unroll 1
  for (u32 i = 0; i < STAGES; i++)
    if (loads && page + (int)i * WARPGROUPS < last) load_page(p, map, group, (turn + i) % STAGES, table[page + i * WARPGROUPS]);
  meet_apart(ITEM_BARRIER, ITEM_THREADS);  // the query is there
  int loaded = page + STAGES * WARPGROUPS, number = loaded < last ? table[loaded] : 0;
#pragma unroll 1
  for (u32 done = 0; page < last; page += WARPGROUPS, turn++, done++) {
    barrier_wait(empty_barrier(group, turn), turn / RING % 2 ^ 1);
    if (done >= RING && loaded < last) {  // page `turn` - RING has just been left
      if (loads) load_page(p, map, group, (turn - RING) % STAGES, number);
      loaded += WARPGROUPS;
      number = loaded < last ? table[loaded] : 0;
    }
    u32 slot = turn % STAGES, stage = page_address(group, slot), prepared = prepared_address(group, turn);
    barrier_wait(full_barrier(group, slot), turn / STAGES % 2);
    prepare_page(stage, prepared, lane, second);
    sync_warp();
    warp_arrives(ready_barrier(group, turn), lane);
  }
}
