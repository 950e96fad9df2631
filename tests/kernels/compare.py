"""How far a decode may be from the truth: twice as far as an eager bf16 computation is.

Both are measured against float64 over the same packed bytes, head by head.
"""

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels import reference
from quantmla.kernels.problem import DecodeQuery, Tokens
from quantmla.mla.attention import causal_mask
from quantmla.mla.partial import Partial


def oracle(query: DecodeQuery, view: CacheView) -> Partial:
    exact = DecodeQuery(query.latent_BSNR.double(), query.rope_BSNE.double(), query.softmax_scale)
    return reference.decode(exact, view)


def eager_bf16(query: DecodeQuery, view: CacheView) -> Partial:
    """Dequantise to bf16, then attention of bf16 tensors as one writes it in torch."""
    q = torch.cat((query.latent_BSNR, query.rope_BSNE), dim=-1)
    out = torch.zeros_like(query.latent_BSNR)
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
    for b, length in enumerate(view.lengths_B.tolist()):
        if length == 0:
            continue
        position = torch.arange(length, device=q.device)
        rows = reference.read_rows(Tokens(torch.full_like(position, b), position), view).to(q.dtype)
        scores = torch.einsum("snc,tc->nst", q[b], rows) * query.softmax_scale
        scores = scores.float().masked_fill(~causal_mask(q.shape[1], length, q.device), -torch.inf)
        lse[b] = torch.logsumexp(scores, dim=-1).T
        p = torch.softmax(scores, dim=-1).nan_to_num(0.0).to(q.dtype)
        out[b] = torch.einsum("nst,tr->snr", p, rows[:, : view.kv_lora_rank])
    return Partial(out, lse)


def head_errors(part: Partial, truth: Partial) -> Tensor:
    """Root mean square error of each head's output over that of the truth [N]."""
    error = (part.out_BSNR.double() - truth.out_BSNR).square().sum((0, 1, 3))
    return (error / truth.out_BSNR.square().sum((0, 1, 3)).clamp(min=1e-300)).sqrt()


def lse_error(part: Partial, truth: Partial) -> float:
    some = torch.isfinite(truth.lse_BSN)
    assert torch.equal(some, torch.isfinite(part.lse_BSN)), "not the same queries see a token"
    return float((part.lse_BSN.double() - truth.lse_BSN)[some].abs().max()) if some.any() else 0.0


def check(
    part: Partial,
    query: DecodeQuery,
    view: CacheView,
    allowance: float = 0.0,
    lse_allowance: float = 0.0,
) -> dict[str, float]:
    """Raises AssertionError, or gives the figures. Allowances are added to the bounds of the
    relative error and of the LSE's."""
    truth, eager = oracle(query, view), eager_bf16(query, view)
    assert part.out_BSNR.isfinite().all(), "output is not finite"
    empty = ~torch.isfinite(truth.lse_BSN)
    assert (part.out_BSNR[empty] == 0).all(), "a query that sees nothing must give 0"
    errors, eager_errors = head_errors(part, truth), head_errors(eager, truth)
    figures = {
        "error": float(errors.max()),
        "eager": float(eager_errors.max()),
        "lse": lse_error(part, truth),
        "eager_lse": lse_error(eager, truth),
    }
    worst = errors / (2 * eager_errors + allowance + 1e-12)
    assert (worst <= 1).all(), f"head {int(worst.argmax())} is too far off: {figures}"
    assert figures["lse"] <= 2 * figures["eager_lse"] + lse_allowance + 1e-5, (
        f"lse is too far off: {figures}"
    )
    return figures
