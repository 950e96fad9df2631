"""Append, decode and gather over packed pages, by backend; api.py is the door."""

# In the order in which "auto" asks them. What a backend module has is said in api.py.
# "cuda" is for Hopper alone, and the faster there.
BACKENDS = {
    "cuda": "quantmla.kernels.cuda.backend",
    "triton": "quantmla.kernels.triton.backend",
    "reference": "quantmla.kernels.reference",
}
