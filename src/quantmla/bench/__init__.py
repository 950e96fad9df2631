"""Measurements of the kernels on a GPU; every figure ends in a file with the environment it came from."""
