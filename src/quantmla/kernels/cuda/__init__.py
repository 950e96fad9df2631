"""Hopper decode kernels in CUDA C++, compiled at first use by NVRTC."""
