// Scores of a packed page: integers go into the products, in float8, and a group's scale multiplies its sum.
// Zero points of all groups are one more product.

// Products with both terms of the query.
template <int steps> DEVICE void score_steps(u32 (&a)[steps][4], u32 query, float (&acc)[H2]) {
  mma_fence(a);
  mma_float8<0>(acc, a[0], query_tile(query));
#pragma unroll
  for (int i = 1; i < 2 * steps; i++) mma_float8<1>(acc, a[i / 2], query_tile(query + i));
  mma_commit();
}

// The page's mean rope key, the same for every row, and the zero points of all groups.
DEVICE void score_offsets(const Place& at, u32 prepared, float (&s)[H2]) {
  V4 z = ldmatrix_transposed(prepared + at.zero_matrix);
  u32 zero[1][4] = {{z.x, z.y, z.z, z.w}};
  read_means(at, prepared, s);
  settle(s);
  mma_fence(zero);
  mma<1>(s, zero[0], query_tile(SUMS_TILE));
  mma_commit();
}

DEVICE V2 fold_scale(const Place& at, u32 prepared, u32 group) { return lds64(prepared + at.score_scales + group * 256); }

DEVICE void fold(V2 scale, const float (&acc)[H2], float (&s)[H2]) {
  float upper = as_float(scale.x), lower = as_float(scale.y);
#pragma unroll
  for (int i = 0; i < H2; i += 4) {
    s[i] += upper * acc[i], s[i + 1] += upper * acc[i + 1];
    s[i + 2] += lower * acc[i + 2], s[i + 3] += lower * acc[i + 3];
  }
}

// In units of the scaled query: tokens 16 warp + row and + 8 of this thread. A group's sum is folded
// while the next group's is on its way.
DEVICE void score_page(const Place& at, u32 stage, u32 prepared, float (&s)[H2]) {
  float acc[2][H2];
  u32 rows = stage + at.score_rows;
  V4 x, next = load_groups(rows, 0);
  score_offsets(at, prepared, s);
#pragma unroll
  for (u32 g = 0; g < 10; g++) {
    V2 scale;
    if (g > 0) scale = fold_scale(at, prepared, g - 1);
    if (g < 8) {
      if (g % GROUPS_A_LOAD == 0) {
        x = next;
        u32 i = g / GROUPS_A_LOAD + 1;
        next = i < 8 / GROUPS_A_LOAD ? load_groups(rows, i) : ldmatrix(stage + at.rope_rows);
      }
      u32 a[2][4];
      mask_group(x, g, a);
      score_steps(a, KEY_TILE + g * 4, acc[g % 2]);
    } else {  // a band of the rope
      u32 upper = g == 8 ? next.x : next.z, lower = g == 8 ? next.y : next.w;
      u32 a[1][4] = {{lower_nibbles(upper), lower_nibbles(lower), upper_nibbles(upper), upper_nibbles(lower)}};
      score_steps(a, ROPE_TILE + (g - 8) * 2, acc[g % 2]);
    }
    if (g == 0) continue;
    mma_wait<1>();
    settle(acc[(g - 1) % 2]);
    if (g == 1) settle(s);
    fold(scale, acc[(g - 1) % 2], s);
  }
  V2 scale = fold_scale(at, prepared, 9);
  mma_wait<0>();
  settle(acc[1]);
  fold(scale, acc[1], s);
}

// A producer's part.
DEVICE u32 scaled_low(u32 x) { return as_bits(half_low(x) * 512.0f); }  // integers are n 2^-9
DEVICE u32 scaled_high(u32 x) { return as_bits(half_high(x) * 512.0f); }

DEVICE void prepare_scores(u32 prepared, u32 group, u32 warp, u32 quad, const Quads& x) {
  V2 upper = x.upper, lower = x.lower;
  u32 scales = prepared + SCORE_SCALES + group * 256 + warp * 64 + quad * 32;
  sts128(scales, V4{scaled_low(upper.x), scaled_low(lower.x), scaled_high(upper.x), scaled_high(lower.x)});
  sts128(scales + 16, V4{scaled_low(upper.y), scaled_low(lower.y), scaled_high(upper.y), scaled_high(lower.y)});
  u32 zeros = prepared + SCORE_ZEROS + group * ZEROS_ROW + (warp * 16 + quad * 4) * 2;
  sts64(zeros, V2{hmul2(upper.x, first_minus(x.upper_zeros)), hmul2(upper.y, second_minus(x.upper_zeros))});
  sts64(zeros + 16, V2{hmul2(lower.x, first_minus(x.lower_zeros)), hmul2(lower.y, second_minus(x.lower_zeros))});
}
