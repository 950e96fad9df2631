"""Interventions keep the energy, and cost on average what theory says."""

import pytest
import torch
from random_layer import GEOMETRY, normal, random_inputs, random_weights
from study_layer import PROTOCOL, draw, study_layer

from quantmla.analysis.curvature import exact_diagonal
from quantmla.analysis.gain import jvp
from quantmla.analysis.interventions import KINDS, expectations, measure, summarize
from quantmla.analysis.linear import linearize

TOKENS, DRAWS = 6, 4000
AT = linearize(random_weights(21), random_inputs(22, TOKENS, TOKENS), GEOMETRY.softmax_scale)
ERRORS = {
    "content": normal(23, TOKENS, GEOMETRY.kv_lora_rank).exp(),
    "rope": normal(24, TOKENS, GEOMETRY.qk_rope_head_dim).exp(),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_energy_stays(kind: str):
    error = ERRORS["content"]
    changed = KINDS[kind](error, 5, draw())
    assert changed.shape == (5, *error.shape)
    assert torch.allclose(changed.square().sum((1, 2)), error.square().sum().expand(5))
    assert not torch.equal(changed[0], changed[1])


def test_tokens_keep_their_rows_and_signs_their_sizes():
    error = ERRORS["rope"]
    (moved,) = KINDS["tokens"](error, 1, draw())
    assert sorted(map(tuple, moved.tolist())) == sorted(map(tuple, error.tolist()))
    (flipped,) = KINDS["signs"](error, 1, draw())
    assert torch.equal(flipped.abs(), error)


@pytest.mark.parametrize("path", ["content", "rope"])
@pytest.mark.parametrize("kind", ["signs", "isotropic"])
def test_means_are_those_of_the_diagonal(path: str, kind: str):
    error = ERRORS[path]
    errors = KINDS[kind](error, DRAWS, draw(1))
    gains = jvp(AT, path, errors).square().sum((1, 2)) / error.square().sum()
    expected = expectations(getattr(exact_diagonal(AT), path), error)[kind]
    assert abs(float(gains.mean()) - expected) < 6 * float(gains.std()) / DRAWS**0.5


def test_moved_rows_cost_the_diagonals_mean_where_rows_do_not_meet():
    """Errors in one channel alone: there is no cross term within a token."""
    error = torch.zeros(TOKENS, GEOMETRY.qk_rope_head_dim, dtype=torch.float64)
    error[2, 3] = 1.5  # nor between tokens
    errors = KINDS["tokens"](error, DRAWS, draw(2))
    gains = jvp(AT, "rope", errors).square().sum((1, 2)) / error.square().sum()
    expected = expectations(exact_diagonal(AT).rope, error)["tokens"]
    assert abs(float(gains.mean()) - expected) < 6 * float(gains.std()) / DRAWS**0.5


def test_a_layers_record():
    found = measure(study_layer(), PROTOCOL, draw())
    again = measure(study_layer(), PROTOCOL, draw())
    assert found == again
    for path in ("content", "rope"):
        for kind in KINDS:
            of = found[path][kind]
            assert len(of["points"]) == PROTOCOL.draws
            assert of["interval"][0] <= of["ratio"] <= of["interval"][1]
            # independent errors hardly lean on their signs: both are near 1
            if kind == "signs":
                assert of["mean"] == pytest.approx(of["expected"], rel=0.2)
    pooled = summarize([found, found], PROTOCOL)["rope"]["isotropic"]
    assert pooled["ratio"] == pytest.approx(found["rope"]["isotropic"]["ratio"])
    assert (pooled["layers"], pooled["agree"]) == (2, 2)
