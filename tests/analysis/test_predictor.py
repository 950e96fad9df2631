"""The predictor on points that are made to fit it, and on some that are not."""

import math

import pytest

from quantmla.analysis.predictor import PUBLISHED_GAMMA, Point, record, with_own_gamma


def layer(index: int, gamma: float) -> list[Point]:
    found = []
    for k in range(3):
        trace, allocation = math.sin(5 * index + k), math.cos(3 * index + 2 * k)
        gain = trace + allocation + gamma
        found.append(Point(gain=gain, first_order=gain, trace=trace, allocation=allocation))
    return found


def test_gamma_comes_from_every_second_layer_and_is_judged_on_the_others():
    found = record([layer(i, 0.5) for i in range(5)])
    assert found["gamma"] == pytest.approx(0.5)
    assert (found["fitted_on"], found["judged_on"], found["points"]) == ([0, 2, 4], [1, 3], 6)
    assert found["models"]["full"]["spearman"] == pytest.approx(1)
    assert found["models"]["full"]["mean_log_error"] == pytest.approx(0, abs=1e-12)
    assert found["models"]["trace_only"]["mean_log_error"] > 0.1
    assert found["models"]["cache_error_only"]["spearman"] is None
    published = found["published_gamma"]
    assert published["points"] == 15
    assert published["models"]["full"]["median_log_error"] == pytest.approx(0.5 - PUBLISHED_GAMMA)
    assert found["first_order_spearman"] == pytest.approx(1)


def test_what_the_judged_layers_do_differently_is_an_error_and_no_fit():
    found = record([layer(i, 0.5 if i % 2 == 0 else 0.8) for i in range(4)])
    assert found["gamma"] == pytest.approx(0.5)
    assert found["models"]["full"]["median_log_error"] == pytest.approx(0.3)


def test_a_control_may_have_a_gamma_of_its_own():
    layers = [layer(i, 0.5) for i in range(5)]
    found = with_own_gamma(layers, "trace_only")
    rest = [p.gain - p.trace for i in (0, 2, 4) for p in layers[i]]
    assert found["gamma"] == pytest.approx(sum(rest) / 9)
    misses = [abs(p.trace + found["gamma"] - p.gain) for i in (1, 3) for p in layers[i]]
    assert found["models"]["trace_only"]["mean_log_error"] == pytest.approx(sum(misses) / 6)
    assert found["points"] == 6


def test_one_layer_leaves_nothing_to_judge_on():
    found = record([layer(0, 0.5)])
    assert found["gamma"] is None
    assert found["points"] == 0
    assert found["models"]["full"]["spearman"] is None
    assert found["published_gamma"]["points"] == 3


def test_points_are_logarithms_of_rope_over_content():
    of = {"finite_gain": 2.0, "gain": 3.0, "trace": 5.0, "allocation": 7.0}
    doubled = {key: 2 * value for key, value in of.items()}
    assert Point.of({"content": of, "rope": doubled}) == pytest.approx([math.log(2)] * 4)
