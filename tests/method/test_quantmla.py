"""Our method against rounding to nearest; its settings are free to change."""

import pytest
import torch
from synthetic_layer import synthetic_layer
from torch import Tensor

from quantmla.method import quantmla
from quantmla.method.layer import held_out_errors
from quantmla.quant.format import CacheFormat, parse_format
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


@pytest.mark.parametrize(
    ("fmt", "same"),
    [
        (parse_format("c4r4", page_size=16, recent_window=16), False),
        (parse_format("c4r4", page_size=16, recent_window=16).unprotected(), True),
        (parse_format("c4r4"), True),  # its window holds the whole of 100 tokens
    ],
    ids=["protected", "unprotected", "too short"],
)
def test_the_gram_counts_what_is_read_packed(fmt: CacheFormat, same: bool):
    """All pairs where nothing is protected, or everything is."""

    def gram(of: CacheFormat) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        return quantmla._gram(LAYER, of, quantmla.Options(), draw)

    assert torch.equal(gram(fmt), gram(fmt.unprotected())) == same
