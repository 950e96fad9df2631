// How fast m64n16k16 products with A from registers are issued in the patterns of the decode kernel.
// Compiled after device.cuh. PATTERN 0: independent sums, as values have them. 1: chains of four on one
// sum, one chain ahead, as scores have them. 2: two chains at once. 3: as 1, and every sum is used.

#define TIMES 64

DEVICE u64 tile(u32 i) { return join((SHARED_BASE >> 4) + (i % 32) * 32 | 16u << 16, 8); }

extern "C" __global__ void __launch_bounds__(512) products(u64* cycles, float* sink) {
  for (u32 i = threadIdx.x; i < 16384 / 4; i += blockDim.x) sts32(SHARED_BASE + i * 4, 0);
  fence_async_proxy();
  sync_block();
  float d[8][8], total = 0;
  u32 a[4][4], b[4][4];
#pragma unroll
  for (int i = 0; i < 64; i++) d[i / 8][i % 8] = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) a[i / 4][i % 4] = threadIdx.x * (i + 1), b[i / 4][i % 4] = threadIdx.x + i;
  u64 start, end;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(start)::"memory");
#pragma unroll 1
  for (u32 t = 0; t < TIMES; t++) {
#pragma unroll
    for (u32 g = 0; g < 8; g++) {
      mma_fence(a), mma_fence(b);
#if PATTERN == 0
#pragma unroll
      for (u32 i = 0; i < 4; i++) mma<1>(d[g % 2 * 4 + i], g % 2 ? b[i] : a[i], tile(g * 4 + i));
#elif PATTERN == 2
#pragma unroll
      for (u32 i = 0; i < 4; i++) mma<1>(d[g % 2 * 4 + i % 2], g % 2 ? b[i] : a[i], tile(g * 4 + i));
#else
#pragma unroll
      for (u32 i = 0; i < 4; i++) mma<1>(d[g % 2 * 4], g % 2 ? b[i] : a[i], tile(g * 4 + i));
#endif
      mma_commit();
      mma_wait<1>();
      settle(d[(g + 1) % 2 * 4]);
#if PATTERN == 3
#pragma unroll
      for (int i = 0; i < 8; i++) total += d[(g + 1) % 2 * 4][i] * 0.5f;
#endif
    }
    mma_wait<0>();
#pragma unroll
    for (int i = 0; i < 8; i++) settle(d[i]);
  }
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(end)::"memory");
#pragma unroll
  for (int i = 0; i < 64; i++) total += d[i / 8][i % 8];
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - start;
  sink[blockIdx.x * blockDim.x + threadIdx.x] = total;
}
