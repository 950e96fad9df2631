"""What learning minimises: errors of the attention output, and of positional scores.

B sequences of S tokens, causal; N heads, R latent rank, P content and E rope channels per head,
V value channels, D hidden size. All losses are normalised squared errors, dimensionless.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantmla.mla.weights import MlaWeights


class Activations(NamedTuple):
    """What one attention read, float32 on the learner's device."""

    unit_latent_BSR: Tensor
    k_rope_BSE: Tensor  # after rotation, interleaved
    q_content_BSNP: Tensor
    q_rope_BSNE: Tensor


def attention_output(weights: MlaWeights, x: Activations, softmax_scale: float) -> Tensor:
    """Causal attention in expanded form, after o_proj without its bias, [B, S, D]."""
    latent_BSR = x.unit_latent_BSR * weights.norm_R
    k_content = torch.einsum("bsr,npr->bnsp", latent_BSR, weights.w_uk_NPR)
    value_BNSV = torch.einsum("bsr,nvr->bnsv", latent_BSR, weights.w_uv_NVR)
    k_rope = x.k_rope_BSE[:, None].expand(-1, k_content.shape[1], -1, -1)
    keys = torch.cat((k_content, k_rope), dim=-1)
    queries = torch.cat((x.q_content_BSNP, x.q_rope_BSNE), dim=-1).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        queries, keys, value_BNSV, is_causal=True, scale=softmax_scale
    )
    return torch.einsum("bnsv,dnv->bsd", out, weights.w_o_DNV)


def output_loss(output_BSD: Tensor, target_BSD: Tensor) -> Tensor:
    """Normalised attention-output error; the target's mean square is clamped at 1e-8 (paper, 8)."""
    floor = 1e-8 * target_BSD.numel()
    return (output_BSD - target_BSD).square().sum() / target_BSD.square().sum().clamp(min=floor)


class OutputGram(NamedTuple):
    """Second moments, over tokens and output directions, of the output's sensitivity to a path.

    To first order, independent errors e_k in the cached rows cost sum_k e_k^T H_k e_k at the
    output; these are the mean of H_k over tokens, scaled to unit mean eigenvalue.
    """

    content_RR: Tensor  # with respect to the unit latent
    rope_EE: Tensor


def output_gram(
    weights: MlaWeights,
    x: Activations,
    softmax_scale: float,
    *,
    probes: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Sums of g g^T over tokens and Rademacher probes r, g = J^T r: unbiased for sum_k H_k.

    One forward pass, `probes` backward passes. Returns float64 [R, R] and [E, E], not scaled.
    """
    latent = x.unit_latent_BSR.detach().requires_grad_()
    k_rope = x.k_rope_BSE.detach().requires_grad_()
    with torch.enable_grad():
        output = attention_output(
            weights, x._replace(unit_latent_BSR=latent, k_rope_BSE=k_rope), softmax_scale
        )
    content = torch.zeros(latent.shape[-1], latent.shape[-1], dtype=torch.float64)
    rope = torch.zeros(k_rope.shape[-1], k_rope.shape[-1], dtype=torch.float64)
    for _ in range(probes):
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output) * 2 - 1
        g_latent, g_rope = torch.autograd.grad(
            output, (latent, k_rope), grad_outputs=signs, retain_graph=True
        )
        for total, g in ((content, g_latent), (rope, g_rope)):
            rows = g.flatten(0, 1).double()
            total += (rows.T @ rows).cpu()
    return content, rope


def unit_trace(gram_RR: Tensor) -> Tensor:
    """Scaled so that the mean eigenvalue is 1; the identity where nothing is sensitive."""
    mean = gram_RR.diagonal().mean()
    if mean <= 0:
        return torch.eye(len(gram_RR), dtype=gram_RR.dtype, device=gram_RR.device)
    return gram_RR / mean


class QueryMoments(NamedTuple):
    """Second moments of all heads' rotated queries: at each position, and from it to the end."""

    at_BSEE: Tensor
    from_BSEE: Tensor


def query_moments(q_rope_BSNE: Tensor) -> QueryMoments:
    """Sum over heads of q q^T, and its sum over all later queries (which see the key)."""
    at = torch.einsum("bsne,bsnf->bsef", q_rope_BSNE, q_rope_BSNE)
    return QueryMoments(at, at.flip(1).cumsum(1).flip(1))


def positional_energy(rows_BSE: Tensor, moments: QueryMoments, *, row_centred: bool) -> Tensor:
    """Sum over heads and causal pairs of (q . row_k)^2, in O(S E^2), exact.

    `row_centred` takes off each query's mean over the keys it sees, which the softmax cannot see.
    """
    energy = torch.einsum("bse,bsef,bsf->", rows_BSE, moments.from_BSEE, rows_BSE)
    if not row_centred:
        return energy
    sums_BSE = rows_BSE.cumsum(1)
    seen_S = torch.arange(1, rows_BSE.shape[1] + 1, device=rows_BSE.device, dtype=rows_BSE.dtype)
    squares = torch.einsum("bse,bsef,bsf->bs", sums_BSE, moments.at_BSEE, sums_BSE)
    return energy - (squares / seen_S).sum()


def positional_loss(
    error_BSE: Tensor, k_rope_BSE: Tensor, moments: QueryMoments, *, row_centred: bool
) -> Tensor:
    """Normalised error of positional scores for key errors in the model's own coordinates.

    Without centring this is the paper's loss (10), over all heads and causal pairs.
    """
    reference = positional_energy(k_rope_BSE, moments, row_centred=row_centred)
    return positional_energy(error_BSE, moments, row_centred=row_centred) / reference.clamp(
        min=1e-8
    )
