"""Moving and converting a layer's weights; widths of its inputs."""

from dataclasses import fields, replace

import torch
from random_layer import GEOMETRY, random_weights


def test_to_converts_every_tensor_and_keeps_missing_biases():
    weights = replace(random_weights(0), b_dkv_R=torch.ones(16, dtype=torch.float64))
    moved = weights.to(dtype=torch.float32)
    for field in fields(weights):
        before, after = getattr(weights, field.name), getattr(moved, field.name)
        assert (before is None) == (after is None), field.name
        if before is not None:
            assert after.dtype == torch.float32
            assert torch.equal(after, before.float())


def test_query_width_is_the_query_rank_or_the_hidden_size():
    assert GEOMETRY.query_width == 24
    assert replace(GEOMETRY, q_lora_rank=10).query_width == 10
