from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import random_transform

from quantmla.errors import QuantMLAError
from quantmla.transform.layer import identity
from quantmla.transform.store import FILE_NAME, transforms_from_file, transforms_to_bytes


def transforms():
    online = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64)).Q
    return {
        "model.layers.0.self_attn": random_transform(24, 6, 0),
        "model.layers.10.self_attn.1": random_transform(8, 2, 1),
        "model.layers.2.self_attn": random_transform(24, 6, 2)._replace(online_rope_EE=online),
    }


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / FILE_NAME
    path.write_bytes(data)
    return path


def test_round_trip_is_exact(tmp_path: Path):
    before = transforms()
    after = transforms_from_file(write(tmp_path, transforms_to_bytes(before)))
    assert set(after) == set(before)
    for prefix, old in before.items():
        new = after[prefix]
        assert torch.equal(new.content.rotation_RR, old.content.rotation_RR)
        assert torch.equal(new.content.scale_R, old.content.scale_R)
        assert torch.equal(new.rope.angle_F, old.rope.angle_F)
        assert torch.equal(new.rope.gain_F, old.rope.gain_F)
        if old.online_rope_EE is None:
            assert new.online_rope_EE is None
        else:
            assert torch.equal(new.online_rope_EE, old.online_rope_EE)


def test_equal_transforms_give_equal_bytes():
    some = {"b": random_transform(24, 6, 0), "a": random_transform(24, 6, 1)}
    assert transforms_to_bytes(some) == transforms_to_bytes(dict(sorted(some.items())))


def test_names_and_dtype_in_the_file(tmp_path: Path):
    data = transforms_to_bytes({"x": random_transform(8, 2, 0)})
    tensors = load_file(write(tmp_path, data))
    assert sorted(tensors) == [
        "x.content.rotation",
        "x.content.scale",
        "x.rope.angle",
        "x.rope.gain",
    ]
    assert {t.dtype for t in tensors.values()} == {torch.float64}


def test_an_identity_rotation_takes_no_bytes_and_comes_back(tmp_path: Path):
    plain = identity(torch.rand(8), 2)
    tensors = load_file(write(tmp_path, transforms_to_bytes({"x": plain})))
    assert sorted(tensors) == ["x.content.scale", "x.rope.angle", "x.rope.gain"]
    found = transforms_from_file(tmp_path / FILE_NAME)["x"]
    assert torch.equal(found.content.rotation_RR, plain.content.rotation_RR)
    assert torch.equal(found.content.scale_R, plain.content.scale_R)


def test_a_smaller_file_reads_as_float64(tmp_path: Path):
    before = random_transform(24, 6, 0)
    path = write(tmp_path, transforms_to_bytes({"x": before}, torch.float32))
    assert {t.dtype for t in load_file(path).values()} == {torch.float32}
    found = transforms_from_file(path)["x"]
    assert found.content.rotation_RR.dtype == torch.float64
    assert (found.content.rotation_RR - before.content.rotation_RR).abs().max() < 2**-24


def test_other_files_are_refused(tmp_path: Path):
    with pytest.raises(QuantMLAError, match="does not exist"):
        transforms_from_file(tmp_path / FILE_NAME)
    with pytest.raises(QuantMLAError, match="is not a file of transforms"):
        transforms_from_file(write(tmp_path, b"something else"))
    save_file({"x.content.rotation": torch.eye(2)}, tmp_path / FILE_NAME)
    with pytest.raises(QuantMLAError, match=r"lacks x\.content\.scale, x\.rope\.angle"):
        transforms_from_file(tmp_path / FILE_NAME)
    save_file({"weight": torch.eye(2)}, tmp_path / FILE_NAME)
    with pytest.raises(QuantMLAError, match="holds no transforms"):
        transforms_from_file(tmp_path / FILE_NAME)


def test_values_that_are_not_finite_are_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    path.write_bytes(transforms_to_bytes({"a": random_transform(8, 2, 0)}))
    tensors = load_file(path)
    tensors["a.content.scale"][0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(QuantMLAError, match=r"NaN or infinity in a\.content\.scale"):
        transforms_from_file(path)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("content.scale", lambda x: x[:3], "tensors of a that do not fit together"),
        ("content.scale", lambda x: x[None], "tensors of a that do not fit together"),
        ("content.rotation", lambda x: x[:, :3], "tensors of a that do not fit together"),
        ("rope.gain", lambda x: x[:1], "tensors of a that do not fit together"),
        ("rope.angle", lambda x: x.to(torch.int32), r"no floating-point numbers in a\.rope\.angle"),
    ],
)
def test_tensors_of_other_sizes_or_types_are_refused(name, change, words, tmp_path):
    path = tmp_path / "t.safetensors"
    path.write_bytes(transforms_to_bytes({"a": random_transform(8, 2, 0)}))
    tensors = load_file(path)
    tensors[f"a.{name}"] = change(tensors[f"a.{name}"]).contiguous()
    save_file(tensors, path)
    with pytest.raises(QuantMLAError, match=words):
        transforms_from_file(path)
