// Runs the Hopper kernels on a CPU: every CUDA thread is a fibre, and the instructions of device.cuh
// are done as the PTX manual says, fragment layouts and matrix descriptors included. What it cannot
// show are races: asynchronous instructions are finished at once.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE static inline
#define __global__
#define __device__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(8) V2 { u32 x, y; };
struct alignas(16) V4 { u32 x, y, z, w; };
struct TensorMap { const u8* pages; i64 stride; int halves; };  // 128-byte halves of a row

using std::max;
using std::min;

namespace emulator {

const u32 SHARED = 228 * 1024;
u8 shared[SHARED];
const int MAX_THREADS = 640, STACK = 256 * 1024;

struct Meeting {  // of threads that go on together
  int count = 0;
  u64 generation = 0;
  bool any = false, result = false;
};
struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done;
};
Fibre fibres[MAX_THREADS];
ucontext_t scheduler;
int current, num_threads;
u32 block_x, block_y, blocks_x;
Meeting warps[20], groups[5], named[16], whole;
u64 inputs[MAX_THREADS][8], outputs[MAX_THREADS][4];
float* accumulators[MAX_THREADS];
struct Barrier { int expected, pending; u64 phase; i64 bytes; };
Barrier barriers[64];

void yield() { swapcontext(&fibres[current].context, &scheduler); }

void meet(Meeting& m, int size, const std::function<void()>& once) {
  if (++m.count == size) {
    once();
    m.count = 0, m.generation++;
    return;
  }
  u64 seen = m.generation;
  while (m.generation == seen) yield();
}
void warp_meet(const std::function<void(int)>& once) {
  int warp = current / 32;
  meet(warps[warp], min(32, num_threads), [&] { once(warp * 32); });
}

std::function<void()> body;
void run_fibre() {
  body();
  fibres[current].done = true;
  swapcontext(&fibres[current].context, &scheduler);
}

void run_block(int threads) {
  num_threads = threads;
  memset(shared, 0xff, SHARED);  // NaN, whatever the type
  for (int t = 0; t < threads; t++) {
    Fibre& f = fibres[t];
    if (!f.stack) f.stack.reset(new char[STACK]);
    getcontext(&f.context);
    f.context.uc_stack = {.ss_sp = f.stack.get(), .ss_flags = 0, .ss_size = STACK};
    f.context.uc_link = nullptr, f.done = false;
    makecontext(&f.context, run_fibre, 0);
  }
  for (int left = threads, idle = 0; left > 0;) {
    left = 0;
    for (int t = 0; t < threads; t++) {
      if (fibres[t].done) continue;
      left++, current = t;
      swapcontext(&scheduler, &fibres[t].context);
    }
    if (++idle > 50000000) { fprintf(stderr, "no progress\n"); abort(); }
  }
}

u8* at(u32 address, u32 bytes) {
  if (address < 1024 || address + bytes > SHARED || address % min(bytes, 16u)) {
    fprintf(stderr, "bad shared address %u for %u bytes\n", address, bytes);
    abort();
  }
  return shared + address;
}
template <class T> T load(u32 a) { T v; memcpy(&v, at(a, sizeof(T)), sizeof(T)); return v; }
template <class T> void store(u32 a, T v) { memcpy(at(a, sizeof(T)), &v, sizeof(T)); }
float half_value(u16 bits) { _Float16 h; memcpy(&h, &bits, 2); return (float)h; }
u16 half_bits(double x) { _Float16 h = (_Float16)x; u16 bits; memcpy(&bits, &h, 2); return bits; }
template <class F> u32 per_half(F f) { return half_bits(f(0)) | (u32)half_bits(f(16)) << 16; }
double pick(u32 x, int shift) { return half_value((u16)(x >> shift)); }
Barrier& barrier(u32 address) { return barriers[load<u64>(address) % 64]; }
void arrive(Barrier& b) {
  if (--b.pending == 0) b.pending = b.expected, b.phase++;
}
}  // namespace emulator

#define SHARED_BASE 1024u
DEVICE void check_shared_base() {}
DEVICE u32 thread_index() { return emulator::current; }
DEVICE u32 thread_count() { return emulator::num_threads; }
DEVICE u32 block_index() { return emulator::block_x; }
DEVICE u32 block_index_y() { return emulator::block_y; }
DEVICE u32 block_count() { return emulator::blocks_x; }

