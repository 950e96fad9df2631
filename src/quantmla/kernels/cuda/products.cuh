// Products of a warpgroup: D[64, HEADS] += A[64, 16] B[16, HEADS]. They go on while the program does
// other work; operands in registers must be left alone until a wait.

DEVICE void score_tile(const Place&, float (&d)[H2], u32 (&a)[4], u32 tile) { mma<1>(d, a, query_tile(tile)); }

DEVICE u32 probabilities_at(const Place& at, u32 buffer) { return uniform(descriptor(at.p_tile) + buffer * (4 * TILE / 16)); }

DEVICE void add_values(float (&o)[4][H2], u32 (&v)[4][4], u32 probabilities, u32 k) {
  u64 p = operand(probabilities, k);
  mma_fence(v);
#pragma unroll
  for (int plane = 0; plane < 4; plane++) mma<1>(o[plane], v[plane], p);
  mma_commit();
}

DEVICE void publish_probabilities() { fence_async_proxy(); }
DEVICE void settle_output(float (&o)[2][4][H2]) {
#pragma unroll
  for (int i = 0; i < 8; i++) settle(o[i / 4][i % 4]);
}
template <int pending> DEVICE void wait_for_values() { mma_wait<pending>(); }
DEVICE void finish_scores(float (&s)[H2]) { mma_commit(), mma_wait<0>(), settle(s); }
DEVICE void finish_values(float (&o)[2][4][H2]) { mma_wait<0>(), settle_output(o); }
