"""The readable attention against an independent expansion, and the exact split of an error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_layer import GEOMETRY, normal, random_inputs, random_weights

from quantmla.mla.attention import (
    Inputs,
    attention_absorbed,
    attention_expanded,
    causal_mask,
    scores_absorbed,
    split_error,
)

TAU = GEOMETRY.softmax_scale
seeds = st.integers(0, 2**31)


def by_loops(weights, x, scale):
    """One head and one query at a time: nothing shared with the module under test."""
    queries, keys = x.q_content_SNP.shape[0], x.latent_TR.shape[0]
    out = torch.zeros(queries, weights.w_o_DNV.shape[0], dtype=torch.float64)
    for s in range(queries):
        visible = keys - queries + s + 1
        for n in range(weights.w_uk_NPR.shape[0]):
            k = x.latent_TR[:visible] @ weights.w_uk_NPR[n].T
            v = x.latent_TR[:visible] @ weights.w_uv_NVR[n].T
            score = k @ x.q_content_SNP[s, n] + x.k_rope_TE[:visible] @ x.q_rope_SNE[s, n]
            weight = torch.exp(scale * score - (scale * score).max())
            out[s] += weights.w_o_DNV[:, n] @ ((weight / weight.sum()) @ v)
    return out


@given(seeds, st.integers(1, 5), st.integers(0, 9))
def test_absorbed_equals_expanded_equals_loops(seed, queries, past):
    weights, x = random_weights(seed), random_inputs(seed + 9, queries, queries + past)
    mask = causal_mask(queries, queries + past)
    expected = by_loops(weights, x, TAU)
    bound = 1e-12 * expected.abs().max()
    assert (attention_absorbed(weights, x, TAU, mask) - expected).abs().max() <= bound
    assert (attention_expanded(weights, x, TAU, mask) - expected).abs().max() <= bound


def test_a_one_percent_change_of_the_weights_is_seen():
    weights, x = random_weights(1), random_inputs(2, 3, 7)
    weights.w_uk_NPR.mul_(1.01)
    changed = attention_absorbed(weights, x, TAU, causal_mask(3, 7))
    weights.w_uk_NPR.div_(1.01)
    expected = by_loops(weights, x, TAU)
    assert (changed - expected).norm() > 1e-4 * expected.norm()


def test_scores_have_unit_spread():
    spread = scores_absorbed(random_weights(3), random_inputs(4, 64, 64), TAU).std()
    assert 0.5 < spread < 2


def test_the_last_query_sees_the_last_key():
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True] * 4]


@given(seeds, st.floats(1e-3, 3.0))
@pytest.mark.parametrize("paths", ["content", "rope", "both"])
def test_split_error_sums_exactly(paths, seed, size):
    weights, x = random_weights(seed), random_inputs(seed + 5, 4, 11)
    latent = x.latent_TR + (size * normal(seed + 7, 11, 16) if paths != "rope" else 0)
    k_rope = x.k_rope_TE + (size * normal(seed + 8, 11, 8) if paths != "content" else 0)
    read = Inputs(x.q_content_SNP, x.q_rope_SNE, latent, k_rope)
    mask = causal_mask(4, 11)
    split = split_error(weights, x, read, TAU, mask)
    before, after = by_loops(weights, x, TAU), by_loops(weights, read, TAU)
    largest = torch.maximum(before.abs().max(), after.abs().max())
    assert (sum(split) - (after - before)).abs().max() <= 1e-12 * largest
    if paths == "rope":
        assert split.aggregation.abs().max() == 0
        assert split.interaction.abs().max() == 0
