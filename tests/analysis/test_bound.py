"""The bound holds in ten thousand random cases, is tight, and is what it says."""

from dataclasses import replace

import pytest
import torch
from random_layer import GEOMETRY, normal, random_weights
from study_layer import PROTOCOL, draw, study_layer

from quantmla.analysis.bound import distortion, measure, output_bounds, summarize, value_norms
from quantmla.mla.weights import MlaWeights
from quantmla.objective import Activations

G = GEOMETRY
LAYERS, EACH, LENGTH = 100, 100, 5
ROUNDING = 1e-9  # relative; eigenvalues of small float64 matrices


def case(seed: int, sequences: int, length: int) -> tuple[MlaWeights, Activations, torch.Tensor]:
    """Scores from flat to peaked, values with and without a common part, errors of any size."""
    size = 10 ** (normal(seed, sequences, 4).clamp(-2, 2) / 2)
    lead = (sequences, length)
    x = Activations(
        normal(seed + 1, *lead, G.kv_lora_rank) + 2 * normal(seed + 2, sequences, 1, 1),
        normal(seed + 3, *lead, G.qk_rope_head_dim) * size[:, 0, None, None],
        normal(seed + 4, *lead, G.num_heads, G.qk_nope_head_dim) * size[:, 1, None, None, None],
        normal(seed + 5, *lead, G.num_heads, G.qk_rope_head_dim) * size[:, 2, None, None, None],
    )
    error = normal(seed + 6, *lead, G.qk_rope_head_dim) + normal(seed + 7, sequences, 1, 1)
    return random_weights(seed), x, error * size[:, 3, None, None]


def test_no_violation_in_ten_thousand_random_cases():
    cases = 0
    for seed in range(LAYERS):
        weights, x, error = case(1000 * seed, EACH, LENGTH)
        changed = distortion(weights, x, error, G.softmax_scale)
        bounds = output_bounds(weights, x, error, G.softmax_scale)
        assert bool((changed <= bounds.centred * (1 + ROUNDING)).all())
        assert bool((bounds.centred <= bounds.published * (1 + ROUNDING)).all())
        assert bool((changed > 0).any())
        cases += len(changed)
    assert cases == 10_000


def opposite_values(step: float) -> tuple[float, float]:
    """Distortion over each bound: two equal logits, opposite values, an error of +-step."""
    head = torch.zeros(1, 2, 4, dtype=torch.float64)
    head[0, 0, 0] = 1.0
    weights = replace(
        random_weights(0),
        norm_R=torch.ones(4, dtype=torch.float64),
        w_uk_NPR=torch.zeros_like(head),
        w_uv_NVR=head,
        w_o_DNV=torch.eye(2, dtype=torch.float64)[:, None],
    )
    latent = torch.zeros(1, 2, 4, dtype=torch.float64)
    latent[0, :, 0] = torch.tensor([1.0, -1.0])
    query = torch.zeros(1, 2, 1, 2, dtype=torch.float64)
    query[0, 1, 0, 0] = 1.0  # the first query sees one key alone: it cannot change
    error = torch.zeros(1, 2, 2, dtype=torch.float64)
    error[0, :, 0] = torch.tensor([step, -step])
    x = Activations(latent, torch.zeros_like(error), torch.zeros_like(query), query)
    changed = distortion(weights, x, error, 1.0)
    return tuple(float(changed / bound) for bound in output_bounds(weights, x, error, 1.0))


def test_the_constant_is_tight():
    for step, least in ((1e-3, 1 - 1e-5), (1.0, 0.5)):
        ratios = opposite_values(step)
        assert least < min(ratios) <= max(ratios) <= 1
    assert opposite_values(1.0)[0] < 0.99


def test_value_norms_are_spectral_norms_of_values_after_o_proj():
    weights, x, _ = case(7, 3, 6)
    latent = x.unit_latent_BSR * weights.norm_R
    for centred in (False, True):
        found = value_norms(weights, latent, centred=centred)
        for b in range(3):
            total = 0.0
            for n in range(G.num_heads):
                values = latent[b] @ weights.w_uv_NVR[n].T @ weights.w_o_DNV[:, n].T
                values = values - values.mean(0) if centred else values
                total += float(torch.linalg.matrix_norm(values, 2)) ** 2
            assert float(found[b]) == pytest.approx(total, rel=1e-10)


def test_the_score_error_is_over_visible_pairs_and_unscaled():
    weights, x, error = case(9, 2, 4)
    one, two = (output_bounds(weights, x, error, scale).published for scale in (1.0, 3.0))
    assert torch.allclose(two, 9 * one)
    changes = torch.einsum("bqne,bke->bnqk", x.q_rope_BSNE, error).tril()
    norms = value_norms(weights, x.unit_latent_BSR * weights.norm_R, centred=False)
    assert torch.allclose(one, norms * changes.square().sum((1, 2, 3)) / 4)


def test_a_layers_record_counts_every_case():
    found = measure(study_layer(), PROTOCOL, draw())
    assert found["violations"] == 0
    assert found["cases"] == 2 * 3 * PROTOCOL.draws  # bounds, bits, points
    assert 0 < found["ratio"]["r4"]["published"] <= found["ratio"]["r4"]["centred"] < 1
    total = summarize([found, found], PROTOCOL)
    assert (total["violations"], total["cases"]) == (0, 2 * found["cases"])