DEVICE u32 kept(u32 x) { return x; }
DEVICE void prefetch(u64 address) { __builtin_prefetch((const void*)address); }
DEVICE void prefetch_bytes(const void* from, u32 bytes) {
  if ((u64)from % 16 || bytes % 16) { fprintf(stderr, "a prefetch is not aligned\n"); abort(); }
}
DEVICE void prefetch_map(const TensorMap*) {}
DEVICE u32 lds32(u32 a) { return emulator::load<u32>(a); }
DEVICE float lds_float(u32 a) { return emulator::load<float>(a); }
DEVICE V2 lds64(u32 a) { return emulator::load<V2>(a); }
DEVICE V4 lds128(u32 a) { return emulator::load<V4>(a); }
DEVICE void sts16(u32 a, u32 v) { emulator::store<u16>(a, (u16)v); }
DEVICE void sts32(u32 a, u32 v) { emulator::store(a, v); }
DEVICE void sts_float(u32 a, float v) { emulator::store(a, v); }
DEVICE void sts64(u32 a, V2 v) { emulator::store(a, v); }
DEVICE void stg64(void* to, V2 v) { *(V2*)to = v; }
DEVICE void sts128(u32 a, V4 v) { emulator::store(a, v); }

DEVICE V4 matrix_load(u32 a, bool transposed) {
  using namespace emulator;
  inputs[current][0] = a;
  warp_meet([&](int first) {
    for (int lane = 0; lane < 32; lane++)
      for (int m = 0; m < 4; m++) {
        u32 both = 0;
        for (int e = 0; e < 2; e++) {
          int row = lane / 4, column = 2 * (lane % 4) + e;
          if (transposed) std::swap(row, column);
          u32 address = (u32)inputs[first + m * 8 + row][0];
          at(address, 16);
          both |= (u32)load<u16>(address + column * 2) << 16 * e;
        }
        outputs[first + lane][m] = both;
      }
  });
  u64* o = outputs[current];
  return V4{(u32)o[0], (u32)o[1], (u32)o[2], (u32)o[3]};
}
DEVICE V4 ldmatrix(u32 a) { return matrix_load(a, false); }
DEVICE V4 ldmatrix_transposed(u32 a) { return matrix_load(a, true); }
DEVICE void stmatrix_transposed(u32 a, V4 v) {
  using namespace emulator;
  u64* in = inputs[current];
  in[0] = a, in[1] = v.x, in[2] = v.y, in[3] = v.z, in[4] = v.w;
  warp_meet([&](int first) {
    for (int lane = 0; lane < 32; lane++)
      for (int m = 0; m < 4; m++)
        for (int e = 0; e < 2; e++) {
          int row = 2 * (lane % 4) + e, column = lane / 4;
          u32 address = (u32)inputs[first + m * 8 + row][0];
          at(address, 16);
          store<u16>(address + column * 2, (u16)(inputs[first + lane][1 + m] >> 16 * e));
        }
  });
}
DEVICE u32 hfma2(u32 a, u32 b, u32 c) {
  using emulator::pick;
  return emulator::per_half([&](int s) { return pick(a, s) * pick(b, s) + pick(c, s); });
}
DEVICE u32 hmul2(u32 a, u32 b) {
  return emulator::per_half([&](int s) { return emulator::pick(a, s) * emulator::pick(b, s); });
}
DEVICE u32 hadd2(u32 a, u32 b) {
  return emulator::per_half([&](int s) { return emulator::pick(a, s) + emulator::pick(b, s); });
}
DEVICE u32 hsub2(u32 a, u32 b) {
  return emulator::per_half([&](int s) { return emulator::pick(a, s) - emulator::pick(b, s); });
}
DEVICE u32 hmax2(u32 a, u32 b) {
  return emulator::per_half([&](int s) { return std::fmax(emulator::pick(a, s), emulator::pick(b, s)); });
}
DEVICE u32 max_u16x2(u32 a, u32 b) { return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16; }
DEVICE u32 pack_half2(float low, float high) { return emulator::half_bits(low) | (u32)emulator::half_bits(high) << 16; }
DEVICE float as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
DEVICE u32 as_bits(float x) { u32 b; memcpy(&b, &x, 4); return b; }
// Float8: 4 bits of exponent, 3 of mantissa; 448 is the largest.
DEVICE float float8_value(u32 bits) {
  int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float x = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
  if ((bits & 127) == 127) x = NAN;
  return bits & 128 ? -x : x;
}
DEVICE u32 float8_bits(float x) {
  u32 sign = std::signbit(x) ? 128 : 0, best = 0;
  x = std::fabs(x);
  for (u32 bits = 1; bits < 127; bits++) {  // nearest, to even
    float away = std::fabs(float8_value(bits) - x), least = std::fabs(float8_value(best) - x);
    if (away < least || (away == least && bits % 2 == 0)) best = bits;
  }
  return sign | best;
}
DEVICE u32 pack_float8(u32 x) {
  return float8_bits(emulator::half_value((u16)x)) | float8_bits(emulator::half_value((u16)(x >> 16))) << 8;
}
DEVICE u32 float8_halves(u32 x) { return pack_half2(float8_value(x & 255), float8_value(x >> 8 & 255)); }
DEVICE u32 bf16_bits(float x) {
  u32 b = as_bits(x);
  return std::isnan(x) ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
DEVICE u32 pack_bf162(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
DEVICE float half_low(u32 x) { return emulator::half_value((u16)x); }
DEVICE float half_high(u32 x) { return emulator::half_value((u16)(x >> 16)); }
DEVICE u32 and_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }
DEVICE u64 join(u32 low, u32 high) { return (u64)high << 32 | low; }
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
  u64 bytes = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}
