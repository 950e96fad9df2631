"""Equation 37 and the magnitudes it takes."""

import math
from dataclasses import replace

import pytest
import torch
from synthetic_layer import synthetic_sample

from quantmla.method.layer import Sample
from quantmla.method.statistics import (
    MAX_LOG_SCALE,
    MAX_ROWS,
    content_magnitudes,
    log_scales,
    rope_magnitudes,
)


def test_equation_37():
    magnitude = torch.tensor([0.5, 1.0, 3.0, 0.0])
    for alpha in (0.0, 0.125, 0.5, 1.0):
        logs = [math.log(max(float(a), 1e-8)) for a in magnitude]
        mean = sum(logs) / len(logs)
        expected = [min(2.0, max(-2.0, alpha * (mean - x))) for x in logs]
        assert log_scales(magnitude, alpha).tolist() == pytest.approx(expected, rel=1e-5)
    assert log_scales(magnitude, 1.0).abs().max() == MAX_LOG_SCALE


def test_alpha_one_makes_magnitudes_even_and_zero_leaves_them():
    magnitude = torch.tensor([0.5, 1.0, 3.0, 2.0])
    even = magnitude * log_scales(magnitude, 1.0).exp()
    assert torch.allclose(even, even.mean().expand(4))
    assert not log_scales(magnitude, 0.0).any()


def test_the_magnitude_is_the_quantile_of_absolute_values():
    sample = synthetic_sample(5, 300, 0)
    rows = sample.unit_latent_BSR.flatten(0, 1).abs()
    found = content_magnitudes(sample)
    above = (rows > found).sum(0)
    assert (above == 2).all()  # 1,500 rows: the 99.9th percentile is 1.5 from the top


def test_a_pair_shares_the_larger_of_its_channels():
    sample = synthetic_sample(2, 200, 1)
    each = content_magnitudes(replace(sample, unit_latent_BSR=sample.k_rope_BSE))
    found = rope_magnitudes(sample)
    assert found.shape == (8,)
    assert found.tolist() == [max(each[2 * i], each[2 * i + 1]) for i in range(8)]


def test_long_samples_are_thinned_below_the_limit_of_torchs_quantile():
    rows = torch.randn(1, 4 * MAX_ROWS + 3, 1, generator=torch.Generator().manual_seed(0))
    sample = Sample(rows.expand(-1, -1, 64), rows, rows, rows)
    found = content_magnitudes(sample)
    # normal: 99.9 % are within 3.29; the quantile's standard error is sqrt(q/n) / density, 0.04
    assert (found - 3.29).abs().max() < 5 * 0.04
