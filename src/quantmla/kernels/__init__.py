"""Append, decode and gather over packed pages, by backend; api.py is the door."""

# In the order in which "auto" asks them. A backend module has why_not, decode, append and gather.
# "cuda" is the faster on Hopper; it goes first once tests/kernels/test_gpu.py has passed with its
# decode kernel as it is now.
BACKENDS = {
    "triton": "quantmla.kernels.triton.backend",
    "cuda": "quantmla.kernels.cuda.backend",
    "reference": "quantmla.kernels.reference",
}
