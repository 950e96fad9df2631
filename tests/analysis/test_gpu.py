"""Every study gives on a GPU what it gives on the CPU."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from study_layer import PROTOCOL, draw, study_layer

from quantmla.analysis import LAYER_STUDIES
from quantmla.analysis.curvature import exact_diagonal, probed_diagonal
from quantmla.analysis.linear import linearize
from quantmla.analysis.subject import StudyLayer

pytestmark = pytest.mark.gpu


def on_gpu(layer: StudyLayer) -> StudyLayer:
    return replace(layer, weights=layer.weights.to(device="cuda"))


def numbers(found: Any, name: str = "") -> dict[str, float]:
    if isinstance(found, dict):
        return {k: v for key, of in found.items() for k, v in numbers(of, f"{name}.{key}").items()}
    if isinstance(found, list):
        return {k: v for i, of in enumerate(found) for k, v in numbers(of, f"{name}.{i}").items()}
    return {name: float(found)}


@pytest.mark.parametrize("name", [n for n in LAYER_STUDIES if n != "interventions"])
def test_studies_that_draw_nothing_agree(name: str):
    measure = importlib.import_module(LAYER_STUDIES[name]).measure
    layer = study_layer()
    here = numbers(measure(layer, PROTOCOL, draw()))
    there = numbers(measure(on_gpu(layer), PROTOCOL, torch.Generator("cuda").manual_seed(0)))
    # a code on the other side of a rounding changes one number of thousands in an error
    assert {k: v for k, v in there.items() if "identity" not in k} == pytest.approx(
        {k: v for k, v in here.items() if "identity" not in k}, rel=0.02, abs=1e-3
    )


def test_interventions_are_near_their_expectation_there_too():
    measure = importlib.import_module(LAYER_STUDIES["interventions"]).measure
    many = replace(PROTOCOL, repetitions=64)
    found = measure(on_gpu(study_layer()), many, torch.Generator("cuda").manual_seed(0))
    for path in ("content", "rope"):
        for kind in ("signs", "isotropic"):
            of = found[path][kind]
            assert of["mean"] == pytest.approx(of["expected"], rel=0.1)


def test_probes_estimate_the_same_diagonal():
    layer = on_gpu(study_layer())
    at = linearize(layer.weights, next(iter(layer.points(1))), layer.softmax_scale)
    probed = probed_diagonal(at, 512, torch.Generator("cuda").manual_seed(0))
    for one, two in zip(probed, exact_diagonal(at), strict=True):
        assert float(one.sum()) == pytest.approx(float(two.sum()), rel=0.05)
