// What tensor-core and other instructions of different warps cost one another on one multiprocessor.
// Compiled after device.cuh. The first TENSOR_WARPS warps do products, the rest arithmetic, all for
// WINDOW cycles; each counts its rounds. PRODUCT 1: wgmma, A in registers; 2: wgmma, A in shared memory;
// 3: mma.sync m16n8k16. COLUMNS: n of a wgmma. OTHER 1: LOP3; 2: HFMA2; 3: FFMA; 4: ldmatrix; 5: ex2.

#define WINDOW 40000

DEVICE u64 now() { u64 t; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory"); return t; }
DEVICE u64 b_tile(u32 i) { return join((SHARED_BASE >> 4) + (i % 8) * (2 * COLUMNS) | (u32)COLUMNS << 16, 8); }

template <int add> DEVICE void mma(float (&d)[4], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, %9, 1, 1, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
#define D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
template <int add> DEVICE void mma(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, %37, 1, 1, 0;"
      : D(0), D(8), D(16), D(24) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
DEVICE void mma_shared(float (&d)[8], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, 0, 0;"
               : D(0) : "l"(a), "l"(b));
}
DEVICE u32 products(u64 end, float& total) {
  u32 rounds = 0, a[4];
  for (int i = 0; i < 4; i++) a[i] = threadIdx.x * (i + 1) & 0x03ff03ff;
#if PRODUCT == 3
  float d[8][4] = {};
  while (now() < end) {
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int i = 0; i < 8; i++) mma_warp(d[i], a, a[r], a[i % 4]);
    rounds++;
  }
  for (int i = 0; i < 8; i++) for (int j = 0; j < 4; j++) total += d[i][j];
#else
  float d[2][COLUMNS / 2] = {};
  // all warps of a warpgroup stop at once
  while (!uniform(any_named(1 + threadIdx.x / 128, 128, now() >= end))) {
    u32 x[1][4] = {{a[0], a[1], a[2], a[3]}};
    mma_fence(x);
#pragma unroll
    for (int i = 0; i < 64; i++) {
#if PRODUCT == 1
      mma<1>(d[i % 2], x[0], b_tile(i));
#else
      mma_shared(d[i % 2], join((SHARED_BASE >> 4) + 1024 + i % 8 * 128 | 64u << 16, 8), b_tile(i));
#endif
    }
    mma_commit();
    mma_wait<0>();
    settle(d[0]), settle(d[1]);
    rounds++;
  }
#pragma unroll
  for (int i = 0; i < COLUMNS; i++) total += d[i % 2][i / 2];
#endif
  return rounds;
}

DEVICE u32 arithmetic(u64 end, float& total) {
  u32 rounds = 0, x[8];
  float f[8];
  for (int i = 0; i < 8; i++) x[i] = threadIdx.x + i, f[i] = x[i];
  u32 address = SHARED_BASE + threadIdx.x % 32 * 16;
  while (now() < end) {
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
#if OTHER == 1
        asm volatile("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(x[i]) : "r"(x[(i + 1) % 8]), "r"(rounds));
#elif OTHER == 2
        asm volatile("fma.rn.f16x2 %0, %0, %1, %0;" : "+r"(x[i]) : "r"(rounds));
#elif OTHER == 3
        asm volatile("fma.rn.f32 %0, %0, %1, %0;" : "+f"(f[i]) : "f"(f[(i + 1) % 8]));
#elif OTHER == 4
        V4 v = ldmatrix(address + i * 512);
        x[i] ^= v.x;
#elif OTHER == 5
        f[i] = exp2_fast(f[i]);
#endif
      }
    rounds++;
  }
  for (int i = 0; i < 8; i++) total += x[i] + f[i];
  return rounds;
}

extern "C" __global__ void __launch_bounds__(640) overlap(u32* counts, float* sink, int tensor_warps) {
  for (u32 i = threadIdx.x; i < 65536 / 4; i += blockDim.x) sts32(SHARED_BASE + i * 4, 0);
  fence_async_proxy();
  sync_block();
  float total = 0;
  u64 end = now() + WINDOW;
  int warp = uniform(threadIdx.x / 32);
  u32 rounds = warp < tensor_warps ? products(end, total) : arithmetic(end, total);
  if (threadIdx.x % 32 == 0) counts[blockIdx.x * (blockDim.x / 32) + warp] = rounds;
  sink[blockIdx.x * blockDim.x + threadIdx.x] = total;
}
