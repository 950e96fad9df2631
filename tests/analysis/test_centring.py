"""Spectra of page means against loops."""

import math
from dataclasses import replace

import pytest
import torch
from random_layer import normal
from study_layer import LENGTH, PROTOCOL, draw, study_layer

from quantmla.analysis.centring import by_pair, mean_by_pair, measure, summarize


def test_energies_by_pair():
    x = normal(1, 2, 5, 6)
    found = by_pair(x)
    for pair in range(3):
        expected = sum(
            float(x[b, s, 2 * pair] ** 2 + x[b, s, 2 * pair + 1] ** 2)
            for b in range(2)
            for s in range(5)
        )
        assert float(found[pair]) == pytest.approx(expected)


def test_page_means_hold_all_of_a_constant_and_none_of_an_alternating_key():
    key = torch.ones(2, 128, 4, dtype=torch.float64)
    key[..., 2:] *= torch.tensor([1.0, -1.0]).repeat(64)[:, None]
    assert torch.allclose(mean_by_pair(key, 64), torch.tensor([2.0 * 256, 0.0]).double())
    assert float(mean_by_pair(key[:, :100], 64)[0]) == 2.0 * 128  # whole pages alone


def test_centring_helps_where_keys_have_a_bias_and_only_there():
    biased = study_layer()
    flat = replace(
        biased,
        sample=replace(biased.sample, k_rope_BSE=normal(8, *biased.sample.k_rope_BSE.shape)),
    )
    with_bias, without = (measure(layer, PROTOCOL, draw()) for layer in (biased, flat))
    for what in ("score_error", "output_error"):
        assert with_bias[what]["centred"] < 0.8 * with_bias[what]["plain"]
        assert without[what]["centred"] == pytest.approx(without[what]["plain"], rel=0.3)
    assert with_bias["page_mean_share"] > 0.5
    assert without["page_mean_share"] == pytest.approx(1 / 64, rel=0.5)
    pairs = with_bias["pairs"]
    assert all(len(values) == 8 for values in pairs.values())
    tokens = biased.sample.k_rope_BSE.square().sum() / (4 * LENGTH)
    assert sum(pairs["energy"]) == pytest.approx(float(tokens), rel=1e-5)
    found = summarize([without, with_bias], PROTOCOL)
    assert found["by_gain"] == [1, 0]
    assert found["share_gain_spearman"] == pytest.approx(1)
    ratios = [x["score_error"]["plain"] / x["score_error"]["banded"] for x in (without, with_bias)]
    assert found["score_error"]["banded"] == pytest.approx(math.sqrt(math.prod(ratios)))
