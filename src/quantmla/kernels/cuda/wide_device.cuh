// What the kernel of 64 columns needs besides device.cuh.

// As barrier_wait, for a warp that has time: it sleeps rather than ask again.
DEVICE void barrier_sleep(u32 bar, u32 parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, %2;\n"
      "@p bra done;\n bra again;\n done: }" ::"r"(bar), "r"(parity), "r"(1000000) : "memory");
}
DEVICE int max3(int a, int b, int c) { return __vimax3_s32(a, b, c); }
// {x, x} of the lower or the upper half; free, as an operand of HFMA2.
DEVICE u32 twice_low(u32 x) { u32 d; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(x)); return d; }
DEVICE u32 twice_high(u32 x) { u32 d; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(x)); return d; }

#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
template <int add> DEVICE void mma(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, %37, 1, 1, 0;"
      : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
