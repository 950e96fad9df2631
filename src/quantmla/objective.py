"""What learning minimises: errors of the attention output, and of positional scores.

B sequences of S tokens, causal; N heads, R latent rank, P content and E rope channels per head,
V value channels, D hidden size. All losses are normalised squared errors, dimensionless.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantmla.mla.weights import MlaWeights
from quantmla.quant.format import CacheFormat


class Activations(NamedTuple):
    """What one attention read, float32 on the learner's device."""

    unit_latent_BSR: Tensor
    k_rope_BSE: Tensor  # after rotation, interleaved
    q_content_BSNP: Tensor
    q_rope_BSNE: Tensor


def attention_output(weights: MlaWeights, x: Activations, softmax_scale: float) -> Tensor:
    """Causal attention in expanded form, after o_proj without its bias, [B, S, D]."""
    keys, values = _expand(weights, x.unit_latent_BSR, x.k_rope_BSE)
    return _attend(weights, x, (keys, values), softmax_scale, None)


def mixed_output(
    weights: MlaWeights,
    x: Activations,
    read_BSR: Tensor,
    packed_SS: Tensor,
    softmax_scale: float,
) -> Tensor:
    """`attention_output` where query q sees the latent of key k in `read_BSR` if packed_SS[q, k].

    Else it sees the exact one. Both forms stand side by side as keys, and a mask says who sees
    which.
    """
    forms = [_expand(weights, latent, x.k_rope_BSE) for latent in (x.unit_latent_BSR, read_BSR)]
    keys, values = (torch.cat(pair, dim=2) for pair in zip(*forms, strict=True))
    causal_SS = torch.ones_like(packed_SS).tril()
    seen_SK = torch.cat((causal_SS & ~packed_SS, causal_SS & packed_SS), dim=1)
    return _attend(weights, x, (keys, values), softmax_scale, seen_SK)


def packed_pairs(fmt: CacheFormat, length: int) -> Tensor:
    """Which keys each query reads packed as it is decoded, bool [query, key], on the CPU.

    The others that it sees are sinks or in its window (CacheFormat.first_recent).
    """
    key = torch.arange(length)
    first_recent = torch.tensor([fmt.first_recent(query + 1) for query in range(length)])
    old = key[None] < first_recent[:, None]
    return old & (key >= fmt.num_sink_tokens)


def _expand(
    weights: MlaWeights, unit_latent_BSR: Tensor, k_rope_BSE: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys [B, N, S, P + E] and values [B, N, S, V]."""
    latent_BSR = unit_latent_BSR * weights.norm_R
    k_content = torch.einsum("bsr,npr->bnsp", latent_BSR, weights.w_uk_NPR)
    k_rope = k_rope_BSE[:, None].expand(-1, k_content.shape[1], -1, -1)
    value_BNSV = torch.einsum("bsr,nvr->bnsv", latent_BSR, weights.w_uv_NVR)
    return torch.cat((k_content, k_rope), dim=-1), value_BNSV


def _attend(
    weights: MlaWeights,
    x: Activations,
    keys_values: tuple[Tensor, Tensor],
    softmax_scale: float,
    seen_SK: Tensor | None,
) -> Tensor:
    """Each query over the keys that it sees; None: causally over as many keys as queries."""
    keys, values = keys_values
    queries = torch.cat((x.q_content_BSNP, x.q_rope_BSNE), dim=-1).transpose(1, 2)
    # the fast CPU kernel wants values as wide as keys
    spare = max(0, keys.shape[-1] - values.shape[-1]) if keys.device.type == "cpu" else 0
    out = F.scaled_dot_product_attention(
        queries,
        keys,
        F.pad(values, (0, spare)),
        attn_mask=seen_SK,
        is_causal=seen_SK is None,
        scale=softmax_scale,
    )
    return torch.einsum("bnsv,dnv->bsd", out[..., : values.shape[-1]], weights.w_o_DNV)


def output_loss(output_BSD: Tensor, target_BSD: Tensor) -> Tensor:
    """Normalised attention-output error; the target's mean square is clamped at 1e-8 (paper, 8)."""
    floor = 1e-8 * target_BSD.numel()
    return (output_BSD - target_BSD).square().sum() / target_BSD.square().sum().clamp(min=floor)


def output_gram(
    weights: MlaWeights,
    x: Activations,
    softmax_scale: float,
    *,
    probes: int,
    generator: torch.Generator,
    packed_SS: Tensor | None = None,
) -> Tensor:
    """Second moment of the output's sensitivity to the unit latents: sum_k H_k, float64 [R, R].

    To first order, independent errors e_k of the unit latents cost sum_k e_k^T H_k e_k at the
    output. This is the sum of g g^T over tokens and Rademacher probes r, g = J^T r, which is
    unbiased. One forward pass, `probes` backward passes. With `packed_SS`, bool [query, key], an
    error is seen by those pairs alone: a query that reads a key in bf16 reads no error.
    """
    latent = x.unit_latent_BSR.detach().requires_grad_()
    with torch.enable_grad():
        if packed_SS is None:
            output = attention_output(weights, x._replace(unit_latent_BSR=latent), softmax_scale)
        else:
            output = mixed_output(weights, x, latent, packed_SS, softmax_scale)
    total_RR = torch.zeros(latent.shape[-1], latent.shape[-1], dtype=torch.float64)
    for _ in range(probes):
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output) * 2 - 1
        (g,) = torch.autograd.grad(output, latent, grad_outputs=signs, retain_graph=True)
        rows = g.flatten(0, 1).double()
        total_RR += (rows.T @ rows).cpu()
    return total_RR


