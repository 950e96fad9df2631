"""What `inspect` says of packaged, local and unsupported models."""

import json
import struct

import pytest
from configs import DEEPSEEK_R1, KIMI_LINEAR

from quantmla.errors import QuantMLAError
from quantmla.inspection import inspect_model


def folder(path, config, tensors=("w",)):
    """A model folder with one tiny shard of BF16 tensors of 4 values."""
    header = {
        name: {"dtype": "BF16", "shape": [4], "data_offsets": [8 * i, 8 * i + 8]}
        for i, name in enumerate(tensors)
    }
    body = json.dumps(header).encode()
    data = struct.pack("<Q", len(body)) + body + bytes(8 * len(tensors))
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(data)
    return path / "model.safetensors"


def test_nano():
    found = inspect_model("nano")
    assert found.supported
    assert found.reason is None
    assert (found.layers, found.cached_layers, found.mtp_layers) == (8, 8, 0)
    assert found.rope_order == "interleaved"
    assert found.attention["kv_lora_rank"] == 128
    assert set(found.weight_bytes) == {"BF16"}
    assert json.loads(json.dumps(found.to_json()))["model"] == "nano"


def test_a_folder_with_mtp_layers_and_fp8_weights(tmp_path):
    folder(tmp_path, DEEPSEEK_R1, ("a", "b"))
    found = inspect_model(str(tmp_path))
    assert (found.mtp_layers, found.quantization, found.dtype) == (1, "fp8", "bfloat16")
    assert found.weight_bytes == {"BF16": 16}


def test_a_config_file_alone_and_its_rope_order(tmp_path):
    path = tmp_path / "config.json"
    for interleave, order in ((True, "interleaved"), (False, "half")):
        path.write_text(json.dumps({**DEEPSEEK_R1, "rope_interleave": interleave}))
        found = inspect_model(str(path))
        assert found.rope_order == order
        assert found.weight_bytes is None
    path.write_text(json.dumps(KIMI_LINEAR))
    assert inspect_model(str(path)).rope_order == "not rotated"


def test_an_unsupported_model_is_described_with_the_reason(tmp_path):
    folder(tmp_path, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    found = inspect_model(str(tmp_path))
    assert not found.supported
    assert "kv_lora_rank" in found.reason
    assert found.architecture == "LlamaForCausalLM"
    assert found.attention is None


def test_a_truncated_shard_is_named(tmp_path):
    shard = folder(tmp_path, DEEPSEEK_R1)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(QuantMLAError, match=r"model\.safetensors"):
        inspect_model(str(tmp_path))


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(QuantMLAError, match=str(tmp_path)):
        inspect_model(str(tmp_path))
