"""Measurements of the kernels on a GPU, kept in files with the environment they came from."""
