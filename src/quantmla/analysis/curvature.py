"""The diagonal of H = J^T J, where J is the derivative of attention's output by what is cached.

S = T tokens, N heads, R latent rank, E rope channels, V value channels, C channels of either path.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantmla.analysis.linear import Linear, at_once, vjp
from quantmla.mla.attention import absorb_queries


class Diagonal(NamedTuple):
    """H_ii of both paths, in the coordinates of the cache."""

    content: Tensor  # [T, R]
    rope: Tensor  # [T, E]


def probed_diagonal(at: Linear, probes: int, generator: torch.Generator) -> Diagonal:
    """Mean of (J^T r)^2 over Rademacher vectors r of the output: unbiased."""
    size = at.p_NST[0].shape[0] * at.weights.w_o_DNV.shape[0]
    chunk = at_once(at)
    content, rope = torch.zeros_like(at.x.latent_TR), torch.zeros_like(at.x.k_rope_TE)
    for start in range(0, probes, chunk):
        count = min(chunk, probes - start)
        bits = torch.randint(0, 2, (count, size), generator=generator, device=generator.device)
        signs = (2 * bits - 1).to(at.p_NST).unflatten(-1, (at.p_NST.shape[1], -1))
        latent_KTR, key_KTE = vjp(at, signs)
        content += latent_KTR.square().sum(0)
        rope += key_KTE.square().sum(0)
    return Diagonal(content / probes, rope / probes)


def exact_diagonal(at: Linear) -> Diagonal:
    """The diagonal itself, for the work of N (3 R + 2 V + E) / (2 V + P + E) probes.

    A key's channel j moves output row q by tau sum_h A_hqk q_hqj (v_hk - o_hq) W_O,h, a latent's
    channel also by sum_h A_hqk w_hj W_O,h. Their squared norms are sums over pairs of heads in
    which W_O,h W_O,g^T is all that is left of the hidden size.
    """
    content, rope = torch.zeros_like(at.x.latent_TR), torch.zeros_like(at.x.k_rope_TE)
    for head in range(len(at.p_NST)):
        of_content, of_rope = _head_pairs(at, head)
        content += of_content
        rope += of_rope
    return Diagonal(content, rope)


def _head_pairs(at: Linear, head: int) -> tuple[Tensor, Tensor]:
    """The parts of both diagonals that come from one head with every other."""
    w, tau = at.weights, at.softmax_scale
    out_NSV = at.head_out_NSV
    gram_NVU = torch.einsum("dv,dnu->nvu", w.w_o_DNV[:, head], w.w_o_DNV)
    both_NST = at.p_NST[head] * at.p_NST
    value_NTU, out_NSU = at.value_NTV[head] @ gram_NVU, out_NSV[head] @ gram_NVU
    # (v_hk - o_hq) W_h W_g^T (v_gk - o_gq)^T
    inner_NST = (value_NTU * at.value_NTV).sum(-1)[:, None] - out_NSU @ at.value_NTV.mT
    inner_NST = inner_NST - out_NSV @ value_NTU.mT + (out_NSU * out_NSV).sum(-1)[..., None]
    inner_NST = inner_NST * both_NST
    q_NSR = absorb_queries(w, at.x.q_content_SNP).transpose(0, 1)
    q_NSE = at.x.q_rope_SNE.transpose(0, 1)
    rope = tau**2 * (inner_NST.mT @ (q_NSE[head] * q_NSE)).sum(0)
    content = tau**2 * (inner_NST.mT @ (q_NSR[head] * q_NSR)).sum(0)
    up_NVR = w.w_uv_NVR
    crossed = (value_NTU @ up_NVR) * (both_NST.mT @ q_NSR[head])
    crossed = crossed - both_NST.mT @ (q_NSR[head] * (out_NSU @ up_NVR))
    direct_NR = torch.einsum("vr,nvu,nur->nr", up_NVR[head], gram_NVU, up_NVR)
    direct = both_NST.sum(1)[..., None] * direct_NR[:, None]
    return content + (2 * tau * crossed + direct).sum(0), rope
