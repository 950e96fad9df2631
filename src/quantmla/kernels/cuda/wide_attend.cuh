// Steps of packed pages. Products with values of the step before go on while a consumer does softmax.

struct Slot {  // of the ring of pages
  u32 index, stage, prepared;
};
// Worked out again wherever it is wanted: registers are scarce.
DEVICE Slot slot_of(u32 page) {
  u32 index = kept(page) % STAGES;
  return Slot{index, page_at(index), prepared_at(index)};
}
DEVICE void await_page(u32 page) { barrier_wait(SHARED_BASE + AT_READY + page % STAGES * 8, page / STAGES % 2); }

// All products with a step's values are finished.
DEVICE void leave_page(const Place& at, Step step, u32 page) {
  leave_step(at, step);
  warp_arrives(SHARED_BASE + AT_EMPTY + kept(page) % STAGES * 8, at.lane);
}

DEVICE void mask_before(const Place& at, int token, float (&s)[H2]) {
  token -= at.warp * 16 + at.row;
#pragma unroll
  for (int i = 0; i < H2; i++)
    if ((i & 2 ? 8 : 0) < token) s[i] = -INFINITE;
}

struct Turn {
  u32 parity;  // of this consumer's steps
  u32 page;    // number of the page that it reads, of all that this block reads
  int before;      // tokens of this page and later ones that are read in bf16
  bool more;       // steps of this consumer
};

// Scores of a step (if OWN), values of the step before (if OTHER), then of this one; the start of scores of
// the step after the next (if t.more).
template <int OWN, int OTHER> DEVICE void take_turn(const Place& at, const Turn& t, bool first, Start& start, float (&o)[4][H2]) {
  float s[H2], x[H2];
  u32 p[H2 / 2], v[4][4];
  bool raise = false;
  int shift = 0;
  Step own = {at.group, t.parity}, other = {at.group ^ 1, t.parity ^ at.group ^ 1};
  u32 own_tiles = probability_tiles(at.group), other_tiles = probability_tiles(at.group ^ 1);
  if (OWN) {
    Slot slot = slot_of(t.page);
    score_page(at, slot.stage, slot.prepared, start, s);
  }
  if (OTHER) {
    await_page(t.page - 1);
    Slot slot = slot_of(t.page - 1);
    unpack_words(at, load_words(at, slot.stage, slot.prepared, 0), v);
    settle_output(o);
    await_step(at, other, o);
    add_values(o, v, other_tiles, 0);
  }
  mma_wait<OTHER>();
  if (OWN) {
    settle(s);
    shift = lds32(slot_of(t.page).prepared + SHIFT);
    weigh(at, shift, s, x);
    if (t.before > 0) mask_before(at, t.before, x);
    raise = any_named(1 + at.group, 128, any_above(MOST, x) || first);
    if (raise) raise_bounds(at, own, first, x);
    exponentiate<0, 4>(x, p);
  }
  Slot slot = slot_of(t.page - 1);
  Words w;
  if (OTHER) {
    unpack_words(at, load_words(at, slot.stage, slot.prepared, 1), v);
    add_values(o, v, other_tiles, 1);
    w = load_words(at, slot.stage, slot.prepared, 2);
    mma_wait<1>();
  }
  if (OWN) exponentiate<4, 8>(x, p);
  if (OTHER) {
    unpack_words(at, w, v);
    add_values(o, v, other_tiles, 2);
    w = load_words(at, slot.stage, slot.prepared, 3);
    mma_wait<1>();
    unpack_words(at, w, v);
    add_values(o, v, other_tiles, 3);
  }
  if (OWN) {
    publish(at, own, shift, raise, p);
    slot = slot_of(t.page);
    w = load_words(at, slot.stage, slot.prepared, 0);
  }
  if (OTHER) {
    mma_wait<0>();
    leave_page(at, other, t.page - 1);
  }
  if (!OWN) return;
  unpack_words(at, w, v);
  settle_output(o);
  await_published(own);
  if (raise) lower_output(at, own, o);
#pragma unroll
  for (u32 k = 0; k < 4; k++) {
    if (k < 3) w = load_words(at, slot.stage, slot.prepared, k + 1);
    add_values(o, v, own_tiles, k);
    if (k > 0) mma_wait<1>();
    if (k < 3) unpack_words(at, w, v);
  }
  if (t.more) await_page(t.page + 2);  // else what is read is not used: a branch would cost registers
  slot = slot_of(t.page + 2);
  start_scores(at, slot.stage, slot.prepared, start);
  mma_wait<0>();
  settle_output(o);
  leave_page(at, own, t.page);
}

// `page`: pages that were read before; `before`: tokens of these pages that are read in bf16.
DEVICE void attend_pages(const Place& at, u32 first, u32 count, u32 page, int before, bool started, float (&o)[4][H2]) {
  if (count == 0) return;
  u32 other = (first ^ at.group) & 1;  // this consumer's first page of these
  Turn t = {(first + other) / 2 % 2, page + other, before - (int)other * PAGE_SIZE, other + 2 < count};
  u32 end = page + count;
  Start start;
  if (other < count) await_page(t.page);
  Slot slot = slot_of(t.page);
  start_scores(at, slot.stage, slot.prepared, start);
  auto next = [&] { t.parity ^= 1, t.page += 2, t.before -= 2 * PAGE_SIZE, t.more = t.page + 2 < end; };
  if (other == 0) {
    take_turn<1, 0>(at, t, !started, start, o);
    next();
  }
  for (; t.page < end; next()) take_turn<1, 1>(at, t, false, start, o);
  if (t.page == end) take_turn<0, 1>(at, t, false, start, o);
}
