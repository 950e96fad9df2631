// Entry points of the emulated kernels; compiled after emulator.hpp and the kernels' own sources.
extern "C" int argument_bytes() { return (int)sizeof(Arguments); }
extern "C" int shared_bytes() { return SHARED_BYTES; }
extern "C" void run_decode(const Arguments* p, int blocks) {
  TensorMap map = {p->pages, p->page_stride, AT_ROPE / 8192};
  emulator::blocks_x = (u32)blocks;
  for (int x = 0; x < blocks; x++) {
    emulator::block_x = (u32)x;
    emulator::body = [&] { decode(*p, map); };
    emulator::run_block(THREADS);
  }
}
extern "C" void run_combine(const Arguments* p, int blocks, int threads) {
  emulator::blocks_x = (u32)blocks;
  for (int y = 0; y < (threads > 128 ? 4 : 1); y++)
    for (int x = 0; x < blocks; x++) {
      emulator::block_x = (u32)x, emulator::block_y = (u32)y;
      emulator::body = [&] { combine(*p); };
      emulator::run_block(threads);
    }
}
