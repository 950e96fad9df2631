// Probabilities under a maximum that is seldom raised.

DEVICE V4 bound(const Place& at, int j) { return lds128(at.bound + (j * 8 + at.pair * 2) * 8); }

// Probabilities 2^(s * factor - maximum + unit) of this thread's rows, to e, and as float16 to p.
DEVICE u32 probabilities(const Place& at, float unit, const float (&s)[H2], float (&e)[H2], u32 (&p)[H2 / 2]) {
  u32 most = 0;
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V4 b = bound(at, j);
    float f0 = as_float(b.x), m0 = as_float(b.y) - unit;
    float f1 = as_float(b.z), m1 = as_float(b.w) - unit;
    e[4 * j] = exp2_fast(s[4 * j] * f0 - m0), e[4 * j + 1] = exp2_fast(s[4 * j + 1] * f1 - m1);
    e[4 * j + 2] = exp2_fast(s[4 * j + 2] * f0 - m0), e[4 * j + 3] = exp2_fast(s[4 * j + 3] * f1 - m1);
    p[2 * j] = pack_half2(e[4 * j], e[4 * j + 1]), p[2 * j + 1] = pack_half2(e[4 * j + 2], e[4 * j + 3]);
    most = hmax2(most, hmax2(p[2 * j], p[2 * j + 1]));
  }
  return max(most & 0xffff, most >> 16);
}

DEVICE void store_probabilities(const Place& at, u32 buffer, const u32 (&p)[H2 / 2]) {
  // 8x8 blocks of the B operands [token][head]: rows of 8 tokens of one head
#pragma unroll
  for (int j = 0; j < HEADS / 16; j++)
    stmatrix_transposed(at.p_store + buffer * 4 * TILE + j * 256, V4{p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]});
  publish_probabilities();
}

DEVICE float warp_rows_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 4)), x = fmaxf(x, shuffle_xor(x, 8));
  return fmaxf(x, shuffle_xor(x, 16));
}

// The rare case: raises the maximum, and scales what has been summed under the old one.
DEVICE void raise_bounds(const Place& at, float unit, const float (&s)[H2], float (&o)[2][4][H2], float (&l)[HEADS / 4]) {
  u32 reduce = SHARED_BASE + AT_REDUCE + at.group * HEADS * 16, bar = 1 + at.group;
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V4 b = bound(at, j);
    float x = warp_rows_max(fmaxf(s[4 * j], s[4 * j + 2]) * as_float(b.x)) + unit;
    float y = warp_rows_max(fmaxf(s[4 * j + 1], s[4 * j + 3]) * as_float(b.z)) + unit;
    u32 to = reduce + (at.warp * HEADS + j * 8 + at.pair * 2) * 4;
    if (at.lane < 4) sts_float(to, x), sts_float(to + 4, y);
  }
  meet(bar, 128);
  u32 n = thread_index() % 128;
  float old = 0, raised = 0;
  if (n < HEADS) {
    old = lds_float(at.bound + n * 8 + 4), raised = old;
    for (int w = 0; w < 4; w++) raised = fmaxf(raised, lds_float(reduce + (w * HEADS + n) * 4) - RAISE_ABOVE);
    sts_float(at.bound + n * 8 + 4, raised);
  }
  meet(bar, 128);
  if (n < HEADS) sts_float(reduce + n * 4, exp2_fast(old - raised));
  meet(bar, 128);
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    float f0 = lds_float(reduce + (j * 8 + at.pair * 2) * 4), f1 = lds_float(reduce + (j * 8 + at.pair * 2) * 4 + 4);
    l[2 * j] *= f0, l[2 * j + 1] *= f1;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float(&block)[H2] = o[i / 4][i % 4];
      block[4 * j] *= f0, block[4 * j + 1] *= f1, block[4 * j + 2] *= f0, block[4 * j + 3] *= f1;
    }
  }
}

// `meanwhile`: what is done before the other warps' probabilities are waited for.
template <class Work>
DEVICE void softmax(const Place& at, float unit, u32 buffer, const float (&s)[H2], float (&o)[2][4][H2], float (&l)[HEADS / 4], Work meanwhile) {
  float e[H2];
  u32 p[H2 / 2];
  u32 most = probabilities(at, unit, s, e, p);
  store_probabilities(at, buffer, p);
  meanwhile();
  if (vote(any_named(1 + at.group, 128, most > MOST_HALF))) {
    raise_bounds(at, unit, s, o, l);
    probabilities(at, unit, s, e, p);
    store_probabilities(at, buffer, p);
    meet(1 + at.group, 128);
  }
  float down = SHIFTED ? exp2_fast(-unit) : 1.0f;
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    l[2 * j] += down * (e[4 * j] + e[4 * j + 2]);
    l[2 * j + 1] += down * (e[4 * j + 1] + e[4 * j + 3]);
  }
}
