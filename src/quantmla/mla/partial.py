"""Partial softmax results and how they add up.

B sequences, S query tokens, N heads, R width of the value rows. Results over disjoint key sets
form a commutative monoid with identity (0, -inf): sinks, packed pages and the recent window are
three partials, merged by one function.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some of the keys; (0, -inf) is attention over none."""

    out_BSNR: Tensor  # already divided by its own denominator
    lse_BSN: Tensor  # natural log of the sum of exponentials, softmax scale included


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint key sets."""
    top = torch.maximum(a.lse_BSN, b.lse_BSN)
    top = torch.where(torch.isinf(top), torch.zeros_like(top), top)  # both empty: avoid inf - inf
    weight_a = torch.exp(a.lse_BSN - top)
    weight_b = torch.exp(b.lse_BSN - top)
    total = weight_a + weight_b
    empty = total == 0
    safe = torch.where(empty, torch.ones_like(total), total)
    out = (weight_a[..., None] * a.out_BSNR + weight_b[..., None] * b.out_BSNR) / safe[..., None]
    lse = torch.where(empty, torch.full_like(top, -torch.inf), top + torch.log(safe))
    return Partial(out, lse)


def attend(scores_BNST: Tensor, values_BTR: Tensor) -> Partial:
    """Softmax over scaled scores (-inf where masked) and the weighted sum of shared values."""
    lse_BNS = torch.logsumexp(scores_BNST, dim=-1)
    shift = torch.where(torch.isinf(lse_BNS), torch.zeros_like(lse_BNS), lse_BNS)
    weights = torch.exp(scores_BNST - shift[..., None])
    out = torch.einsum("bnst,btr->bsnr", weights, values_BTR)
    return Partial(out, lse_BNS.transpose(1, 2))
