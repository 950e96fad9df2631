"""Transforms: inverse of each other, exact without quantisation, and the identity."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_layer import normal

from quantmla.mla.rope import rotate
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.quant.roundtrip import read_content, read_rope
from quantmla.transform.layer import (
    ContentTransform,
    LayerTransform,
    RopeTransform,
    identity,
    read_rope_key,
    read_unit_latent,
)

FMT = CacheFormat(group_size=16)
EXACT = parse_format("c16r16")
seeds = st.integers(0, 2**31)


def random_transform(seed, online=False):
    rotation, _ = torch.linalg.qr(normal(seed, 32, 32))
    content = ContentTransform(rotation, normal(seed + 1, 32).exp())
    rope = RopeTransform(normal(seed + 2, 4), normal(seed + 3, 4).exp())
    hadamard = torch.linalg.qr(normal(seed + 4, 8, 8))[0] if online else None
    return LayerTransform(content, rope, hadamard)


@pytest.mark.parametrize("online", [False, True])
@given(seeds)
def test_without_quantisation_nothing_is_lost(online, seed):
    transform = random_transform(seed, online)
    unit, k = normal(seed + 8, 70, 32), normal(seed + 9, 70, 8)
    back = read_unit_latent(transform.content, unit, EXACT)
    assert (back - unit).abs().max() <= 1e-12 * 10
    assert (read_rope_key(transform, k, EXACT) - k).abs().max() <= 1e-12 * 10


@given(seeds)
def test_scores_of_transformed_keys_and_queries_stay_at_every_offset(seed):
    rope = random_transform(seed).rope
    q, k = normal(seed + 5, 6, 8), normal(seed + 6, 6, 8)
    freq = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    at = torch.tensor([0, 1, 5, 64, 700, 4095])
    before = rotate(q, at, freq) @ rotate(k, at, freq).T
    after = rotate(rope.apply_query(q), at, freq) @ rotate(rope.apply_key(k), at, freq).T
    assert (after - before).abs().max() <= 1e-12 * before.abs().max().clamp(min=1) * 10


@given(seeds)
def test_the_identity_reads_what_an_unchanged_model_caches(seed):
    norm = normal(seed, 32)
    start = identity(norm, 4)
    unit, k = normal(seed + 1, 70, 32), normal(seed + 2, 70, 8)
    stored = start.content.apply(unit)
    assert torch.allclose(stored, unit * norm, rtol=1e-13, atol=0)
    got = read_unit_latent(start.content, unit, FMT) * norm
    assert torch.allclose(got, read_content(stored, FMT), rtol=1e-9, atol=1e-12)
    assert torch.equal(read_rope_key(start, k, FMT), read_rope(k, FMT))
