// What is the same for every width of content: loading, metadata, rope, products.

DEVICE void load_page(const Arguments& p, const TensorMap* map, const Place& at, u32 slot, int number) {
  u32 to = SHARED_BASE + (at.group * STAGES + slot) * PAGE_BYTES;
  u32 bar = SHARED_BASE + AT_BARRIER + (at.group * STAGES + slot) * 8;
  const u8* page = p.pages + number * p.page_stride;
#if TMA
  if (at.lane == 0) {
    barrier_expect(bar, PAGE_BYTES);
    copy_tile(to, map, number, bar);
    copy_bulk(to + AT_ROPE, page + AT_ROPE, PAGE_BYTES - AT_ROPE, bar);
  }
#else
#pragma unroll 8
  for (u32 i = at.lane; i < AT_ROPE / 16; i += 32) {
    u32 token = i / (AT_ROPE / 1024), chunk = i % (AT_ROPE / 1024);
    copy_16(to + chunk / 8 * HALF + token * 128 + ((chunk ^ token) % 8) * 16, page + i * 16);
  }
#pragma unroll 8
  for (u32 i = AT_ROPE + at.lane * 16; i < PAGE_BYTES; i += 512) copy_16(to + i, page + i);
  copies_arrive(bar);
#endif
}

// {1024 + zero} of tokens 0, 1 and of tokens 2, 3.
DEVICE u32 first_zeros(u32 z) { return permute(z, 0x64646464, 0x4140); }
DEVICE u32 second_zeros(u32 z) { return permute(z, 0x64646464, 0x4342); }

// Scales and zero points in the forms and places in which this warp's threads will want them.
DEVICE void prepare_scores(const Place& at, u32 stage) {
  if (at.lane < 20) {  // scores: 10 groups x 2 halves of the warp's 16 tokens
    V4 s = lds128(stage + AT_SCALES + at.score_source * 2);
    V2 z = lds64(stage + AT_ZEROS + at.score_source);
    u32 scale[4] = {s.x, s.y, s.z, s.w}, minus[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sts_float(at.score_scales + (2 * i) * 8, half_low(scale[i]) * 16777216.0f);
      sts_float(at.score_scales + (2 * i + 1) * 8, half_high(scale[i]) * 16777216.0f);
      u32 word = i < 2 ? z.x : z.y, zero = i % 2 ? second_zeros(word) : first_zeros(word);
      minus[i] = hmul2(scale[i], hsub2(0x64006400, zero));
    }
    sts128(at.score_zeros, V4{minus[0], minus[1], minus[2], minus[3]});
  }
}

DEVICE void mask_nibbles(u32 x, u32& n0, u32& n1, u32& n2, u32& n3) {
  u32 y = x >> 8;
  n0 = x & 0x000f000f, n1 = x & 0x00f000f0, n2 = y & 0x000f000f, n3 = y & 0x00f000f0;
}

DEVICE void score_band(const Place& at, u32 x, u32 y, u32 band, float (&acc)[H2]) {
  u32 a[2][4];  // plane 2i of both rows, then plane 2i + 1
  mask_nibbles(x, a[0][0], a[0][2], a[1][0], a[1][2]);
  mask_nibbles(y, a[0][1], a[0][3], a[1][1], a[1][3]);
  mma_fence(a);
  mma<0>(acc, a[0], query_tile(ROPE_TILE + band * 2));
  mma<1>(acc, a[1], query_tile(ROPE_TILE + band * 2 + 1));
  mma_commit();
}

#ifdef MEANS_AHEAD
// Products of the query with the mean rope keys of this warpgroup's next 64 pages.
DEVICE void multiply_means(const Arguments& p, const Place& at, const int* table, int page, int last) {
  u32 i = at.warp * 16 + at.row, a[4][4];
#pragma unroll
  for (int lower = 0; lower < 2; lower++) {
    int mine = page + (int)(i + lower * 8) * WARPGROUPS;
    const u8* mean = mine < last ? p.pages + table[mine] * p.page_stride + AT_MEAN + at.pair * 4 : nullptr;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      a[k][lower] = mean ? *(const u32*)(mean + k * 32) : 0;
      a[k][2 + lower] = mean ? *(const u32*)(mean + k * 32 + 16) : 0;
    }
  }
  float d[H2];
  mma_fence(a);
  mma<0>(d, a[0], query_tile(MEAN_TILE));
  mma<1>(d, a[1], query_tile(MEAN_TILE + 1));
  mma<1>(d, a[2], query_tile(MEAN_TILE + 2));
  mma<1>(d, a[3], query_tile(MEAN_TILE + 3));
  mma_commit();
  mma_wait<0>();
  settle(d);
  sync_named(1 + at.group, 128);  // those of the 64 pages before have been read
  u32 to = SHARED_BASE + AT_MEANS + at.group * 256 * HEADS + i * HEADS * 4 + at.pair * 8;
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    sts64(to + j * 32, V2{as_bits(d[4 * j]), as_bits(d[4 * j + 1])});
    sts64(to + HEADS * 32 + j * 32, V2{as_bits(d[4 * j + 2]), as_bits(d[4 * j + 3])});
  }
  sync_named(1 + at.group, 128);
}

