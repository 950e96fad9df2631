import pytest
import torch
from synthetic_layer import synthetic_layer

from quantmla.method.rope_learning import ALPHAS, RopeLearning, learn_rope
from quantmla.method.statistics import log_scales, rope_magnitudes
from quantmla.objective import positional_loss, summarize_queries
from quantmla.quant.format import CacheFormat, paper_format, parse_format
from quantmla.quant.roundtrip import read_rope
from quantmla.transform.layer import RopeTransform

LAYER = synthetic_layer()


def learn(steps: int, fmt: CacheFormat, *, row_centred: bool):
    learning = RopeLearning(
        steps=steps,
        batch_size=4,
        angle_rate=2e-2,
        gain_rate=1e-2,
        anchor=0.0,
        row_centred=row_centred,
    )
    return learn_rope(LAYER, fmt, learning, torch.Generator().manual_seed(0))


def held_out(rope: RopeTransform, fmt: CacheFormat, *, row_centred: bool) -> float:
    x = LAYER.batch(LAYER.held_out, slice(None))
    moved = RopeTransform(rope.angle_F.detach(), rope.gain_F.detach())
    read = moved.invert_key(read_rope(moved.apply_key(x.k_rope_BSE), fmt))
    queries = summarize_queries(x.q_rope_BSNE)
    error = x.k_rope_BSE - read
    return float(positional_loss(error, x.k_rope_BSE, queries, row_centred=row_centred))


@pytest.mark.parametrize("row_centred", [False, True])
@pytest.mark.parametrize("fmt", [paper_format("c4r2"), parse_format("c4r2")])
def test_learning_lowers_the_held_out_positional_loss(fmt: CacheFormat, row_centred: bool):
    rope, curve = learn(60, fmt, row_centred=row_centred)
    values = [v.held_out for v in curve]
    assert min(values) < values[0]
    found = held_out(rope, fmt, row_centred=row_centred)
    assert found == pytest.approx(min(values), rel=1e-4)
    pairs = torch.zeros_like(rope.angle_F.detach())
    plain = held_out(RopeTransform(pairs, pairs + 1), fmt, row_centred=row_centred)
    assert found < plain


def test_the_start_is_the_best_statistical_gain():
    fmt = paper_format("c4r4")
    rope, curve = learn(0, fmt, row_centred=False)
    magnitude = rope_magnitudes(LAYER.train)
    losses = []
    for alpha in ALPHAS:
        gain = log_scales(magnitude, alpha).exp()
        start = RopeTransform(torch.zeros_like(gain), gain)
        losses.append(held_out(start, fmt, row_centred=False))
    assert [v.step for v in curve] == [0]
    assert curve[0].held_out == pytest.approx(min(losses), rel=1e-5)
    best = log_scales(magnitude, ALPHAS[losses.index(min(losses))]).exp()
    assert torch.allclose(rope.gain_F, best)
    assert not rope.angle_F.any()
