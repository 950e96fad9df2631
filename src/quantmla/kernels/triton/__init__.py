"""Portable kernels in Triton: NVIDIA from Ampere on, and AMD; all run in the interpreter too."""