def unit_trace(gram_RR: Tensor) -> Tensor:
    """Scaled so that the mean eigenvalue is 1; the identity where nothing is sensitive."""
    mean = gram_RR.diagonal().mean()
    if mean <= 0:
        return torch.eye(len(gram_RR), dtype=gram_RR.dtype, device=gram_RR.device)
    return gram_RR / mean


BLOCK = 64  # positions; scores inside a block are formed, those between blocks are not


class Queries(NamedTuple):
    """Rotated queries of whole sequences, and what keys of each block meet after it."""

    q_rope_BSNE: Tensor
    after_BJEE: Tensor  # sum of q q^T over all heads and all positions after block j


def summarize_queries(q_rope_BSNE: Tensor) -> Queries:
    """Second moments after each block of BLOCK positions; they do not depend on the transform."""
    blocks = _blocks(q_rope_BSNE)
    own_BJEE = torch.einsum("bjlne,bjlnf->bjef", blocks, blocks)
    later = own_BJEE.flip(1).cumsum(1).flip(1)
    return Queries(q_rope_BSNE, later - own_BJEE)


def _blocks(x_BS: Tensor) -> Tensor:
    """[B, S, ...] to [B, J, BLOCK, ...], zeros behind the end."""
    missing = -x_BS.shape[1] % BLOCK
    if missing:
        x_BS = torch.cat((x_BS, x_BS.new_zeros(x_BS.shape[0], missing, *x_BS.shape[2:])), dim=1)
    return x_BS.unflatten(1, (-1, BLOCK))


def positional_energy(rows_BSE: Tensor, queries: Queries, *, row_centred: bool) -> Tensor:
    """Sum over heads and causal pairs of (q . row_k)^2, exact, in O(S N E (E + BLOCK)).

    Pairs within a block are formed; for the rest sum_k row_k^T M_k row_k with M_k the queries'
    second moment after k's block. `row_centred` takes off each query's mean over the keys it
    sees, which the softmax cannot see: (q . sum of rows)^2 / number of rows.
    """
    rows = _blocks(rows_BSE)
    own_BJNQK = torch.einsum("bjqne,bjke->bjnqk", _blocks(queries.q_rope_BSNE), rows)
    energy = own_BJNQK.tril().square().sum()
    energy = energy + torch.einsum("bjke,bjef,bjkf->", rows, queries.after_BJEE, rows)
    if not row_centred:
        return energy
    seen_S = torch.arange(1, rows_BSE.shape[1] + 1, device=rows_BSE.device, dtype=rows_BSE.dtype)
    sums = torch.einsum("bsne,bse->bsn", queries.q_rope_BSNE, rows_BSE.cumsum(1))
    return energy - (sums.square().sum(-1) / seen_S).sum()


def positional_loss(
    error_BSE: Tensor, k_rope_BSE: Tensor, queries: Queries, *, row_centred: bool
) -> Tensor:
    """Normalised error of positional scores for key errors in the model's own coordinates.

    Without centring this is the paper's loss (10), over all heads and causal pairs.
    """
    with torch.no_grad():
        reference = positional_energy(k_rope_BSE, queries, row_centred=row_centred)
    error = positional_energy(error_BSE, queries, row_centred=row_centred)
    return error / reference.clamp(min=1e-8)
