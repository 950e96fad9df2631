"""Shares of finite errors sum to the whole."""

import pytest
import torch
from random_layer import normal
from study_layer import PROTOCOL, draw, study_layer

from quantmla.analysis.split import measure, shares, summarize


def test_shares_sum_to_one_for_any_parts():
    parts = {name: normal(seed, 4, 3) for seed, name in enumerate("abc")}
    found = shares(parts, parts["a"] + parts["b"] + parts["c"])
    assert set(found) == {"a", "b", "c", "a_b", "a_c", "b_c"}
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    whole = (parts["a"] + parts["b"] + parts["c"]).square().sum()
    assert found["a_b"] == pytest.approx(float(2 * (parts["a"] * parts["b"]).sum() / whole))


def test_parts_of_every_error_sum_to_it():
    layer = study_layer()
    found = measure(layer, PROTOCOL, draw())
    for name in ("content", "rope", "both", "joint"):
        total = sum(value for key, value in found[name].items() if key != "nmse")
        assert total == pytest.approx(1, abs=1e-10)
    # without an error of the latents nothing but the probabilities changes
    assert found["rope"]["matching"] == pytest.approx(1, abs=1e-12)
    assert found["rope"]["aggregation"] == 0
    assert found["content"]["aggregation"] > 0
    assert found["both"]["nmse"] > found["content"]["nmse"]
    assert summarize([found, found], PROTOCOL) == found


def test_the_joint_error_is_the_sum_of_both_and_what_goes_beyond():
    layer = study_layer(5)
    found = measure(layer, PROTOCOL, draw())
    # INT4 errors are small: what goes beyond the sum is of second order
    assert found["joint"]["beyond"] < 0.05
    ratio = found["content"]["nmse"] / found["both"]["nmse"]
    assert found["joint"]["content"] == pytest.approx(ratio, rel=0.05)
    assert torch.isfinite(torch.tensor(list(found["joint"].values()))).all()
