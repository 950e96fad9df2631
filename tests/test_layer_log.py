"""Logs of layers, to JSON and back."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from quantmla.layer_log import LayerLog, layer_line, log_from_json
from quantmla.method.layer import PathErrors

LOG = LayerLog(
    prefix="model.layers.0.self_attn",
    before=PathErrors(0.5, 0.25, 0.0),
    after=PathErrors(0.25, 0.25, 0.0),
    seconds=1.5,
    peak_bytes=2**30,
    history=(("content", 0, 0.5), ("rope", 4, 0.25)),
)


def test_a_log_comes_back():
    assert log_from_json(json.loads(json.dumps(asdict(LOG)))) == LOG


@pytest.mark.parametrize(
    ("key", "value"),
    [("before", "abc"), ("before", [1, 2]), ("after", None), ("history", ["ab"]), ("more", 1)],
)
def test_what_is_no_log_is_refused(key: str, value: Any):
    data = json.loads(json.dumps(asdict(LOG)))
    with pytest.raises((ValueError, TypeError, KeyError)):
        log_from_json(data | {key: value})


def test_a_line_has_the_change_where_there_was_an_error():
    line = layer_line(LOG, 1, 2)
    assert line.startswith("layer 1/2 model.layers.0.self_attn: content output error 5.00e-01 ->")
    assert "(-50%)" in line
    assert "rope score error 0.00e+00 -> 0.00e+00, 1.5 s, peak 1.00 GiB" in line
