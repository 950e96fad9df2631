// Scores of a packed page for many columns: keys are scaled before the products, which then add to one
// sum. With 32 columns that is no more work than folding, and takes fewer registers.

template <int tiles> DEVICE void score_tiles(u32 (&a)[tiles][4], const u64* query, float (&s)[H2]) {
  mma_fence(a);
#pragma unroll
  for (int i = 0; i < tiles; i++) mma<1>(s, a[i], query[i]);
  mma_commit();
}

// In units of the scaled query: tokens 16 warp + row and + 8 of this thread.
DEVICE void score_page(const Place& at, u32 stage, u32 prepared, float (&s)[H2]) {
  const u64* queries = page_descriptors(prepared).queries;
  u32 rows = stage + at.score_rows, scales = prepared + at.score_scales;
  V4 x, next = load_groups(rows, 0);
  RowScales next_scales = read_row_scales(scales);
  read_means(at, prepared, s);
  settle(s);
#pragma unroll
  for (u32 g = 0; g < 10; g++) {
    RowScales row = next_scales;
    if (g < 9) next_scales = read_row_scales(scales + (g + 1) * SCORE_GROUP_BYTES);
    if (g < 8) {
      if (g % GROUPS_A_LOAD == 0) {
        x = next;
        u32 i = g / GROUPS_A_LOAD + 1;
        next = i < 8 / GROUPS_A_LOAD ? load_groups(rows, i) : ldmatrix(stage + at.rope_rows);
      }
      u32 a[4][4];
      scale_group(x, row, g, a);
      score_tiles(a, queries + g * 4, s);
    } else {
      u32 a[2][4];
      scale_band(g == 8 ? next.x : next.z, g == 8 ? next.y : next.w, row, a);
      score_tiles(a, queries + ROPE_TILE + (g - 8) * 2, s);
    }
    if (g > 0) mma_wait<1>();
  }
  mma_wait<0>();
  settle(s);
}

// A producer's part.
DEVICE void prepare_scores(u32 prepared, u32 group, u32 warp, u32 quad, const Quads& x, Shift shift) {
  u32 to = prepared + SCORE_SCALES + group * SCORE_GROUP_BYTES + (warp * 8 + quad * 4) * SCORE_ROW_BYTES;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    u32 both = i % 2 ? 0x3232 : 0x1010;
    u32 upper = i < 2 ? first_tiny(x.upper_zeros) : second_tiny(x.upper_zeros);
    u32 lower = i < 2 ? first_tiny(x.lower_zeros) : second_tiny(x.lower_zeros);
    V2 scale = {permute(i < 2 ? x.upper.x : x.upper.y, 0, both), permute(i < 2 ? x.lower.x : x.lower.y, 0, both)};
    store_row_scales(to + i * SCORE_ROW_BYTES, group, scale, V2{permute(upper, 0, both), permute(lower, 0, both)}, shift);
  }
}

// Scores are in the unit of their keys.
DEVICE float mean_unit(int shift) { return key_unit(shift); }
DEVICE float score_factor(int shift) { return 1.0f / key_unit(shift); }
