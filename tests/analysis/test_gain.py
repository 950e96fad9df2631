"""G = T A + O against the whole of H, in float64."""

import pytest
import torch
from study_layer import PROTOCOL, draw, study_layer
from torch import Tensor

from quantmla.analysis.gain import local_error, measure, summarize
from quantmla.analysis.linear import linearize
from quantmla.analysis.subject import cached, with_cached
from quantmla.mla.attention import Inputs, attention_absorbed, causal_mask

LAYER = study_layer(3, torch.float64)
TOKENS = 9


def point() -> Inputs:
    x = next(iter(LAYER.points(1)))
    return Inputs(*(part[:TOKENS].double() for part in x))


def hessian(x: Inputs, path: str) -> Tensor:
    """J^T J by autograd through the readable attention."""

    def output(rows: Tensor) -> Tensor:
        read = with_cached(x, path, rows)
        mask = causal_mask(TOKENS, TOKENS)
        return attention_absorbed(LAYER.weights, read, LAYER.softmax_scale, mask)

    jacobian = torch.autograd.functional.jacobian(output, cached(x, path))
    jacobian = jacobian.flatten(2).flatten(0, 1)
    return jacobian.T @ jacobian


@pytest.mark.parametrize("path", ["content", "rope"])
def test_gain_is_trace_times_allocation_plus_cross_terms(path: str, monkeypatch):
    x = point()
    monkeypatch.setattr(type(LAYER), "points", lambda self, count: iter([x]))
    (found,) = measure(LAYER, PROTOCOL, draw())["points"]
    found = found[path]
    h = hessian(x, path)
    e = local_error(linearize(LAYER.weights, x, LAYER.softmax_scale), path, PROTOCOL).flatten()
    energy, diagonal = e @ e, h.diagonal()
    off = h - torch.diag(diagonal)
    assert found["gain"] == pytest.approx(float(e @ h @ e / energy), rel=1e-10)
    assert found["trace"] == pytest.approx(float(diagonal.mean()), rel=1e-10)
    assert found["allocation"] == pytest.approx(
        float(diagonal @ e.square() / energy / diagonal.mean()), rel=1e-10
    )
    assert found["cross"] == pytest.approx(float(e @ off @ e / energy), rel=1e-8, abs=1e-12)
    assert found["gain"] == pytest.approx(
        found["trace"] * found["allocation"] + found["cross"], rel=1e-12
    )
    assert found["identity_error"] < 1e-12
    # an error of 3 % of the cache is nearly, but not quite, a small one
    assert found["finite_gain"] == pytest.approx(found["gain"], rel=0.3)
    assert found["finite_gain"] != found["gain"]


def test_probes_come_close_and_say_how_close():
    from dataclasses import replace

    layer = study_layer()
    exact = measure(layer, PROTOCOL, draw())["points"]
    probed = measure(layer, replace(PROTOCOL, probes=256), draw())["points"]
    for one, two in zip(exact, probed, strict=True):
        for path in ("content", "rope"):
            assert two[path]["gain"] == one[path]["gain"]
            assert two[path]["trace"] == pytest.approx(
                one[path]["trace"] * (1 + two[path]["trace_error"]), rel=1e-5
            )
            assert 0 < abs(two[path]["trace_error"]) < 0.05
            assert abs(two[path]["allocated_error"]) < 0.05
    found = summarize([{"points": probed}, {"points": probed}], PROTOCOL)
    assert found["largest"]["trace_error"] < 0.05
    assert found["points"] == len(probed)
