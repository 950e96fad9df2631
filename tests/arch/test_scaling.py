"""Published values of the softmax scale."""

import pytest

from quantmla.arch.scaling import rope_parameters, softmax_scale

YARN40 = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}


def test_plain_scale():
    assert softmax_scale(192, {}) == 192**-0.5
    assert softmax_scale(192, {"rope_type": "default", "mscale_all_dim": 1.0}) == 192**-0.5
    assert softmax_scale(192, {"rope_type": "yarn", "factor": 40}) == 192**-0.5


@pytest.mark.parametrize(
    ("factor", "all_dim", "squared"), [(40, 1.0, 1.8739), (32, 1.0, 1.8133), (40, 0.707, 1.5896)]
)
def test_yarn_enters_squared(factor: float, all_dim: float, squared: float):
    rope = YARN40 | {"factor": factor, "mscale_all_dim": all_dim}
    assert softmax_scale(192, rope) * 192**0.5 == pytest.approx(squared, abs=5e-5)


def test_old_and_new_names_of_the_settings():
    assert rope_parameters({"rope_scaling": YARN40, "rope_theta": 1e4}) == YARN40
    assert rope_parameters({"rope_parameters": YARN40, "rope_scaling": None}) == YARN40
    assert rope_parameters({}) == {}
