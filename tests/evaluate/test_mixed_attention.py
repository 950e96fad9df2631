import math

import pytest
import torch

from quantmla.evaluate import mixed_attention
from quantmla.evaluate.mixed_attention import BothForms, attend
from quantmla.quant.format import parse_format
from quantmla.quant.roundtrip import read_rope

B, N, P, E, V, PAGE = 2, 3, 8, 8, 5, 16


def inputs(length: int, fmt):
    g = torch.Generator().manual_seed(length)

    def rand(*shape):
        return torch.randn(*shape, generator=g)

    rope = rand(B, length, E) + 2 * rand(E)
    read_rope_rows = read_rope(rope, fmt)

    def key(rope_rows):
        return torch.cat((rand(B, N, length, P), rope_rows[:, None].expand(-1, N, -1, -1)), dim=-1)

    forms = BothForms(
        key(rope), rand(B, N, length, V), key(read_rope_rows), rand(B, N, length, V), rope
    )
    return rand(B, N, length, P + E), forms


def by_definition(query, forms, fmt, scale):
    """Float64, one query at a time, straight from the rule of docs/flow.md."""
    out = torch.zeros(*query.shape[:3], V, dtype=torch.float64)
    for q in range(query.shape[2]):
        keys, values = [], []
        for k in range(q + 1):
            exact = fmt.recent_window is not None and (
                k < fmt.num_sink_tokens or k >= max(0, q + 1 - fmt.recent_window) // PAGE * PAGE
            )
            row = (forms.exact_key_BNTD if exact else forms.read_key_BNTD)[:, :, k].double()
            start = q // PAGE * PAGE
            if fmt.recent_window is None and k >= start:
                then = read_rope(forms.stored_rope_BTE[:, start : q + 1], fmt)[
                    :, k - start
                ].double()
                row = torch.cat((row[..., :P], then[:, None].expand(-1, N, -1)), dim=-1)
            keys.append(row)
            values.append(
                (forms.exact_value_BNTV if exact else forms.read_value_BNTV)[:, :, k].double()
            )
        scores = torch.einsum("bnd,kbnd->bnk", query[:, :, q].double(), torch.stack(keys)) * scale
        out[:, :, q] = torch.einsum("bnk,kbnv->bnv", scores.softmax(-1), torch.stack(values))
    return out


CASES = [
    parse_format("c4r4", page_size=PAGE, recent_window=16, rope_bands=1),
    parse_format("c4r4", page_size=PAGE, recent_window=21, num_sink_tokens=19, rope_bands=1),
    parse_format("c4r4", page_size=PAGE, recent_window=0, num_sink_tokens=0, rope_bands=1),
    parse_format("c4r8", page_size=PAGE).unprotected(),
    parse_format("c2r2", page_size=PAGE, rope_bands=2).unprotected(),
]


@pytest.mark.parametrize("block", [16, 40, 256])
@pytest.mark.parametrize("fmt", CASES, ids=str)
def test_agrees_with_the_definition(fmt, block, monkeypatch):
    monkeypatch.setattr(mixed_attention, "BLOCK_TOKENS", block)
    monkeypatch.setattr(mixed_attention, "SEGMENT_BLOCKS", 2)
    for length in (1, 16, 70):
        query, forms = inputs(length, fmt)
        scale = 1 / math.sqrt(P + E)
        got = attend(query, forms, fmt, scale, lambda rows: rows)
        want = by_definition(query, forms, fmt, scale)
        # float32: sums of at most 70 terms of order 1
        assert (got - want).abs().max() < 70 * 2**-23 * 10


def test_the_forms_differ_enough_for_the_test_to_fail():
    fmt = CASES[0]
    query, forms = inputs(70, fmt)
    got = attend(query, forms, fmt, 0.25, lambda rows: rows)
    swapped = BothForms(*forms[2:4], *forms[:2], forms[4])
    assert (got - attend(query, swapped, fmt, 0.25, lambda rows: rows)).abs().max() > 0.1
