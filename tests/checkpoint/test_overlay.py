from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantmla.checkpoint.overlay import overlay
from quantmla.checkpoint.source import open_source

NAME = "model.layers.0.self_attn.kv_b_proj.weight"


def test_changed_tensors_are_read_and_all_others_stay(tiny_checkpoint: Callable[[str], Path]):
    source = open_source(tiny_checkpoint("youtu"))
    changed = overlay(source, {NAME: 2 * source.tensor(NAME)})
    assert changed.names == source.names
    assert torch.equal(changed.float_tensor(NAME), 2 * source.float_tensor(NAME))
    other = NAME.replace("layers.0", "layers.1")
    assert torch.equal(changed.tensor(other), source.tensor(other))


def test_shapes_and_dtypes_must_be_those_on_disk(tiny_checkpoint: Callable[[str], Path]):
    source = open_source(tiny_checkpoint("youtu"))
    with pytest.raises(AssertionError, match=NAME):
        overlay(source, {NAME: source.tensor(NAME).double()})
