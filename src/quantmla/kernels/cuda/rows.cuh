// Where bf16 rows are: those of the window, and the sinks.

struct Row {
  u64 address;  // 0: there is none
  int token;
};

struct Window {  // of a sequence: tokens from `start` on, then the sinks
  int start, length, sinks, sink_page;
};

DEVICE Window find_window(const Arguments& p, int b) {
  Window w;
  w.length = p.lengths[(i64)b * p.lengths_stride], w.sink_page = p.sink_pages[(i64)b * p.sink_stride];
  w.sinks = w.sink_page >= 0 ? min(p.num_sinks, w.length) : 0;
  w.start = max(packed_length(p, b), w.sinks);
  return w;
}

DEVICE Row find_row(const Arguments& p, const Window& w, int b, int i) {
  int recent = w.length - w.start, token = i < recent ? w.start + i : i - recent;
  if (i >= recent + w.sinks) return Row{0, 0x7fffffff};
  i64 page = w.sink_page, within = token;
  if (i < recent) {
    page = p.window_table[b * p.window_table_stride + token / p.window_page_size % p.window_width];
    within = token % p.window_page_size;
  }
  return Row{(u64)(p.window + page * p.window_page_stride + within * p.window_row_stride), token};
}

// All rows on their way to L2, while the query is being prepared.
DEVICE void prefetch_rows(const Arguments& p, const Window& w, int b) {
  for (int i = thread_index(); i < w.length - w.start + w.sinks; i += CONSUMERS) {
    u64 row = find_row(p, w, b, i).address;
#pragma unroll
    for (int line = 0; line < (LATENT + ROPE) * 2 / 128; line++) prefetch(row + line * 128);
  }
}

// 0 is the address of a row of zeros

DEVICE u32 halves(u32 low, u32 high) {  // two bf16 in the upper 16 bits to float16
  return pack_half2(as_float(low & 0xffff0000), as_float(high & 0xffff0000));
}

DEVICE V4 global_16(u64 row, u32 channel) { return row ? *(const V4*)(row + channel * 2) : V4{0, 0, 0, 0}; }
DEVICE V2 global_8(u64 row, u32 channel) { return row ? *(const V2*)(row + channel * 2) : V2{0, 0}; }
DEVICE u32 global_4(u64 row, u32 channel) { return row ? *(const u32*)(row + channel * 2) : 0; }
