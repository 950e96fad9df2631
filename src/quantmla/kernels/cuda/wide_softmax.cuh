// Probabilities of a step, 64 tokens, under a maximum that is seldom raised. Steps are taken in turn by
// the two consumers, even steps by the first: a step's maximum follows from those of all steps before.

struct Step {
  u32 by, parity;  // the consumer whose turn it is; of its turns
};
DEVICE Step step_of(u32 number) { return Step{number % 2, number / 2 % 2}; }

DEVICE u32 published(Step step) { return SHARED_BASE + AT_PUBLISHED + step.by * 8; }
DEVICE u32 freed(Step step) { return SHARED_BASE + AT_FREE + step.by * 8; }
DEVICE u32 raised(Step step) { return SHARED_BASE + AT_RAISED + step.by * (HEADS * 4); }
DEVICE u32 facts(Step step) { return SHARED_BASE + AT_STEP + step.by * 8; }
DEVICE void await_published(Step step) { barrier_wait(published(step), step.parity); }
DEVICE void await_freed(Step step) { barrier_wait(freed(step), step.parity ^ 1); }

// Binary logarithms of probabilities, under the maximum, for outputs in the common unit.
DEVICE void weigh(const Place& at, int shift, const float (&s)[H2], float (&x)[H2]) {
  float unit = lds_float(SHARED_BASE + AT_FACTOR) * power(24 - shift), more = OUTPUT_SHIFT - shift;
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V2 b = lds64(at.bound + j * 32);
    float m0 = more - as_float(b.x), m1 = more - as_float(b.y);
    x[4 * j] = s[4 * j] * unit + m0, x[4 * j + 1] = s[4 * j + 1] * unit + m1;
    x[4 * j + 2] = s[4 * j + 2] * unit + m0, x[4 * j + 3] = s[4 * j + 3] * unit + m1;
  }
}

// Floats above zero are ordered as integers.
DEVICE bool any_above(float limit, const float (&x)[H2]) {
  int most = 0;
#pragma unroll
  for (int i = 0; i < H2; i += 2) most = max3(most, (int)as_bits(x[i]), (int)as_bits(x[i + 1]));
  return most > (int)as_bits(limit);
}

DEVICE float warp_rows_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 4)), x = fmaxf(x, shuffle_xor(x, 8));
  return fmaxf(x, shuffle_xor(x, 16));
}

// The rare case: raises the maximum, and says what that does to all that was summed under the old one.
// The maximum that a part starts with is none, and is always replaced.
DEVICE void raise_bounds(const Place& at, Step step, bool first, float (&s)[H2]) {
  u32 reduce = SHARED_BASE + AT_REDUCE;
  await_freed(step);
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    float x = warp_rows_max(fmaxf(s[4 * j], s[4 * j + 2])), y = warp_rows_max(fmaxf(s[4 * j + 1], s[4 * j + 3]));
    u32 to = reduce + (at.warp * HEADS + j * 8 + at.pair * 2) * 4;
    if (at.lane < 4) sts_float(to, x), sts_float(to + 4, y);
  }
  meet(1 + at.group, 128);
  u32 n = thread_index() % 128, bound = SHARED_BASE + AT_BOUND + n * 4;
  if (n < HEADS) {
    float more = first ? LOWEST : 0;
    for (int w = 0; w < 4; w++) more = fmaxf(more, lds_float(reduce + (w * HEADS + n) * 4) - RAISE_ABOVE);
    sts_float(bound, lds_float(bound) + more);
    sts_float(raised(step) + n * 4, first ? 1.0f : exp2_fast(-more));
    sts_float(reduce + n * 4, more);
  }
  meet(1 + at.group, 128);
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V2 more = lds64(reduce + (j * 8 + at.pair * 2) * 4);
    s[4 * j] -= as_float(more.x), s[4 * j + 1] -= as_float(more.y);
    s[4 * j + 2] -= as_float(more.x), s[4 * j + 3] -= as_float(more.y);
  }
}

// Probabilities of columns 8 j and on, for j in a part of 0 to 7.
template <int from, int upto> DEVICE void exponentiate(const float (&s)[H2], u32 (&p)[H2 / 2]) {
#pragma unroll
  for (int i = 2 * from; i < 2 * upto; i++) p[i] = pack_half2(exp2_fast(s[2 * i]), exp2_fast(s[2 * i + 1]));
}

DEVICE void publish(const Place& at, Step step, int shift, bool raise, const u32 (&p)[H2 / 2]) {
  await_freed(step);
  // 8x8 blocks of the B operands [token][head]: rows of 8 tokens of one head
#pragma unroll
  for (int j = 0; j < HEADS / 16; j++) stmatrix_transposed(at.p_store + j * 256, V4{p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]});
  fence_async_proxy();
  if (at.warp == 0 && at.lane == 0) sts64(facts(step), V2{raise, as_bits(power(shift - OUTPUT_SHIFT))});
  sync_warp();
  warp_arrives(published(step), at.lane);
}

// What was summed so far comes under a step's maximum.
DEVICE void lower_output(const Place& at, Step step, float (&o)[4][H2]) {
  mma_wait<0>();
  settle_output(o);
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V2 f = lds64(raised(step) + (j * 8 + at.pair * 2) * 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      o[i][4 * j] *= as_float(f.x), o[i][4 * j + 1] *= as_float(f.y);
      o[i][4 * j + 2] *= as_float(f.x), o[i][4 * j + 3] *= as_float(f.y);
    }
  }
}

DEVICE void await_step(const Place& at, Step step, float (&o)[4][H2]) {
  await_published(step);
  if (vote(lds32(facts(step)))) lower_output(at, step, o);
}

DEVICE void leave_step(const Place& at, Step step) {
  sync_warp();
  warp_arrives(freed(step), at.lane);
}

// One warp adds up what the consumers publish, two heads a lane.
DEVICE void add_up(u32 lane, u32 steps, u32& step, float (&sum)[2]) {
  for (u32 end = step + steps; step < end; step++) {
    Step now = step_of(step);
    barrier_sleep(published(now), now.parity);
    V2 fact = lds64(facts(now));
    u32 tiles = SHARED_BASE + AT_P + step % 2 * (4 * TILE);
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      u32 n = lane + h * 32;
      float own = 0;
      if (fact.x) sum[h] *= lds_float(raised(now) + n * 4);
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        V4 x = lds128(tiles + i * TILE + element(0, n)), y = lds128(tiles + i * TILE + element(8, n));
        u32 z = hadd2(hadd2(hadd2(x.x, x.y), hadd2(x.z, x.w)), hadd2(hadd2(y.x, y.y), hadd2(y.z, y.w)));
        own += half_low(z) + half_high(z);
      }
      sum[h] += own * as_float(fact.y);
    }
    sync_warp();
    warp_arrives(freed(now), lane);
  }
}
