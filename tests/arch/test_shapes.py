from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import rewrite_tensors

from quantmla.arch import adapter_for
from quantmla.checkpoint.source import open_source
from quantmla.errors import UnsupportedModel


def test_tensors_must_have_the_shapes_of_the_config(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
):
    source = open_source(tiny_checkpoint("youtu"))
    name = "model.layers.0.self_attn.kv_b_proj"
    for change, reason in (
        (
            {f"{name}.weight": torch.ones(96, 64)},
            r"is \(96, 64\), but by config.json it is \(160, 64\)",
        ),
        ({f"{name}.bias": torch.ones(160)}, "kv_b_proj.bias is not handled"),
    ):
        folder = rewrite_tensors(source.path, tmp_path / str(len(reason)), change)
        broken = open_source(folder)
        adapter = adapter_for(broken.config)
        site = adapter.sites(broken.config, broken.names)[0]
        with pytest.raises(UnsupportedModel, match=reason):
            adapter.read(broken, site)