DEVICE int max3(int a, int b, int c) { return max(a, max(b, c)); }
DEVICE u32 twice_low(u32 x) { return x << 16 | (x & 0xffff); }
DEVICE u32 twice_high(u32 x) { return x >> 16 | (x & 0xffff0000); }
DEVICE float exp2_fast(float x) { return exp2f(x); }
DEVICE float log2_fast(float x) { return log2f(x); }
DEVICE u64 exchange(u64 x, const std::function<int(int)>& from) {
  using namespace emulator;
  inputs[current][0] = x;
  inputs[current][1] = (u64)from(current % 32);
  warp_meet([&](int first) {
    for (int lane = 0; lane < 32; lane++) outputs[first + lane][0] = inputs[first + inputs[first + lane][1]][0];
  });
  return outputs[current][0];
}
DEVICE float shuffle_xor(float x, int mask) { return as_float((u32)exchange(as_bits(x), [=](int l) { return l ^ mask; })); }
DEVICE int shuffle_xor(int x, int mask) { return (int)exchange((u32)x, [=](int l) { return l ^ mask; }); }
DEVICE int warp_sum(int x) {
  for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
  return x;
}
DEVICE int warp_most(int x) {
  for (int mask = 16; mask; mask >>= 1) x = max(x, shuffle_xor(x, mask));
  return x;
}
DEVICE int shuffle_up(int x, int delta) { return (int)exchange((u32)x, [=](int l) { return l < delta ? l : l - delta; }); }
DEVICE int shuffle(int x, int lane) { return (int)exchange((u32)x, [=](int) { return lane; }); }
DEVICE u32 uniform(u32 x) { return (u32)exchange(x, [](int) { return 0; }); }
DEVICE u32 vote(bool p) {
  using namespace emulator;
  inputs[current][0] = p;
  warp_meet([&](int first) {
    u32 all = 0;
    for (int lane = 0; lane < 32; lane++) all |= (u32)inputs[first + lane][0] << lane;
    for (int lane = 0; lane < 32; lane++) outputs[first + lane][0] = all;
  });
  return (u32)outputs[current][0];
}
DEVICE int first_set(u32 x) { return __builtin_ffs((int)x) - 1; }

DEVICE void sync_warp() { emulator::warp_meet([](int) {}); }
DEVICE void sync_block() { emulator::meet(emulator::whole, emulator::num_threads, [] {}); }
DEVICE void sync_named(u32 id, u32 threads) { emulator::meet(emulator::named[id], threads, [] {}); }
DEVICE void sync_apart(u32 id, u32 threads) { sync_named(id, threads); }
DEVICE bool any_named(u32 id, u32 threads, bool p) {
  emulator::Meeting& m = emulator::named[id];
  m.any |= p;
  emulator::meet(m, threads, [&] { m.result = m.any, m.any = false; });
  return m.result;
}
DEVICE void fence_async_proxy() {}

// A barrier's word in shared memory names its state.
DEVICE void barrier_init(u32 bar, u32 count) {
  static u64 next = 0;
  emulator::store<u64>(bar, next % 64);
  emulator::barriers[next++ % 64] = {(int)count, (int)count, 0, 0};
}
DEVICE void barrier_fence_init() {}
DEVICE void barrier_expect(u32 bar, u32 bytes) { emulator::barrier(bar).bytes += bytes; }
DEVICE void received(u32 bar, u32 bytes) {
  emulator::Barrier& b = emulator::barrier(bar);
  if ((b.bytes -= bytes) == 0) emulator::arrive(b);
}
DEVICE void barrier_arrive(u32 bar, bool p) {
  if (p) emulator::arrive(emulator::barrier(bar));
}
DEVICE bool barrier_test(u32 bar, u32 parity) { return emulator::barrier(bar).phase % 2 != parity; }
DEVICE void barrier_wait(u32 bar, u32 parity) {
  while (emulator::barrier(bar).phase % 2 == parity) emulator::yield();
}
DEVICE void barrier_sleep(u32 bar, u32 parity) { barrier_wait(bar, parity); }
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
  memcpy(emulator::at(to, 16), from, bytes);
  received(bar, bytes);
}
// Box [halves][64 rows][64 words] of a page, rows of 128 bytes, swizzled in 16-byte chunks.
DEVICE void copy_tile(u32 to, const TensorMap* map, int page, u32 bar) {
  const u8* from = map->pages + page * map->stride;
  for (int half = 0; half < map->halves; half++)
    for (int row = 0; row < 64; row++)
      for (int chunk = 0; chunk < 8; chunk++) {
        u32 address = to + half * 8192 + row * 128 + chunk * 16;
        memcpy(emulator::at(address ^ (address >> 7 & 7) << 4, 16), from + row * 128 * map->halves + half * 128 + chunk * 16, 16);
      }
  received(bar, 8192 * map->halves);
}
DEVICE void wait_for_previous_kernel() {}
template <int count> DEVICE void fewer_registers() {}
template <int count> DEVICE void more_registers() {}
DEVICE void release_next_kernel() {}

