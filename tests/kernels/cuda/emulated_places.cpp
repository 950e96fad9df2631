// What places.cuh needs beyond device.cuh, for the emulator; compiled between the two.
#define EMULATED
DEVICE float bf16_value(u32 bits) { return as_float(bits << 16); }
template <class F> u32 per_bf16(u32 a, u32 b, F f) {
  u32 low = bf16_bits(f(bf16_value(a & 0xffff), bf16_value(b & 0xffff)));
  return low | bf16_bits(f(bf16_value(a >> 16), bf16_value(b >> 16))) << 16;
}
DEVICE u32 min_bf162(u32 a, u32 b) { return per_bf16(a, b, fminf); }
DEVICE u32 max_bf162(u32 a, u32 b) { return per_bf16(a, b, fmaxf); }
// as inexact as the instruction may be: one unit in the last place
DEVICE float reciprocal(float x) { return std::nextafter(1.0f / x, as_bits(x) & 1 ? 0.0f : 1e30f); }
DEVICE float divide(float a, float b) { return a / b; }
DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float lesser(float a, float b) { return fminf(a, b); }
DEVICE float greater(float a, float b) { return fmaxf(a, b); }
DEVICE float apart(float x) { return x; }
DEVICE double shuffle_xor(double x, int mask) {
  u64 bits;
  memcpy(&bits, &x, 8);
  bits = exchange(bits, [=](int lane) { return lane ^ mask; });
  memcpy(&x, &bits, 8);
  return x;
}

DEVICE V4 load16(u64 a, u32 offset) {
  V4 v = {0, 0, 0, 0};
  if (a) memcpy(&v, (const void*)(a + offset), 16);
  return v;
}
template <class T> u32 load_global(u64 a, u32 offset) {
  T v = 0;
  if (a) memcpy(&v, (const void*)(a + offset), sizeof(T));
  return v;
}
DEVICE u32 load4(u64 a, u32 offset) { return load_global<u32>(a, offset); }
DEVICE u32 load2(u64 a, u32 offset) { return load_global<u16>(a, offset); }
DEVICE u32 load1(u64 a, u32 offset) { return load_global<u8>(a, offset); }
DEVICE void store_global(u64 a, u32 offset, const void* v, int bytes) {
  if (a) memcpy((void*)(a + offset), v, bytes);
}
DEVICE void store16(u64 a, u32 offset, V4 v) { store_global(a, offset, &v, 16); }
DEVICE void store4(u64 a, u32 offset, u32 v) { store_global(a, offset, &v, 4); }
DEVICE void store2(u64 a, u32 offset, u32 v) { store_global(a, offset, &v, 2); }
DEVICE void store1(u64 a, u32 offset, u32 v) { store_global(a, offset, &v, 1); }
