import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantmla.checkpoint.block_fp8 import quantize_blocks
from quantmla.checkpoint.encode import decode, encode
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.errors import QuantMLAError


def random(seed: int) -> torch.Tensor:
    return torch.randn(160, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def source(tmp_path: Path) -> TensorSource:
    codes, scale = quantize_blocks(random(0), (128, 128), power_of_two=True)
    tensors = {"plain": random(1).bfloat16(), "fp8": codes, "fp8_scale_inv": scale}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return open_source(tmp_path)


def test_plain_tensors_are_rounded_once(source: TensorSource):
    x = random(2)
    stored = encode(source, "plain", x)
    assert list(stored) == ["plain"]
    assert torch.equal(stored["plain"], x.bfloat16())
    assert torch.equal(decode(source, "plain", stored), x.bfloat16().double())


def test_fp8_brings_its_scales_in_the_form_of_the_checkpoint(source: TensorSource):
    x = 30 * random(3)
    stored = encode(source, "fp8", x)
    assert {name: t.dtype for name, t in stored.items()} == {
        "fp8": torch.float8_e4m3fn,
        "fp8_scale_inv": torch.float32,
    }
    scale = stored["fp8_scale_inv"]
    assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)
    assert float((decode(source, "fp8", stored) - x).norm() / x.norm()) < 2**-4


def test_shapes_must_fit(source: TensorSource):
    with pytest.raises(
        QuantMLAError, match=r"plain is \(160, 64\) in the checkpoint, not \(64, 160\)"
    ):
        encode(source, "plain", random(2).T)
