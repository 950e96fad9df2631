"""The bound of docs/maths.md, section 6: an error of the rope path and the attention's output."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from random_layer import GEOMETRY, normal, random_inputs, random_weights

from quantmla.mla.attention import attention_absorbed, causal_mask, probabilities

TAU = GEOMETRY.softmax_scale


def values_squared_norm(weights, latent_TR):
    """Sum over heads of the squared spectral norm of the values with o_proj."""
    out_map_NRD = torch.einsum("nvr,dnv->nrd", weights.w_uv_NVR, weights.w_o_DNV)
    values_NTD = torch.einsum("tr,nrd->ntd", latent_TR, out_map_NRD)
    return torch.linalg.matrix_norm(values_NTD, ord=2).square().sum()


@given(st.integers(0, 2**31), st.floats(1e-4, 10.0), st.integers(1, 12))
def test_the_output_changes_by_at_most_tau_squared_over_four(seed, size, tokens):
    weights, x = random_weights(seed), random_inputs(seed + 1, tokens, tokens)
    mask = causal_mask(tokens, tokens)
    read = x._replace(k_rope_TE=x.k_rope_TE + size * normal(seed + 9, tokens, 8))
    before, after = (attention_absorbed(weights, y, TAU, mask) for y in (x, read))
    change = torch.einsum("sne,te->nst", x.q_rope_SNE, read.k_rope_TE - x.k_rope_TE)
    scores = change.masked_fill(~mask, 0).square().sum()
    bound = TAU**2 / 4 * values_squared_norm(weights, x.latent_TR) * scores
    rounding = 1e-24 * before.square().sum()  # of float64 in the two outputs
    assert (after - before).square().sum() <= bound * (1 + 1e-9) + rounding


def test_the_constant_is_tight():
    """Two keys with equal scores and opposite values reach it as the error vanishes."""
    small = 1e-4
    before = probabilities(torch.zeros(1, 1, 2, dtype=torch.float64), None)
    after = probabilities(torch.tensor([[[small, -small]]], dtype=torch.float64), None)
    values = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    change = ((after - before)[0] @ values).square().sum()
    bound = 0.25 * torch.linalg.matrix_norm(values, ord=2).square() * 2 * small**2
    assert 1 - 1e-6 < change / bound <= 1
