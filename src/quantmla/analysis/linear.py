"""Causal attention of one sequence to first order in what is cached.

K directions or probes at once; S = T tokens, N heads, R latent rank, P content and E rope channels,
V value channels, D hidden size. The caches' derivative is taken with queries and weights fixed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantmla.mla.attention import Inputs, causal_mask, probabilities
from quantmla.mla.weights import MlaWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Attention at `x`, with what its derivative needs again and again."""

    weights: MlaWeights
    x: Inputs
    softmax_scale: float
    p_NST: Tensor
    value_NTV: Tensor

    @property
    def head_out_NSV(self) -> Tensor:
        return self.p_NST @ self.value_NTV


DIRECTION_BYTES = 2**28  # of one [K, N, S, T] tensor


def at_once(at: Linear) -> int:
    """Directions or probes whose scores fit in memory together."""
    return max(1, DIRECTION_BYTES // (at.p_NST.numel() * at.p_NST.element_size()))


def linearize(weights: MlaWeights, x: Inputs, softmax_scale: float) -> Linear:
    """The expansion point; `x.latent_TR` has kv_a_layernorm's weight in it."""
    tokens = len(x.latent_TR)
    k_NTP = torch.einsum("tr,npr->ntp", x.latent_TR, weights.w_uk_NPR)
    scores = x.q_content_SNP.transpose(0, 1) @ k_NTP.mT
    scores = scores + torch.einsum("sne,te->nst", x.q_rope_SNE, x.k_rope_TE)
    mask_ST = causal_mask(tokens, tokens, scores.device)
    return Linear(
        weights=weights,
        x=x,
        softmax_scale=softmax_scale,
        p_NST=probabilities(softmax_scale * scores, mask_ST),
        value_NTV=torch.einsum("tr,nvr->ntv", x.latent_TR, weights.w_uv_NVR),
    )


def _softmax_change(p_NST: Tensor, change_KNST: Tensor) -> Tensor:
    """First order change of probabilities; the same map takes cotangents back."""
    weighted = p_NST * change_KNST
    return weighted - p_NST * weighted.sum(-1, keepdim=True)


def jvp_content(at: Linear, latent_KTR: Tensor) -> Tensor:
    """Change of the output [K, S, D] to first order in changes of the cached latents."""
    w = at.weights
    k_KNTP = torch.einsum("ktr,npr->kntp", latent_KTR, w.w_uk_NPR)
    scores = at.softmax_scale * (at.x.q_content_SNP.transpose(0, 1) @ k_KNTP.mT)
    out_KNSV = _softmax_change(at.p_NST, scores) @ at.value_NTV
    out_KNSV = out_KNSV + at.p_NST @ torch.einsum("ktr,nvr->kntv", latent_KTR, w.w_uv_NVR)
    return torch.einsum("knsv,dnv->ksd", out_KNSV, w.w_o_DNV)


def jvp_rope(at: Linear, key_KTE: Tensor) -> Tensor:
    """Change of the output [K, S, D] to first order in changes of the cached rope keys."""
    q_NSE = at.x.q_rope_SNE.transpose(0, 1)
    scores = at.softmax_scale * (q_NSE @ key_KTE.mT.unsqueeze(1))
    out_KNSV = _softmax_change(at.p_NST, scores) @ at.value_NTV
    return torch.einsum("knsv,dnv->ksd", out_KNSV, at.weights.w_o_DNV)


def vjp(at: Linear, cotangent_KSD: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of the output taken back to latents [K, T, R] and rope keys [K, T, E]."""
    w = at.weights
    out_KNSV = torch.einsum("ksd,dnv->knsv", cotangent_KSD, w.w_o_DNV)
    scores = _softmax_change(at.p_NST, out_KNSV @ at.value_NTV.mT)
    scores = at.softmax_scale * scores
    value_KNTV = at.p_NST.mT @ out_KNSV
    k_KNTP = scores.mT @ at.x.q_content_SNP.transpose(0, 1)
    latent = torch.einsum("kntv,nvr->ktr", value_KNTV, w.w_uv_NVR)
    latent = latent + torch.einsum("kntp,npr->ktr", k_KNTP, w.w_uk_NPR)
    return latent, torch.einsum("knst,sne->kte", scores, at.x.q_rope_SNE)
