"""Bit fields: inverse of each other, and where each channel's bits stand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_layer import generator

from quantmla.errors import UsageError
from quantmla.quant.packing import pack, row_bytes, unpack


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(0, 3))
def test_unpack_is_the_inverse_of_pack(bits, seed, octets, tokens):
    codes = torch.randint(
        0, 2**bits, (tokens, 8 * octets), generator=generator(seed), dtype=torch.uint8
    )
    packed = pack(codes, bits)
    assert packed.shape == (tokens, row_bytes(8 * octets, bits))
    assert torch.equal(unpack(packed, bits), codes)


def test_four_bits_are_nibbles_low_first():
    packed = pack(torch.arange(8, dtype=torch.uint8)[None], 4)
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76]]
    assert packed.view(torch.int16)[0, 0].item() == 0x3210  # channels 0..3 in bits 0, 4, 8, 12


def test_two_bits_are_pairs_low_first():
    assert pack(torch.tensor([[0, 1, 2, 3, 3, 2, 1, 0]], dtype=torch.uint8), 2).tolist() == [
        [0b11100100, 0b00011011]
    ]


def test_three_bits_are_two_planes():
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.uint8)
    assert pack(codes, 3).tolist() == [[0b11100100, 0b11100100, 0b11110000]]


@pytest.mark.parametrize("channels", [1, 7, 12])
def test_channels_that_do_not_fill_bytes_are_refused(channels):
    with pytest.raises(UsageError, match=f"{channels} channels are not a multiple of 8"):
        pack(torch.zeros(1, channels, dtype=torch.uint8), 4)
