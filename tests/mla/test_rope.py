"""Channel orders, and which maps commute with the rotation."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from random_layer import normal

from quantmla.mla.rope import (
    from_interleaved,
    half_to_interleaved,
    interleaved_to_half,
    rotate,
    to_interleaved,
    turn_pairs,
)

INV_FREQ = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
POSITIONS = torch.tensor([0, 1, 2, 63, 64, 4095])
seeds = st.integers(0, 2**31)


def test_orders_spelt_out():
    assert half_to_interleaved(torch.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]
    assert interleaved_to_half(torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]


@given(seeds, st.integers(0, 2))
def test_orders_are_inverse_along_any_dimension(seed, dim):
    x = normal(seed, 4, 6, 8)
    assert torch.equal(interleaved_to_half(half_to_interleaved(x, dim), dim), x)
    assert torch.equal(half_to_interleaved(interleaved_to_half(x, dim), dim), x)
    for order in ("half", "interleaved"):
        assert torch.equal(from_interleaved(to_interleaved(x, order, dim), order, dim), x)


@given(seeds)
def test_rotation_is_multiplication_of_complex_numbers(seed):
    x = normal(seed, len(POSITIONS), 8)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.exp(
        1j * POSITIONS[:, None] * INV_FREQ
    )
    expected = torch.view_as_real(turned).flatten(-2)
    assert (rotate(x, POSITIONS, INV_FREQ) - expected).abs().max() <= 1e-12


@given(seeds)
def test_turning_pairs_commutes_with_rope(seed):
    x, angle, gain = normal(seed, 6, 8), normal(seed + 1, 4), normal(seed + 2, 4).exp()
    one = rotate(turn_pairs(x, angle, gain), POSITIONS, INV_FREQ)
    other = turn_pairs(rotate(x, POSITIONS, INV_FREQ), angle, gain)
    assert (one - other).abs().max() <= 1e-12 * one.abs().max()


@given(seeds)
def test_scores_stay_when_queries_get_the_inverse_gain(seed):
    q, k = normal(seed, 6, 8), normal(seed + 3, 6, 8)
    angle, gain = normal(seed + 1, 4), normal(seed + 2, 4).exp()
    before = q @ k.T
    after = turn_pairs(q, angle, 1 / gain) @ turn_pairs(k, angle, gain).T
    assert (after - before).abs().max() <= 1e-12 * before.abs().max().clamp(min=1)


@given(seeds)
def test_a_wrong_pair_order_does_not_commute(seed):
    x = normal(seed, 6, 8)
    angle, gain = torch.tensor([0.5, 1.0, 1.5, 2.0]).double(), torch.tensor([1.0, 2, 3, 4]).double()

    def wrong(y):
        return half_to_interleaved(turn_pairs(interleaved_to_half(y), angle, gain))

    one = rotate(wrong(x), POSITIONS, INV_FREQ)
    other = wrong(rotate(x, POSITIONS, INV_FREQ))
    assert (one - other).norm() > 0.05 * one.norm()
