// Products of single warps, for 16 columns: D[16, 16] += A[16, 16] B[16, 16]. They are finished when they
// have been issued, as far as the program can see, so the compiler interleaves them freely.

DEVICE void product(float (&d)[8], const u32 (&a)[4], V4 b) {
  mma_warp(d, a, b.x, b.y);
  mma_warp(d + 4, a, b.z, b.w);
}

DEVICE V4 query_tile(const Place& at, u32 tile) { return lds128(SHARED_BASE + AT_QUERY + tile * TILE + at.lane * 16); }

DEVICE void score_tile(const Place& at, float (&d)[H2], u32 (&a)[4], u32 tile) { product(d, a, query_tile(at, tile)); }

DEVICE u32 probabilities_at(const Place& at, u32 buffer) { return at.p_load + buffer * 4 * TILE; }

DEVICE void add_values(float (&o)[4][H2], u32 (&v)[4][4], u32 probabilities, u32 k) {
  V4 p = ldmatrix(probabilities + k * TILE);
#pragma unroll
  for (int plane = 0; plane < 4; plane++) product(o[plane], v[plane], p);
}

DEVICE void publish_probabilities() {}
DEVICE void finish_scores(float (&)[H2]) {}
DEVICE void finish_values(float (&)[2][4][H2]) {}
template <int pending> DEVICE void wait_for_values() {}
