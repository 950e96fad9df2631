"""analysis.json as text."""

import json

from quantmla.analysis.report import as_text


def test_floats_are_short_and_each_layer_has_a_line():
    found = {"a": 1 / 3, "b": [1, None, True, 2e-9 / 3], "layers": [{"x": 2.0}, {"x": {"y": 0.1}}]}
    text = as_text(found)
    assert json.loads(text) == {
        "a": 0.33333,
        "b": [1, None, True, 6.6667e-10],
        "layers": [{"x": 2.0}, {"x": {"y": 0.1}}],
    }
    assert text.count("\n") == len(found) + 2 + len(found["layers"]) + 1
