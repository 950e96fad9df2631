// The few Hopper instructions that the kernels use, one function each. No headers: NVRTC has none.
// Shared memory is addressed by 32-bit addresses throughout.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE static __device__ __forceinline__

struct __align__(8) V2 { u32 x, y; };
struct __align__(16) V4 { u32 x, y, z, w; };
struct __align__(64) TensorMap { u8 opaque[128]; };

extern __shared__ __align__(1024) u8 dynamic_shared[];

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 thread_count() { return blockDim.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 block_index_y() { return blockIdx.y; }
DEVICE u32 block_count() { return gridDim.x; }
// Where dynamic shared memory starts: a constant keeps every descriptor a constant.
#define SHARED_BASE 1024u
DEVICE void check_shared_base() { if ((u32)__cvta_generic_to_shared(dynamic_shared) != SHARED_BASE) __trap(); }
DEVICE u32 uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

// A value that is to be kept in a register rather than computed again.
DEVICE u32 kept(u32 x) { asm volatile("" : "+r"(x)); return x; }

DEVICE void prefetch(u64 address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
// All of them, by one instruction; multiples of 16 bytes.
DEVICE void prefetch_bytes(const void* from, u32 bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes)); }
DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- shared memory
DEVICE u32 lds32(u32 a) { u32 v; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
DEVICE float lds_float(u32 a) { return __uint_as_float(lds32(a)); }
DEVICE V2 lds64(u32 a) { V2 v; asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory"); return v; }
DEVICE V4 lds128(u32 a) {
  V4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
  return v;
}

DEVICE void sts16(u32 a, u32 v) { asm volatile("{.reg .b16 h; cvt.u16.u32 h, %1; st.shared.b16 [%0], h;}" ::"r"(a), "r"(v) : "memory"); }
DEVICE void sts32(u32 a, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
DEVICE void sts_float(u32 a, float v) { sts32(a, __float_as_uint(v)); }
DEVICE void sts64(u32 a, V2 v) { asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(a), "r"(v.x), "r"(v.y) : "memory"); }
DEVICE void sts128(u32 a, V4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE V4 ldmatrix(u32 a) {
  V4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
  return v;
}
DEVICE V4 ldmatrix_transposed(u32 a) {
  V4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
  return v;
}
DEVICE void stmatrix_transposed(u32 a, V4 v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// One store: the compiler may take two of a structure's.
DEVICE void stg64(void* to, V2 v) { asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory"); }

// ---- arithmetic
DEVICE u32 hfma2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
DEVICE u32 hmul2(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEVICE u32 hadd2(u32 a, u32 b) { u32 d; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEVICE u32 hsub2(u32 a, u32 b) { u32 d; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEVICE u32 hmax2(u32 a, u32 b) { u32 d; asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEVICE u32 max_u16x2(u32 a, u32 b) { return __vmaxu2(a, b); }
DEVICE u32 pack_half2(float low, float high) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d; }
DEVICE u32 pack_bf162(float low, float high) { u32 d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d; }
// Two float8 numbers of 4 exponent and 3 mantissa bits in 16 bits, and as two of float16.
DEVICE u32 pack_float8(u32 halves) {  // of two float16 numbers
  u32 d;
  asm("{.reg .b16 x; cvt.rn.satfinite.e4m3x2.f16x2 x, %1; cvt.u32.u16 %0, x;}" : "=r"(d) : "r"(halves));
  return d;
}
DEVICE u32 float8_halves(u32 x) { u32 d; asm("{.reg .b16 l; cvt.u16.u32 l, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(d) : "r"(x)); return d; }
DEVICE float half_low(u32 x) { float f; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(x)); return f; }
DEVICE float half_high(u32 x) { float f; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(x)); return f; }
DEVICE u32 and_or(u32 a, u32 mask, u32 bits) { u32 d; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits)); return d; }
DEVICE u64 join(u32 low, u32 high) { u64 d; asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(high)); return d; }
DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE int warp_sum(int x) { return __reduce_add_sync(0xffffffffu, x); }
DEVICE int warp_most(int x) { return __reduce_max_sync(0xffffffffu, x); }
DEVICE int shuffle_up(int x, int delta) { return __shfl_up_sync(0xffffffffu, x, delta); }
DEVICE int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE u32 vote(bool p) { return __ballot_sync(0xffffffffu, p); }
DEVICE int first_set(u32 x) { return __ffs(x) - 1; }

// ---- order among threads
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_named(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// The same for warps that come from different places in the program.
DEVICE void sync_apart(u32 id, u32 threads) { asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE bool any_named(u32 id, u32 threads, bool p) {
  u32 r;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q;}"
               : "=r"(r) : "r"(id), "r"(threads), "r"((u32)p) : "memory");
  return r != 0;
}
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- copies that complete on a barrier in shared memory
DEVICE void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEVICE void barrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1;}" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 bar, bool p) {  // of the threads with p
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(bar), "r"((u32)p) : "memory");
}
DEVICE u64 barrier_token(u32 bar) {  // arrives; what says of which phase
  u64 token;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(token) : "r"(bar) : "memory");
  return token;
}
DEVICE bool barrier_passed(u32 bar, u64 token) {
  u32 r;
  asm volatile("{.reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(r) : "r"(bar), "l"(token) : "memory");
  return r;
}
DEVICE bool barrier_test(u32 bar, u32 parity) {
  u32 r;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(r) : "r"(bar), "r"(parity) : "memory");
  return r;
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n bra again;\n done: }" ::"r"(bar), "r"(parity) : "memory");
}
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEVICE void copy_tile(u32 to, const TensorMap* map, int page, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2,%2,%2,%3}], [%4];" ::"r"(to),
      "l"(map), "r"(0), "r"(page), "r"(bar) : "memory");
}
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// A warpgroup's registers a thread, from here on.
template <int count> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count)); }
template <int count> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)); }
DEVICE void release_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- warp MMA: D[16, 8] += A[16, 16] B[16, 8]
DEVICE void mma_warp(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- warpgroup MMA: D[64, n] (+)= A[64, 16] B[16, n], A in registers, B K-major and unswizzled
// All operands in registers must be there before the fence: naming them keeps the compiler from computing them later.
template <int n> DEVICE void mma_fence(u32 (&a)[n][4]) {
#pragma unroll
  for (int i = 0; i < n; i++) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending> DEVICE void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory"); }
// Keeps the compiler from touching accumulators of an MMA before the wait above it.
template <int n> DEVICE void settle(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int add> DEVICE void mma(float (&d)[8], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, %13, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
template <int add> DEVICE void mma(float (&d)[16], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, %20, %21, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
// D[64, n] (+)= A[64, 32] B[32, n] of float8
template <int add> DEVICE void mma_float8(float (&d)[8], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, %13, 1, 1;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
template <int add> DEVICE void mma_float8(float (&d)[16], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, %20, %21, 1, 1;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
