import pytest
import torch

from quantmla.errors import UsageError
from quantmla.transform.orthogonal import cayley, hadamard


def distance_from_orthogonal(matrix: torch.Tensor) -> float:
    eye = torch.eye(len(matrix), dtype=matrix.dtype)
    return float((matrix.T @ matrix - eye).abs().max())


@pytest.mark.parametrize("size", [1, 2, 7, 64])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_cayley_is_orthogonal(size: int, spread: float):
    draw = torch.Generator().manual_seed(size)
    free = spread * torch.randn(size, size, generator=draw, dtype=torch.float64)
    assert distance_from_orthogonal(cayley(free)) < 1e-12


def test_cayley_of_zero_or_of_any_symmetric_matrix_is_the_identity():
    eye = torch.eye(5, dtype=torch.float64)
    assert torch.equal(cayley(torch.zeros(5, 5, dtype=torch.float64)), eye)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 5, generator=draw, dtype=torch.float64)
    assert torch.equal(cayley(x + x.T), eye)


def test_cayley_turns_against_its_parameter_at_first():
    """Near 0 it is I - 2 (F - F^T): learning sees a gradient from the first step on."""
    draw = torch.Generator().manual_seed(0)
    free = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    step = 1e-6
    change = (cayley(step * free) - torch.eye(6)) / step
    assert (change + 2 * (free - free.T)).abs().max() < 1e-3
    assert torch.autograd.gradcheck(cayley, (free.requires_grad_(),))


@pytest.mark.parametrize("size", [1, 2, 16, 512])
def test_hadamard(size: int):
    matrix = hadamard(size)
    assert matrix.dtype == torch.float64
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, size**-0.5), rtol=1e-15)
    assert distance_from_orthogonal(matrix) < 1e-13
    assert (matrix[0] > 0).all()


def test_hadamard_of_sylvester():
    expected = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    assert torch.equal(2 * hadamard(4), expected.double())


@pytest.mark.parametrize("size", [0, -4, 3, 48])
def test_other_sizes_are_refused(size: int):
    with pytest.raises(UsageError, match=f"size {size} needs a power of two"):
        hadamard(size)
