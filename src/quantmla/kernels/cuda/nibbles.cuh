// Integers of 4 bits, read in place.

// Subnormal float16 numbers: n 2^-24 of lower nibbles, and (n + 16 m) 2^-24 of whole bytes. A byte stands for
// its upper nibble m: that saves a mask, and n is taken off the output once.
DEVICE void mask_nibbles(u32 x, u32& n0, u32& byte0, u32& n2, u32& byte1) {
  n0 = x & 0x000f000f, byte0 = x & 0x00ff00ff;
  byte1 = permute(x, 0, 0x4341), n2 = byte1 & 0x000f000f;
}
