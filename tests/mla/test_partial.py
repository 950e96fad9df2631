"""Partials form a commutative monoid, and merging them is one softmax over all keys."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from random_layer import normal

from quantmla.mla.partial import Partial, attend, merge

EMPTY = Partial(
    torch.zeros(2, 3, 2, 5, dtype=torch.float64), torch.full((2, 3, 2), -torch.inf).double()
)
seeds = st.integers(0, 2**31)
sizes = st.lists(st.integers(0, 6), min_size=3, max_size=3)


def random_parts(seed, sizes, spread=8.0):
    """Scores and values of disjoint key sets; some keys are masked."""
    keys = sum(sizes)
    scores = spread * normal(seed, 2, 2, 3, keys)
    scores = scores.masked_fill(normal(seed + 1, 2, 2, 3, keys) > 1, -torch.inf)
    values = normal(seed + 2, 2, keys, 5)
    parts = [
        attend(s, v) for s, v in zip(scores.split(sizes, -1), values.split(sizes, 1), strict=True)
    ]
    return parts, scores, values


def assert_close(a, b):
    assert torch.isfinite(a.out_BSNR).all()
    assert torch.equal(torch.isinf(a.lse_BSN), torch.isinf(b.lse_BSN))
    seen = torch.isfinite(a.lse_BSN)
    assert (a.out_BSNR - b.out_BSNR).abs().max() <= 1e-13 * 50
    assert seen.sum() == 0 or (a.lse_BSN - b.lse_BSN)[seen].abs().max() <= 1e-12


@given(seeds, sizes)
def test_merge_is_associative_and_commutative(seed, sizes):
    (a, b, c), _, _ = random_parts(seed, sizes)
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_close(merge(a, b), merge(b, a))


@given(seeds)
def test_empty_is_the_identity(seed):
    (a, *_), _, _ = random_parts(seed, [5, 0, 0])
    assert_close(merge(a, EMPTY), a)
    assert_close(merge(EMPTY, a), a)


def test_merging_nothing_with_nothing_is_nothing():
    nothing = merge(EMPTY, EMPTY)
    assert torch.equal(nothing.out_BSNR, EMPTY.out_BSNR)
    assert torch.equal(nothing.lse_BSN, EMPTY.lse_BSN)


@given(seeds, sizes)
def test_merged_partials_are_one_softmax(seed, sizes):
    (a, b, c), scores, values = random_parts(seed, sizes)
    merged = merge(merge(a, b), c)
    p = torch.nan_to_num(torch.softmax(scores, -1), nan=0.0)  # NaN where no key is visible
    expected = torch.einsum("bnst,btr->bsnr", p, values)
    assert (merged.out_BSNR - expected).abs().max() <= 1e-12 if expected.numel() else True
    lse = torch.logsumexp(scores, -1).transpose(1, 2)
    assert_close(merged, Partial(expected, lse))


def test_large_scores_do_not_overflow():
    (a, b, _), _, _ = random_parts(7, [4, 4, 0], spread=1e5)
    assert torch.isfinite(merge(a, b).out_BSNR).all()
