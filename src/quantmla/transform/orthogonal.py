"""Orthogonal matrices: free parameters by the Cayley map, and the Hadamard matrix."""

import math

import torch
from torch import Tensor

from quantmla.errors import UsageError, require


def cayley(free_RR: Tensor) -> Tensor:
    """(I + A)^-1 (I - A) with A = free - free^T: orthogonal, and the identity at 0."""
    skew = free_RR - free_RR.T
    eye = torch.eye(len(skew), dtype=skew.dtype, device=skew.device)
    return torch.linalg.solve(eye + skew, eye - skew)


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix scaled to be orthogonal, float64."""
    require(
        size >= 1 and size & (size - 1) == 0,
        f"a Hadamard matrix of size {size} needs a power of two",
        UsageError,
    )
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix / math.sqrt(size)