// The page's mean rope key, the same for every row, and the zero points of all groups.
DEVICE void score_offsets(const Place& at, u32 means, float (&s)[H2]) {
  V4 z = ldmatrix_transposed(at.zero_matrix);
  u32 zero[1][4] = {{z.x, z.y, z.z, z.w}};
#pragma unroll
  for (int j = 0; j < HEADS / 8; j++) {
    V2 m = lds64(means + j * 32);
    s[4 * j] = s[4 * j + 2] = as_float(m.x), s[4 * j + 1] = s[4 * j + 3] = as_float(m.y);
  }
  settle(s);
  mma_fence(zero);
  mma<1>(s, zero[0], query_tile(SUMS_TILE));
  mma_commit();
}
#else
// Zero points of all groups, and the page's mean rope key, which is the same in every row.
DEVICE void score_offsets(const Place& at, u32 stage, float (&s)[H2]) {
  V4 z = ldmatrix_transposed(at.zero_matrix);
  u32 zero[1][4] = {{z.x, z.y, z.z, z.w}}, mean[4][4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    mean[k][0] = mean[k][1] = lds32(stage + at.mean + k * 32);
    mean[k][2] = mean[k][3] = lds32(stage + at.mean + k * 32 + 16);
  }
  mma_fence(zero), mma_fence(mean);
  mma<0>(s, zero[0], query_tile(SUMS_TILE));
#pragma unroll
  for (int k = 0; k < 4; k++) mma<1>(s, mean[k], query_tile(MEAN_TILE + k));
  mma_commit();
}
#endif

DEVICE void fold(const Place& at, u32 group, const float (&acc)[H2], float (&s)[H2]) {
  V2 scale = lds64(at.fold_scales + group * 72);
  float upper = as_float(scale.x), lower = as_float(scale.y);
#pragma unroll
  for (int i = 0; i < H2; i += 4) {
    s[i] += upper * acc[i], s[i + 1] += upper * acc[i + 1];
    s[i + 2] += lower * acc[i + 2], s[i + 3] += lower * acc[i + 3];
  }
}

DEVICE void add_values(float (&o)[4][H2], u32 (&v)[4][4], u32 probability, u32 k) {
  u64 p = operand(probability, k);
  mma_fence(v);
#pragma unroll
  for (int plane = 0; plane < 4; plane++) mma<1>(o[plane], v[plane], p);
  mma_commit();
}

DEVICE void settle_output(float (&o)[2][4][H2]) {
#pragma unroll
  for (int i = 0; i < 8; i++) settle(o[i / 4][i % 4]);
}

// ---- bf16 rows: 0 is the address of a row of zeros

DEVICE u32 halves(u32 low, u32 high) {  // two bf16 in the upper 16 bits to float16
  return pack_half2(as_float(low & 0xffff0000), as_float(high & 0xffff0000));
}

DEVICE V4 global_16(u64 row, u32 channel) { return row ? *(const V4*)(row + channel * 2) : V4{0, 0, 0, 0}; }
DEVICE V2 global_8(u64 row, u32 channel) { return row ? *(const V2*)(row + channel * 2) : V2{0, 0}; }
DEVICE u32 global_4(u64 row, u32 channel) { return row ? *(const u32*)(row + channel * 2) : 0; }

DEVICE u64 row_address(const Place& at, u32 i) {
  V2 a = lds64(SHARED_BASE + AT_ROWS + at.group * 512 + i * 8);
  return (u64)a.y << 32 | a.x;
}

// Groups g and g + 1 of bf16 rows; tiles 1 and 3 of a group carry 1/16, and have their own sum.
DEVICE void add_row_products(u32 (&a)[2][4][4], u32 g, float (&s)[H2], float (&odd)[H2]) {
  settle(s), settle(odd);
  mma_fence(a[0]), mma_fence(a[1]);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    mma<1>(s, a[i / 4][i % 4], query_tile(g * 4 + i));
    mma<1>(odd, a[i / 4][i % 4 + 1], query_tile(g * 4 + i + 1));
  }
  mma_commit();
  mma_wait<0>();
  settle(s), settle(odd);
}
