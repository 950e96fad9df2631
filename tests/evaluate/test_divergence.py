import math

import pytest
import torch

from quantmla.evaluate import divergence
from quantmla.evaluate.divergence import (
    TokenMeasures,
    bucket_edges,
    by_context,
    compare_logits,
    summarize,
)


def logits(seed: int, tokens: int = 9, vocabulary: int = 11) -> torch.Tensor:
    return 2 * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_measures_agree_with_float64_definitions(chunk, monkeypatch):
    monkeypatch.setattr(divergence, "CHUNK_TOKENS", chunk)
    x, y, labels = logits(1), logits(2), torch.arange(9)
    got = compare_logits(x, y, labels)
    p, q = x.double().softmax(-1), y.double().softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    assert (got.kl_S - kl).abs().max() < 1e-5
    assert (got.nll_S + q[torch.arange(9), labels].log()).abs().max() < 1e-5
    assert torch.equal(got.same_S, p.argmax(-1) == q.argmax(-1))


def test_equal_logits_do_not_diverge():
    got = compare_logits(logits(1), logits(1) + 3, torch.arange(9))
    assert got.kl_S.abs().max() < 1e-5
    assert got.same_S.all()


def test_summary_of_two_sequences():
    kl = [torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([4.0, 10.0])]
    nll = [torch.full((4,), 1.0), torch.full((2,), 4.0)]
    same = [torch.tensor([True, True, True, False]), torch.tensor([False, False])]
    got = summarize([TokenMeasures(*x) for x in zip(nll, kl, same, strict=True)])
    assert got.tokens == 6
    assert got.kl_mean == pytest.approx(20 / 6)
    assert (got.kl_p50, got.kl_p99, got.kl_max) == (2.0, 10.0, 10.0)
    assert got.top1 == pytest.approx(0.5)
    assert got.perplexity == pytest.approx(math.exp(2))
    # sequence means are 1.5 and 7: their standard deviation over the root of 2
    assert got.kl_error == pytest.approx((7 - 1.5) / 2)
    assert summarize([TokenMeasures(nll[0], kl[0], same[0])]).kl_error is None


def test_p99_is_the_value_that_99_percent_do_not_exceed():
    kl = torch.arange(1, 1001).float()
    got = summarize([TokenMeasures(kl, kl[torch.randperm(1000)], kl > 0)])
    assert got.kl_p99 == 990
    assert got.kl_p50 == 500


def test_buckets_are_powers_of_two_and_cover_every_token_once():
    assert bucket_edges(64) == [(0, 64)]
    assert bucket_edges(300) == [(0, 64), (64, 128), (128, 256), (256, 300)]
    position = torch.arange(300).float()
    buckets = by_context(
        [TokenMeasures(position, position, position > 0), TokenMeasures(*[position[:100]] * 3)]
    )
    assert [b.divergence.tokens for b in buckets] == [128, 64 + 36, 128, 44]
    assert buckets[2].divergence.kl_mean == pytest.approx((128 + 255) / 2)
