"""Published values of the softmax scale."""

import pytest

from quantmla.arch.scaling import rope_parameters, softmax_scale
from quantmla.errors import UnsupportedModel

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


@pytest.mark.parametrize("key", ["factor", "mscale_all_dim"])
@pytest.mark.parametrize("value", [-1, True, "1", float("inf"), float("nan"), 10**400])
def test_numbers_that_scale_nothing_are_named(key: str, value):
    with pytest.raises(UnsupportedModel, match="both must be positive numbers"):
        softmax_scale(192, YARN40 | {key: value})


def test_a_scale_beyond_floats_is_named():
    with pytest.raises(UnsupportedModel, match=r"mscale_all_dim 1e\+300, which makes .* infinite"):
        softmax_scale(192, YARN40 | {"mscale_all_dim": 1e300})
