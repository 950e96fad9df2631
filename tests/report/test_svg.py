import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmla.report.svg import Scale, apart, even, log_ticks, span, tick_text

finite = st.floats(1e-6, 1e6)


@given(finite, finite)
def test_ticks_are_round_and_inside(a, b):
    low, high = sorted((a, b))
    if high < low * 1.01:
        return
    found = even(low, high)
    assert 1 <= len(found) <= 7 or high - low < 1e-9
    for value in found:
        room = 1e-6 * (high - low)
        assert low - room <= value <= high + room


@given(finite, finite)
def test_log_ticks_rise_and_are_inside(a, b):
    low, high = sorted((a, b))
    if high < low * 1.01:
        return
    found = log_ticks(low, high)
    assert found == sorted(found)
    assert len(found) <= 7
    assert all(low * (1 - 1e-6) <= v <= high * (1 + 1e-6) for v in found)


def test_a_wide_range_has_powers_of_ten():
    assert log_ticks(0.5, 2000) == [1, 10, 100, 1000]


@pytest.mark.parametrize("log", [False, True])
def test_a_scale_meets_its_ends_and_keeps_order(log):
    scale = Scale(0.1, 10, 50, 350, log)
    assert scale(0.1) == 50
    assert scale(10) == 350
    assert scale(0.1) < scale(1) < scale(5)
    assert math.isclose(scale(1), 200) == log


def test_values_beyond_the_scale_stay_on_it():
    assert Scale(1, 2, 0, 100, True)(0) == 0
    assert Scale(1, 2, 0, 100)(9) == 100


@given(st.lists(st.floats(-1e3, 1e3), min_size=1))
def test_a_span_holds_all_values(values):
    low, high = span(values)
    assert low < high
    assert low <= min(values) <= max(values) <= high


def test_a_span_may_begin_at_zero():
    assert span([2.0, 4.0], zero=True)[0] == 0


def test_ticks_are_written_shortly():
    assert [tick_text(v) for v in (0, 0.001, 1e-5, 20_000, 12.5)] == [
        *("0", "0.001", "1e-5", "20k", "12.5")
    ]


@given(st.lists(st.floats(0, 200), min_size=1, max_size=10))
def test_labels_do_not_overlap_and_keep_their_order(places):
    found = apart(places, 14, 0, 200)
    order = sorted(range(len(places)), key=lambda i: places[i])
    for a, b in pairwise(order):
        assert found[b] - found[a] >= 14 - 1e-6
    assert max(found) <= 200 + 1e-6
