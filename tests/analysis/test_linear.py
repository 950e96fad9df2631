"""The derivative of attention against torch's own, in float64."""

import torch
from random_layer import GEOMETRY, normal, random_inputs, random_weights
from torch.func import jvp as autograd_jvp
from torch.func import vjp as autograd_vjp

from quantmla.analysis.linear import jvp_content, jvp_rope, linearize, vjp
from quantmla.mla.attention import attention_absorbed, causal_mask

SCALE, TOKENS = GEOMETRY.softmax_scale, 7
WEIGHTS, X = random_weights(1), random_inputs(2, TOKENS, TOKENS)
AT = linearize(WEIGHTS, X, SCALE)
TOLERANCE = 1e-12  # float64 rounding, relative to outputs of unit size


def output(latent_TR: torch.Tensor, key_TE: torch.Tensor) -> torch.Tensor:
    """The readable attention as a function of what is cached."""
    x = X._replace(latent_TR=latent_TR, k_rope_TE=key_TE)
    return attention_absorbed(WEIGHTS, x, SCALE, causal_mask(TOKENS, TOKENS))


def test_jvps_are_those_of_the_readable_attention():
    latents = normal(3, 2, *X.latent_TR.shape)
    keys = normal(4, 2, *X.k_rope_TE.shape)
    at = (X.latent_TR, X.k_rope_TE)
    for k in range(2):
        _, content = autograd_jvp(output, at, (latents[k], torch.zeros_like(keys[k])))
        _, rope = autograd_jvp(output, at, (torch.zeros_like(latents[k]), keys[k]))
        assert (jvp_content(AT, latents)[k] - content).abs().max() < TOLERANCE
        assert (jvp_rope(AT, keys)[k] - rope).abs().max() < TOLERANCE


def test_jvps_are_limits_of_finite_differences():
    latent, key = normal(5, *X.latent_TR.shape), normal(6, *X.k_rope_TE.shape)
    step = 1e-5  # central differences err by step^2, and by rounding / step
    for first_order, direction in (
        (jvp_content(AT, latent[None])[0], (latent, 0 * key)),
        (jvp_rope(AT, key[None])[0], (0 * latent, key)),
    ):
        ahead, behind = (
            output(X.latent_TR + s * step * direction[0], X.k_rope_TE + s * step * direction[1])
            for s in (1, -1)
        )
        assert ((ahead - behind) / (2 * step) - first_order).abs().max() < 1e-8


def test_vjps_are_those_of_the_readable_attention():
    cotangents = normal(7, 3, TOKENS, GEOMETRY.hidden_size)
    latents, keys = vjp(AT, cotangents)
    _, back = autograd_vjp(output, X.latent_TR, X.k_rope_TE)
    for k in range(3):
        latent, key = back(cotangents[k])
        assert (latents[k] - latent).abs().max() < TOLERANCE
        assert (keys[k] - key).abs().max() < TOLERANCE
