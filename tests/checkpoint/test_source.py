import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import build, rewrite_tensors

from quantmla.checkpoint.block_fp8 import quantize_blocks
from quantmla.checkpoint.source import open_source, require_finite
from quantmla.errors import QuantMLAError

Tiny = Callable[[str], Path]
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build("youtu", tmp_path / "model")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_names_shapes_and_values_of_a_sharded_folder(folder: Path):
    source = open_source(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert source.shard_of == index
    assert len(source.shards) > 1
    assert source.config["model_type"] == "youtu"
    assert source.shape(KV_B) == (160, 64)
    assert source.dtype(KV_B) == torch.float32
    assert source.tensor(KV_B).shape == (160, 64)
    assert source.float_tensor(KV_B).dtype == torch.float64
    assert torch.equal(source.float_tensor(KV_B).float(), source.tensor(KV_B))
    with pytest.raises(QuantMLAError, match=r"has no tensor nothing"):
        source.tensor("nothing")


def test_a_single_file_needs_no_index(folder: Path, tmp_path: Path):
    single = open_source(rewrite_tensors(folder, tmp_path / "single", {}))
    assert set(single.names) == set(open_source(folder).names)
    assert {shard.name for shard in single.shards} == {"model.safetensors"}


def test_missing_shards_are_named(folder: Path):
    shards(folder)[1].unlink()
    with pytest.raises(QuantMLAError, match=r"model-00002-of-\d+\.safetensors is missing"):
        open_source(folder)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_shards_are_named(folder: Path, keep: int):
    shard = shards(folder)[1]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(QuantMLAError, match=r"model-00002-of-\d+\.safetensors is truncated"):
        open_source(folder)


def test_damaged_shards_are_named(folder: Path):
    shard = shards(folder)[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole + b"x")
    with pytest.raises(QuantMLAError, match=r"model-00001-of-\d+\.safetensors is damaged"):
        open_source(folder)
    shard.write_bytes(whole[:8] + b"?" * 20 + whole[28:])
    with pytest.raises(QuantMLAError, match="is not a safetensors file: its header cannot be read"):
        open_source(folder)


def test_index_and_shards_must_agree(folder: Path):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = shards(folder)[0].name
    path.write_text(json.dumps(index))
    with pytest.raises(
        QuantMLAError, match=r"says that model\.extra is in model-00001.*but it is not"
    ):
        open_source(folder)
    index["weight_map"]["model.extra"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(QuantMLAError, match="names a file outside the folder"):
        open_source(folder)


def test_config_must_be_a_json_object(folder: Path):
    config = folder / "config.json"
    for text, reason in (("{", "is not valid JSON"), ("[]", "holds a list, not a JSON object")):
        config.write_text(text)
        with pytest.raises(QuantMLAError, match=reason):
            open_source(folder)
    config.unlink()
    with pytest.raises(QuantMLAError, match=r"config\.json does not exist"):
        open_source(folder)


def test_other_weight_formats_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(QuantMLAError, match="holds no weights"):
        open_source(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(QuantMLAError, match=r"holds only pytorch_model\.bin"):
        open_source(tmp_path)


def test_digest_tells_models_apart(folder: Path, tmp_path: Path):
    source = open_source(folder)
    digest = source.digest()
    assert open_source(build("youtu", tmp_path / "again")).digest() == digest
    assert open_source(build("youtu", tmp_path / "other", seed=1)).digest() != digest
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    assert open_source(folder).digest() != digest


def fp8_folder(path: Path, **change: torch.Tensor | None) -> tuple[Path, torch.Tensor]:
    """One FP8 weight with block scales; `change` replaces tensors, None drops them."""
    path.mkdir()
    x = torch.randn(576, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    codes, scale = quantize_blocks(x, (128, 128))
    tensors = {"weight": codes, "weight_scale_inv": scale} | change
    save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    return path, x


def test_fp8_weights_are_read_with_their_scales(tmp_path: Path):
    folder, x = fp8_folder(tmp_path / "fp8")
    read = open_source(folder).float_tensor("weight")
    assert float((read - x).norm() / x.norm()) < 2**-4
    half = open_source(folder).float_tensor("weight", torch.float32)
    assert torch.equal(half, read.float())


def test_fp8_weights_without_block_scales_are_refused(tmp_path: Path):
    folder, _ = fp8_folder(tmp_path / "bare", weight_scale_inv=None)
    with pytest.raises(QuantMLAError, match="weight is F8_E4M3 without a tensor weight_scale_inv"):
        open_source(folder).float_tensor("weight")


def test_other_quantized_weights_are_refused(tmp_path: Path):
    folder, _ = fp8_folder(tmp_path / "int", weight=torch.zeros(576, 200, dtype=torch.uint8))
    with pytest.raises(QuantMLAError, match="weight is stored as U8"):
        open_source(folder).float_tensor("weight")


def test_finite_values_pass_and_others_are_counted():
    x = torch.ones(4)
    assert require_finite("x", x) is x
    with pytest.raises(QuantMLAError, match="x has 2 of 4 values that are NaN or infinite"):
        require_finite("x", torch.tensor([1.0, torch.nan, torch.inf, 0.0]))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": ["F32"]},
        {"shape": [1, 2, 3]},
        {"shape": "ab"},
        {"shape": [-1, -4]},
        {"shape": [10**30, 0], "data_offsets": [0, 0]},
        {"data_offsets": [5, 1]},
        {"data_offsets": [-5, 1]},
        {"data_offsets": "ab"},
    ],
)
def test_a_header_that_cannot_be_is_refused_when_opened(change, tmp_path):
    entry = {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]} | change
    raw = json.dumps({"x": entry}).encode()
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    with pytest.raises(QuantMLAError, match="its header cannot be read"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("places", "at"),
    [
        ({"x": [0, 16], "y": [0, 16]}, 16),
        ({"x": [0, 16], "y": [12, 28]}, 16),
        ({"x": [0, 16], "y": [20, 36]}, 16),
        ({"x": [4, 20]}, 0),
    ],
)
def test_tensors_that_overlap_or_leave_a_gap_are_refused_when_opened(places, at, tmp_path):
    entries = {k: {"dtype": "F32", "shape": [4], "data_offsets": v} for k, v in places.items()}
    raw = json.dumps(entries).encode()
    (tmp_path / "config.json").write_text("{}")
    size = max(end for _, end in places.values())
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(size))
    with pytest.raises(QuantMLAError, match=f"overlap or leave bytes out at {8 + len(raw) + at}$"):
        open_source(tmp_path)


def test_tensors_of_no_size_lie_between_others(tmp_path):
    save_file(
        {"a": torch.ones(3), "b": torch.ones(0), "c": torch.ones(2, 0), "d": torch.ones(1)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}")
    source = open_source(tmp_path)
    assert {name: source.tensor(name).numel() for name in source.names} == {
        "a": 3,
        "b": 0,
        "c": 0,
        "d": 1,
    }


def test_a_tensor_that_safetensors_does_not_give_is_named(tmp_path):
    """Its types are its own: what only it refuses is said with the file's name."""
    raw = json.dumps({"x": {"dtype": "Q7", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    with pytest.raises(QuantMLAError, match=r"model\.safetensors does not give x: "):
        open_source(tmp_path).tensor("x")
