// What append and gather share: arithmetic beyond device.cuh, and places of rows.
#pragma once

#define GROUPS 8
#define LATENT_BYTES 1024
#define TOKENS 64
#define ROUNDER 12582912.0f  // 1.5 * 2^23: adding it rounds to an integer, half to even
#define CODE_TOP ((float)((1 << CONTENT_BITS) - 1))
#define ROPE_TOP 15.0f

#ifndef EMULATED
DEVICE u32 min_bf162(u32 a, u32 b) { u32 d; asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEVICE u32 max_bf162(u32 a, u32 b) { u32 d; asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float lesser(float a, float b) { return fminf(a, b); }
DEVICE float greater(float a, float b) { return fmaxf(a, b); }
DEVICE double shuffle_xor(double x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
// Global memory at an address and an offset; nothing happens where the address is 0, and 0 is loaded.
#define IF_THERE "{.reg .pred p; setp.ne.u64 p, %0, 0; @p "
DEVICE V4 load16(u64 a, u32 offset) {
  V4 v = {0, 0, 0, 0};
  asm volatile("{.reg .pred p; setp.ne.u64 p, %4, 0; @p ld.global.v4.b32 {%0,%1,%2,%3}, [%5];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(a), "l"(a + offset) : "memory");
  return v;
}
#define LOAD(name, type) \
  DEVICE u32 name(u64 a, u32 offset) { \
    u32 v = 0; \
    asm volatile("{.reg .pred p; setp.ne.u64 p, %1, 0; @p ld.global." type " %0, [%2];}" : "+r"(v) : "l"(a), "l"(a + offset) : "memory"); \
    return v; \
  }
LOAD(load4, "b32")
LOAD(load2, "u16")
LOAD(load1, "u8")
DEVICE void store16(u64 a, u32 offset, V4 v) {
  asm volatile(IF_THERE "st.global.v4.b32 [%1], {%2,%3,%4,%5};}" ::"l"(a), "l"(a + offset), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
#define STORE(name, type) \
  DEVICE void name(u64 a, u32 offset, u32 v) { \
    asm volatile(IF_THERE "st.global." type " [%1], %2;}" ::"l"(a), "l"(a + offset), "r"(v) : "memory"); \
  }
STORE(store4, "b32")
STORE(store2, "u16")
STORE(store1, "u8")
DEVICE float apart(float x) { asm volatile("" : "+f"(x)); return x; }  // no fused multiply-add with what follows
#endif

DEVICE u64 lds_u64(u32 a) { V2 v = lds64(a); return join(v.x, v.y); }
DEVICE void sts_u64(u32 a, u64 v) { sts64(a, V2{(u32)v, (u32)(v >> 32)}); }
DEVICE float bf16_low(u32 x) { return as_float(x << 16); }
DEVICE float bf16_high(u32 x) { return as_float(x & 0xffff0000u); }

struct Window {
  const u8* pool;
  const int* table;
  const int* sink_pages;
  i64 page_stride, row_stride, table_stride;  // the first two in bytes
  int sink_stride, width, page_size, num_sinks;
};

// Address of a token's bf16 row; 0 if it is kept nowhere.
DEVICE u64 window_row(const Window& w, int sequence, int position) {
  int number = position / w.page_size;
  int page = w.table[sequence * w.table_stride + number % w.width];
  if (page < 0) return 0;
  return (u64)w.pool + page * w.page_stride + (position - number * w.page_size) * w.row_stride;
}
// The same in the sequence's sink page.
DEVICE u64 sink_row(const Window& w, int sequence, int position) {
  if (position >= w.num_sinks) return 0;
  int page = w.sink_pages[(i64)sequence * w.sink_stride];
  return page < 0 ? 0 : (u64)w.pool + page * w.page_stride + position * w.row_stride;
}
