"""The diagonal of J^T J against the whole Jacobian, in float64."""

import torch
from random_layer import GEOMETRY, random_inputs, random_weights

from quantmla.analysis.curvature import exact_diagonal, probed_diagonal
from quantmla.analysis.linear import linearize
from quantmla.mla.attention import attention_absorbed, causal_mask

SCALE, TOKENS = GEOMETRY.softmax_scale, 6
WEIGHTS, X = random_weights(11), random_inputs(12, TOKENS, TOKENS)
AT = linearize(WEIGHTS, X, SCALE)


def jacobians() -> tuple[torch.Tensor, torch.Tensor]:
    """Columns are the caches' numbers, by autograd through the readable attention."""

    def output(latent_TR: torch.Tensor, key_TE: torch.Tensor) -> torch.Tensor:
        x = X._replace(latent_TR=latent_TR, k_rope_TE=key_TE)
        return attention_absorbed(WEIGHTS, x, SCALE, causal_mask(TOKENS, TOKENS)).flatten()

    whole = torch.autograd.functional.jacobian(output, (X.latent_TR, X.k_rope_TE))
    return whole[0].flatten(1), whole[1].flatten(1)


def test_the_exact_diagonal_is_that_of_the_jacobian():
    found = exact_diagonal(AT)
    for jacobian, diagonal in zip(jacobians(), found, strict=True):
        expected = jacobian.square().sum(0)
        assert (diagonal.flatten() - expected).abs().max() < 1e-12 * expected.max()


def test_probes_are_unbiased():
    probes = 20_000
    found = probed_diagonal(AT, probes, torch.Generator().manual_seed(0))
    for jacobian, diagonal in zip(jacobians(), found, strict=True):
        expected = jacobian.square().sum(0)
        # a probe's square has a variance of at most 2 H_ii^2 (Rademacher), so six standard errors
        allowed = 6 * (2 / probes) ** 0.5 * expected
        assert bool(((diagonal.flatten() - expected).abs() <= allowed).all())


def test_probes_depend_on_the_seed_alone():
    one, two, other = (
        probed_diagonal(AT, 5, torch.Generator().manual_seed(seed)).content for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
