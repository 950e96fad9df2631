"""Objectives against loops and Jacobians in float64."""

from dataclasses import replace

import pytest
import torch
from random_layer import GEOMETRY, normal, random_weights
from torch import Tensor

from quantmla.cache.sequence import packed_tokens
from quantmla.mla.attention import Inputs, attention_expanded, causal_mask
from quantmla.objective import (
    BLOCK,
    Activations,
    attention_output,
    mixed_output,
    output_gram,
    output_loss,
    packed_pairs,
    positional_energy,
    positional_loss,
    summarize_queries,
    unit_trace,
)
from quantmla.quant.format import CacheFormat

G = GEOMETRY
SCALE = G.softmax_scale


def activations(seed: int, sequences: int, length: int) -> Activations:
    n, lead = G.num_heads, (sequences, length)
    return Activations(
        normal(seed, *lead, G.kv_lora_rank),
        normal(seed + 1, *lead, G.qk_rope_head_dim),
        normal(seed + 2, *lead, n, G.qk_nope_head_dim),
        normal(seed + 3, *lead, n, G.qk_rope_head_dim),
    )


def naive_energy(rows_BSE: Tensor, q_BSNE: Tensor, *, row_centred: bool) -> float:
    """One score after the other."""
    total = 0.0
    for rows_SE, q_SNE in zip(rows_BSE, q_BSNE, strict=True):
        for head in range(q_SNE.shape[1]):
            for at in range(len(rows_SE)):
                scores = torch.stack([q_SNE[at, head] @ row for row in rows_SE[: at + 1]])
                if row_centred:
                    scores = scores - scores.mean()
                total += float(scores.square().sum())
    return total


