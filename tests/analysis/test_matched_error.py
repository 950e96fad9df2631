"""Matched-error responses against one sequence after the other in float64."""

import pytest
import torch
from study_layer import PROTOCOL, draw, study_layer

from quantmla.analysis.matched_error import measure, summarize
from quantmla.analysis.subject import cached, quantiser_error, with_cached
from quantmla.mla.attention import attention_absorbed, causal_mask


def expected(layer, path: str) -> list[float]:
    weights, found = layer.weights.to(dtype=torch.float64), []
    for x in layer.points(99):
        error = quantiser_error(cached(x, path), path, PROTOCOL.direction_format()).double()
        x = type(x)(*(part.double() for part in x))
        rows = cached(x, path)
        error = error * (0.01 * rows.square().sum() / error.square().sum()) ** 0.5
        mask = causal_mask(len(rows), len(rows))
        before, after = (
            attention_absorbed(weights, read, layer.softmax_scale, mask)
            for read in (x, with_cached(x, path, rows + error))
        )
        found.append(float((after - before).square().sum() / before.square().sum()) / 0.01)
    return found


def test_responses_are_normalised_output_errors_over_the_caches():
    layer = study_layer()
    found = measure(layer, PROTOCOL, draw())
    for path in ("content", "rope"):
        # float32 against float64; errors are a tenth of the cache
        assert found["by_sequence"][path] == pytest.approx(expected(layer, path), rel=1e-4)
        assert found[path] == pytest.approx(sum(found["by_sequence"][path]) / 4)
    assert found["ratio"] == pytest.approx(found["rope"] / found["content"])
    assert found["interval"][0] <= found["ratio"] <= found["interval"][1]


def test_the_models_ratio_is_that_of_means_not_the_mean_of_ratios():
    layers = [
        {"ratio": 2.0, "by_sequence": {"content": [1.0] * 4, "rope": [2.0] * 4}},
        {"ratio": 1 / 3, "by_sequence": {"content": [9.0] * 4, "rope": [3.0] * 4}},
    ]
    found = summarize(layers, PROTOCOL)
    assert (found["content"], found["rope"], found["ratio"]) == (5.0, 2.5, 0.5)
    assert found["interval"] == [0.5, 0.5]
    assert found["median_layer_ratio"] == pytest.approx(7 / 6)
    assert found["sequences"] == 4
