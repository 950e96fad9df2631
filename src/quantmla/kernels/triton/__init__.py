"""Portable kernels in Triton: Ampere, Hopper and later, and AMD; each also runs in the interpreter."""
