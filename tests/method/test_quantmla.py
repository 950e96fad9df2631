"""Our method against rounding to nearest; its settings are free to change."""

import pytest
import torch
from synthetic_layer import synthetic_layer

from quantmla.method import quantmla
from quantmla.method.layer import held_out_errors
from quantmla.quant.format import parse_format
from quantmla.transform.layer import identity

LAYER = synthetic_layer(3)


@pytest.mark.parametrize("name", ["c4r4", "c2r4"])
def test_it_beats_rounding_to_nearest_by_far(name: str):
    """The outlier channels alone give a factor: a group's step is set by its largest channel."""
    fmt = parse_format(name, group_size=16)
    generator = torch.Generator().manual_seed(0)
    fitted = quantmla.fit(LAYER, fmt, quantmla.Options(), generator)
    rtn = held_out_errors(LAYER, identity(LAYER.weights.norm_R, 8), fmt)
    ours = held_out_errors(LAYER, fitted.transform, fmt)
    assert ours.content_output < 0.5 * rtn.content_output
    assert ours.rope_scores < rtn.rope_scores