@pytest.mark.parametrize("row_centred", [False, True])
@pytest.mark.parametrize("length", [1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
def test_positional_energy_is_that_of_all_causal_pairs(length: int, row_centred: bool):
    sequences = 2 if length < BLOCK else 1
    # a bias, so that the rows' means matter
    rows = normal(length, sequences, length, G.qk_rope_head_dim) + 1.0
    query = normal(length + 1, sequences, length, 2, G.qk_rope_head_dim)
    found = positional_energy(rows, summarize_queries(query), row_centred=row_centred)
    plain = naive_energy(rows, query, row_centred=False)
    # centring subtracts two large sums: float64 rounding is relative to the plain one
    assert abs(float(found) - naive_energy(rows, query, row_centred=row_centred)) <= 1e-12 * plain


def test_only_what_varies_along_a_row_counts_when_centred():
    """Equal key errors shift every score of a row alike, which the softmax cannot see."""
    rows = normal(0, 1, 1, G.qk_rope_head_dim).expand(1, 100, -1)
    queries = summarize_queries(normal(1, 1, 100, 3, G.qk_rope_head_dim))
    plain = float(positional_energy(rows, queries, row_centred=False))
    assert plain > 1
    assert abs(float(positional_energy(rows, queries, row_centred=True))) < 1e-10 * plain


@pytest.mark.parametrize("row_centred", [False, True])
def test_positional_loss_is_normalised_and_its_gradient_is_right(row_centred: bool):
    key = normal(0, 1, BLOCK + 6, 4)
    queries = summarize_queries(normal(1, 1, BLOCK + 6, 2, 4))

    def loss(error: Tensor) -> Tensor:
        return positional_loss(error, key, queries, row_centred=row_centred)

    assert float(loss(torch.zeros_like(key))) == 0
    assert float(loss(0.1 * key)) == pytest.approx(0.01)
    small = normal(2, 1, BLOCK + 6, 4).requires_grad_()
    assert torch.autograd.gradcheck(loss, (small,), fast_mode=True)
    assert float(positional_loss(key, 0 * key, queries, row_centred=row_centred)) > 1e8  # floor


def test_attention_output_is_the_readable_attention():
    weights, x = random_weights(0), activations(1, 2, 9)
    found = attention_output(weights, x, SCALE)
    for b in range(2):
        inputs = Inputs(
            x.q_content_BSNP[b],
            x.q_rope_BSNE[b],
            x.unit_latent_BSR[b] * weights.norm_R,
            x.k_rope_BSE[b],
        )
        expected = attention_expanded(weights, inputs, SCALE, causal_mask(9, 9))
        assert (found[b] - expected).abs().max() < 1e-12


def test_attention_output_with_values_wider_than_keys():
    weights, x = random_weights(0), activations(1, 1, 5)
    wide = torch.cat((weights.w_uv_NVR,) * 4, dim=1)
    four = replace(weights, w_uv_NVR=wide, w_o_DNV=torch.cat((weights.w_o_DNV,) * 4, dim=2) / 4)
    assert wide.shape[1] > G.qk_nope_head_dim + G.qk_rope_head_dim
    difference = attention_output(four, x, SCALE) - attention_output(weights, x, SCALE)
    assert difference.abs().max() < 1e-12


def test_output_loss_is_zero_at_equality_and_clamps_a_small_target():
    target = normal(0, 2, 5, 7)
    assert float(output_loss(target, target)) == 0
    assert float(output_loss(1.1 * target, target)) == pytest.approx(0.01)
    assert float(output_loss(0 * target, target)) == pytest.approx(1)
    tiny = 1e-6 * torch.ones_like(target)  # mean square 1e-12, below the floor of 1e-8
    assert float(output_loss(0 * tiny, tiny)) == pytest.approx(1e-12 / 1e-8)


@pytest.mark.parametrize("path", ["content", "rope"])
def test_gradients_of_the_output_loss(path: str):
    weights, x = random_weights(0), activations(1, 1, 6)
    target = attention_output(weights, activations(9, 1, 6), SCALE)
    name = {"content": "unit_latent_BSR", "rope": "k_rope_BSE"}[path]

    def loss(read: Tensor) -> Tensor:
        return output_loss(attention_output(weights, x._replace(**{name: read}), SCALE), target)

    assert torch.autograd.gradcheck(loss, (getattr(x, name).clone().requires_grad_(),))


def exact_gram(weights, x: Activations, name: str) -> Tensor:
    """Sum over tokens of J_k^T J_k, J_k the Jacobian of the whole output with respect to row k."""

    def output(rows: Tensor) -> Tensor:
        return attention_output(weights, x._replace(**{name: rows}), SCALE)

    jacobian = torch.autograd.functional.jacobian(output, getattr(x, name))  # [B S D, B S C]
    return torch.einsum("bsdqkc,bsdqke->ce", jacobian, jacobian)


def test_output_gram_is_the_jacobians_in_the_mean():
    """Rademacher probes: every entry within 5 standard errors of the exact one."""
    weights, x, probes = random_weights(0), activations(1, 2, 5), 2000
    draw = torch.Generator().manual_seed(0)
    seen = [output_gram(weights, x, SCALE, probes=1, generator=draw) for _ in range(probes)]
    samples = torch.stack(seen)
    error = samples.std(0) / probes**0.5
    exact = exact_gram(weights, x, "unit_latent_BSR")
    assert (samples.mean(0) - exact).abs().le(5 * error).all()
    assert error.diagonal().mean() < 0.05 * exact.diagonal().mean()  # the bound means something
    assert (samples.mean(0) - 1.5 * exact).abs().gt(5 * error).any()


def test_output_gram_sums_over_probes():
    weights, x = random_weights(0), activations(1, 1, 4)
    draws = [torch.Generator().manual_seed(3) for _ in range(2)]
    both = output_gram(weights, x, SCALE, probes=2, generator=draws[0])
    one, two = (output_gram(weights, x, SCALE, probes=1, generator=draws[1]) for _ in range(2))
    assert torch.allclose(both, one + two, rtol=1e-12)
    assert both.dtype == torch.float64


def test_unit_trace():
    matrix = normal(0, 6, 6)
    gram = matrix @ matrix.T
    scaled = unit_trace(gram)
    assert float(scaled.diagonal().mean()) == pytest.approx(1)
    assert torch.allclose(scaled * gram.diagonal().mean(), gram)
    assert torch.equal(unit_trace(torch.zeros(3, 3)), torch.eye(3))


FORMATS = [
    CacheFormat(page_size=4, num_sink_tokens=0, recent_window=0),
    CacheFormat(page_size=4, num_sink_tokens=2, recent_window=0),
    CacheFormat(page_size=2, num_sink_tokens=1, recent_window=3),
    CacheFormat(page_size=3, num_sink_tokens=7, recent_window=2),
    CacheFormat(page_size=4, num_sink_tokens=1, recent_window=64),
    CacheFormat().unprotected(),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("length", [1, 4, 5, 13])
def test_packed_pairs_are_what_the_cache_has_packed(fmt: CacheFormat, length: int):
    """Query q is decoded with q + 1 tokens cached: whole pages before the window are packed."""
    expected = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        held = query + 1
        packed = held if fmt.recent_window is None else packed_tokens(fmt, held)
        expected[query, fmt.num_sink_tokens : packed] = True
    assert torch.equal(packed_pairs(fmt, length), expected)


def test_mixed_output_reads_each_key_as_its_query_does():
    """One query at a time, with the keys that it sees put together by hand."""
    weights, x, read = random_weights(0), activations(1, 2, 9), normal(5, 2, 9, G.kv_lora_rank)
    packed = packed_pairs(FORMATS[2], 9)
    assert packed.any()
    out = mixed_output(weights, x, read, packed, SCALE)
    for query in range(9):
        latent = torch.where(packed[query][:, None], read, x.unit_latent_BSR)
        alone = attention_output(weights, x._replace(unit_latent_BSR=latent), SCALE)
        assert (out[:, query] - alone[:, query]).abs().max() < 1e-12
    assert (out - attention_output(weights, x, SCALE)).abs().max() > 1e-3  # it does matter


def test_mixed_output_of_packed_keys_alone_sees_no_later_key():
    weights, x = random_weights(0), activations(1, 2, 6)
    everything = torch.ones(6, 6, dtype=torch.bool)  # the future is not read, whatever is said
    read = normal(5, 2, 6, G.kv_lora_rank)
    plain = attention_output(weights, x._replace(unit_latent_BSR=read), SCALE)
    assert (mixed_output(weights, x, read, everything, SCALE) - plain).abs().max() < 1e-12


def test_output_gram_of_packed_pairs_is_the_jacobians_in_the_mean():
    """What is read in bf16 has no error, so sensitivity to it does not count."""
    weights, x, probes = random_weights(0), activations(1, 2, 6), 2000
    packed = packed_pairs(FORMATS[2], 6)
    draw = torch.Generator().manual_seed(0)
    seen = [
        output_gram(weights, x, SCALE, probes=1, generator=draw, packed_SS=packed)
        for _ in range(probes)
    ]

    def output(read: Tensor) -> Tensor:
        return mixed_output(weights, x, read, packed, SCALE)

    jacobian = torch.autograd.functional.jacobian(output, x.unit_latent_BSR)
    exact = torch.einsum("bsdqkc,bsdqke->ce", jacobian, jacobian)
    samples = torch.stack(seen)
    error = samples.std(0) / probes**0.5
    assert (samples.mean(0) - exact).abs().le(5 * error).all()
    everything = exact_gram(weights, x, "unit_latent_BSR")
    assert (samples.mean(0) - everything).abs().gt(5 * error).any()
