"""How far one model's next-token predictions are from another's, token by token and in sum.

S predicted tokens, U vocabulary. Divergences are in nats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_TOKENS = 256  # rows of logits that are turned into probabilities at once
FIRST_BUCKET = 64  # positions below this form the first bucket


class TokenMeasures(NamedTuple):
    """One sequence's predictions, one entry per predicted token, on the CPU."""

    nll_S: Tensor  # of the true token
    kl_S: Tensor  # KL(baseline || measured)
    same_S: Tensor  # bool: both have the same most likely token


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Over all predicted tokens; standard errors are over sequences, None for a single one."""

    tokens: int
    perplexity: float
    nll_mean: float
    nll_error: float | None
    kl_mean: float
    kl_error: float | None
    kl_p50: float
    kl_p99: float
    kl_max: float
    top1: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The same over predictions made with `first` <= tokens seen < `end`."""

    first: int
    end: int
    divergence: Divergence


def compare_logits(baseline_SU: Tensor, measured_SU: Tensor, labels_S: Tensor) -> TokenMeasures:
    """Measures of one sequence; row s of the logits predicts label s."""
    parts = []
    for start in range(0, labels_S.shape[0], CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        p = torch.log_softmax(baseline_SU[rows].float(), dim=-1)
        q = torch.log_softmax(measured_SU[rows].to(p.device).float(), dim=-1)
        nll = -q.gather(-1, labels_S[rows, None].to(p.device)).squeeze(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        parts.append((nll, kl, p.argmax(-1) == q.argmax(-1)))
    nll, kl, same = (torch.cat(x).cpu() for x in zip(*parts, strict=True))
    return TokenMeasures(nll, kl, same)


def error_of_mean(values: Sequence[Tensor]) -> float | None:
    """Standard error of the mean over sequences, a tensor of tokens each; None for a single one."""
    if len(values) < 2:
        return None
    means = torch.stack([v.double().mean() for v in values])
    return float(means.std() / math.sqrt(len(values)))


def summarize(sequences: Sequence[TokenMeasures]) -> Divergence:
    """Sums up at least one predicted token."""
    nll, kl, same = (torch.cat(x) for x in zip(*sequences, strict=True))
    ordered = kl.double().sort().values
    nll_mean = float(nll.double().mean())

    def quantile(share: float) -> float:
        return float(ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)])

    return Divergence(
        tokens=len(nll),
        perplexity=math.exp(nll_mean),
        nll_mean=nll_mean,
        nll_error=error_of_mean([s.nll_S for s in sequences]),
        kl_mean=float(ordered.mean()),
        kl_error=error_of_mean([s.kl_S for s in sequences]),
        kl_p50=quantile(0.5),
        kl_p99=quantile(0.99),
        kl_max=float(ordered[-1]),
        top1=float(same.double().mean()),
    )


def bucket_edges(length: int) -> list[tuple[int, int]]:
    """[0, 64), [64, 128), [128, 256) ... up to `length` predictions."""
    edges, first, end = [], 0, FIRST_BUCKET
    while first < length:
        edges.append((first, min(end, length)))
        first, end = end, 2 * end
    return edges


def by_context(sequences: Sequence[TokenMeasures]) -> tuple[Bucket, ...]:
    """Buckets by position in the sequence, in powers of two."""
    longest = max(len(s.nll_S) for s in sequences)
    buckets = []
    for first, end in bucket_edges(longest):
        parts = [
            TokenMeasures(*(x[first:end] for x in s)) for s in sequences if len(s.nll_S) > first
        ]
        buckets.append(Bucket(first=first, end=end, divergence=summarize(parts)))
    return tuple(buckets)