DEVICE void mma_warp(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  using namespace emulator;
  for (int i = 0; i < 4; i++) inputs[current][i] = a[i];
  inputs[current][4] = b0, inputs[current][5] = b1;
  accumulators[current] = d;
  warp_meet([&](int first) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 8; i++) {
        int reg = i / 2, k = 2 * (lane % 4) + i % 2;
        left[lane / 4 + reg % 2 * 8][k + reg / 2 * 8] = half_value((u16)(inputs[first + lane][reg] >> 16 * (i % 2)));
        if (i < 4) right[k + reg * 8][lane / 4] = half_value((u16)(inputs[first + lane][4 + reg] >> 16 * (i % 2)));
      }
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        double sum = accumulators[first + lane][i];
        for (int k = 0; k < 16; k++) sum += (double)left[lane / 4 + i / 2 * 8][k] * right[k][2 * (lane % 4) + i % 2];
        accumulators[first + lane][i] = (float)sum;
      }
  });
}
template <int n> DEVICE void mma_fence(u32 (&)[n][4]) {}
DEVICE void mma_commit() {}
template <int pending> DEVICE void mma_wait() {}
template <int n> DEVICE void settle(float (&)[n]) {}
// K is 16 of float16, or 32 of float8: the bytes of A and B lie alike.
template <int add, int K, int n> DEVICE void multiply(float (&d)[n], const u32 (&a)[4], u64 b) {
  using namespace emulator;
  const int columns = 2 * n;
  for (int i = 0; i < 4; i++) inputs[current][i] = a[i];
  inputs[current][4] = b;
  accumulators[current] = d;
  int group = current / 128;
  meet(groups[group], 128, [&] {
    int first = group * 128;
    for (int t = 1; t < 128; t++)
      if (inputs[first + t][4] != inputs[first][4]) { fprintf(stderr, "descriptors differ\n"); abort(); }
    u64 descriptor = inputs[first][4];
    if (descriptor >> 49) { fprintf(stderr, "swizzle or base offset in a descriptor\n"); abort(); }
    u32 address = (descriptor & 0x3fff) << 4, by_k = (descriptor >> 16 & 0x3fff) << 4, by_n = (descriptor >> 32 & 0x3fff) << 4;
    static float left[64][K], right[K][64];
    const int bytes = 32 / K;  // of an element
    auto value = [](u32 bits) { return K == 16 ? half_value((u16)bits) : float8_value(bits & 255); };
    for (int t = 0; t < 128; t++)
      for (int i = 0; i < K / 2; i++) {
        int lane = t % 32, reg = i / (K / 8), within = i % (K / 8);
        left[t / 32 * 16 + lane / 4 + reg % 2 * 8][K / 8 * (lane % 4) + within + reg / 2 * (K / 2)] =
            value((u32)inputs[first + t][reg] >> 8 * bytes * within);
      }
    for (int k = 0; k < K; k++)
      for (int c = 0; c < columns; c++) {
        u32 at = address + k / (K / 2) * by_k + c / 8 * by_n + c % 8 * 16 + k % (K / 2) * bytes;
        right[k][c] = value(bytes == 2 ? load<u16>(at) : load<u8>(at));
      }
    for (int t = 0; t < 128; t++)
      for (int i = 0; i < n; i++) {
        int lane = t % 32, row = t / 32 * 16 + lane / 4 + (i / 2 % 2) * 8, column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        double sum = add ? accumulators[first + t][i] : 0.0;
        for (int k = 0; k < K; k++) sum += (double)left[row][k] * right[k][column];
        accumulators[first + t][i] = (float)sum;
      }
  });
}
template <int add, int n> DEVICE void mma(float (&d)[n], const u32 (&a)[4], u64 b) { multiply<add, 16>(d, a, b); }
template <int add, int n> DEVICE void mma_float8(float (&d)[n], const u32 (&a)[4], u64 b) { multiply<add, 32>(d, a, b); }
