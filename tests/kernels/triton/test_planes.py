"""The PTX that unpacks codes, run on integers here: no interpreter runs inline assembly."""

import re

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels are written in triton")

from quantmla.kernels.triton.planes import PLANES2, PLANES4


def field(text: str, words: np.ndarray) -> tuple[np.ndarray, float]:
    """What lop3 leaves of 32-bit words that hold two 16-bit ones, as float16, and the factor."""
    shift = int(re.search(r"shr.u32 t, \$1, (\d+);", text)[1])
    mask = int(re.search(r"lop3.b32 t, t, (0x[0-9a-f]+), 0x64006400, 0xea;", text)[1], 16)
    factor = re.search(r"mov.b32 f, (0x[0-9a-f]+);", text)
    halves = ((words >> shift) & mask | 0x64006400).astype(np.uint32).view(np.float16)
    packed = (
        np.array([int(factor[1], 16)], dtype=np.uint32).view(np.float16)
        if factor
        else np.ones(2, np.float16)
    )
    assert packed[0] == packed[1]
    return halves, float(packed[0])


@pytest.mark.parametrize(("bits", "texts"), [(4, PLANES4.value), (2, PLANES2.value)])
def test_every_plane_is_its_code(bits: int, texts: tuple[str, ...]) -> None:
    words = np.random.default_rng(0).integers(0, 2**16, 512).astype(np.uint16)
    assert len(texts) == 16 // bits
    for plane, text in enumerate(texts):
        halves, factor = field(text, words.view(np.uint32))
        codes = (words >> (bits * plane)) & (2**bits - 1)
        # the kernel adds -(1024 * factor + zero point)
        assert np.array_equal(halves.astype(np.float64) * factor - 1024 * factor, codes)
        bias = 1024.0 - 1024.0 * factor  # offset_of: what it adds to -(1024 + zero point)
        assert bias == 1024.0 - 1024.0 / 2 ** (plane * bits % 8)
        assert np.float16(-1024.0 - 15) + np.float16(bias) == -(1024 * factor + 15)
