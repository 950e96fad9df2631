"""Latent attention, written to be read: what every faster version is tested against.

S query tokens, T cached tokens, N heads, R latent rank, P content head dim, E rope head dim,
V value head dim, D hidden size. One sequence; callers loop over a batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantmla.mla.weights import MlaWeights


class Inputs(NamedTuple):
    """What attention reads: queries, and the two cached paths."""

    q_content_SNP: Tensor
    q_rope_SNE: Tensor  # after rotation
    latent_TR: Tensor  # after kv_a_layernorm
    k_rope_TE: Tensor  # after rotation, shared by all heads


def causal_mask(num_queries: int, num_keys: int, device: torch.device | None = None) -> Tensor:
    """True where a key is visible; the last query sees the last key."""
    keys = torch.arange(num_keys, device=device)
    queries = torch.arange(num_queries, device=device) + num_keys - num_queries
    return keys <= queries[:, None]


def absorb_queries(weights: MlaWeights, q_content_SNP: Tensor) -> Tensor:
    """Content queries taken into latent space: q @ w_uk, shape [S, N, R]."""
    return torch.einsum("snp,npr->snr", q_content_SNP, weights.w_uk_NPR)


def scores_absorbed(weights: MlaWeights, x: Inputs, softmax_scale: float) -> Tensor:
    """Scaled scores [N, S, T], without a mask."""
    q_SNR = absorb_queries(weights, x.q_content_SNP)
    content = torch.einsum("snr,tr->nst", q_SNR, x.latent_TR)
    rope = torch.einsum("sne,te->nst", x.q_rope_SNE, x.k_rope_TE)
    return softmax_scale * (content + rope)


def probabilities(scores_NST: Tensor, mask_ST: Tensor | None) -> Tensor:
    if mask_ST is not None:
        scores_NST = scores_NST.masked_fill(~mask_ST, -torch.inf)
    return torch.softmax(scores_NST, dim=-1)


def project_out(weights: MlaWeights, latent_out_SNR: Tensor) -> Tensor:
    """Per-head latent sums through w_uv and o_proj (without its bias), [S, D]."""
    value_SNV = torch.einsum("snr,nvr->snv", latent_out_SNR, weights.w_uv_NVR)
    return torch.einsum("snv,dnv->sd", value_SNV, weights.w_o_DNV)


def attention_absorbed(
    weights: MlaWeights, x: Inputs, softmax_scale: float, mask_ST: Tensor | None = None
) -> Tensor:
    """Decode form: all heads read the latents directly. Output after o_proj, [S, D]."""
    p_NST = probabilities(scores_absorbed(weights, x, softmax_scale), mask_ST)
    return project_out(weights, torch.einsum("nst,tr->snr", p_NST, x.latent_TR))


def attention_expanded(
    weights: MlaWeights, x: Inputs, softmax_scale: float, mask_ST: Tensor | None = None
) -> Tensor:
    """Prefill form: keys and values expanded for every head. Output after o_proj, [S, D]."""
    k_TNP = torch.einsum("tr,npr->tnp", x.latent_TR, weights.w_uk_NPR)
    v_TNV = torch.einsum("tr,nvr->tnv", x.latent_TR, weights.w_uv_NVR)
    scores = torch.einsum("snp,tnp->nst", x.q_content_SNP, k_TNP)
    scores = scores + torch.einsum("sne,te->nst", x.q_rope_SNE, x.k_rope_TE)
    p_NST = probabilities(softmax_scale * scores, mask_ST)
    out_SNV = torch.einsum("nst,tnv->snv", p_NST, v_TNV)
    return torch.einsum("snv,dnv->sd", out_SNV, weights.w_o_DNV)


class ErrorSplit(NamedTuple):
    """Exact parts of a finite cache error's effect on the output, [S, D] each; they sum to it."""

    matching: Tensor  # other probabilities, true values
    aggregation: Tensor  # true probabilities, other values
    interaction: Tensor  # both


def split_error(
    weights: MlaWeights,
    x: Inputs,
    read: Inputs,
    softmax_scale: float,
    mask_ST: Tensor | None = None,
) -> ErrorSplit:
    """Splits output(read) - output(x), where `read` holds the caches as read back.

    Exact for any error in either path or both; an error in the rope path alone is all matching.
    """
    before = probabilities(scores_absorbed(weights, x, softmax_scale), mask_ST)
    after = probabilities(scores_absorbed(weights, read, softmax_scale), mask_ST)
    change_TR = read.latent_TR - x.latent_TR

    def out(p_NST: Tensor, rows_TR: Tensor) -> Tensor:
        return project_out(weights, torch.einsum("nst,tr->snr", p_NST, rows_TR))

    return ErrorSplit(
        matching=out(after - before, x.latent_TR),
        aggregation=out(before, change_TR),
        interaction=out(after - before, change_TR),
    )
