"""Parts that a later run takes over: as they were written, or named."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quantmla.errors import QuantMLAError
from quantmla.kept import read_kept, tensors_of, write_kept

CONTENT = {"prefix": "a.b", "seconds": 0.1, "rows": [[1, 2.5], []], "none": None, "nan": math.nan}


@pytest.mark.parametrize("tensors", [None, b"", b"raw"])
def test_what_was_written_is_read(tensors: bytes | None, tmp_path: Path):
    path = tmp_path / "layer_0000.json"
    write_kept(path, CONTENT, tensors)
    assert json.dumps(read_kept(path)) == json.dumps(CONTENT)
    if tensors is not None:
        assert tensors_of(path).read_bytes() == tensors


def edits(whole: dict[str, Any]) -> dict[str, Any]:
    """Every value of a part replaced, left out or of another type, one at a time."""
    found: dict[str, Any] = {"nothing": None, "a list": [], "a number": 5, "no keys": {}}
    for key in whole:
        found[f"no {key}"] = {k: v for k, v in whole.items() if k != key}
        for value in (None, 5, "x", [], {}):
            found[f"{key} = {value!r}"] = whole | {key: value}
    for key, value in whole["content"].items():
        rest = {k: v for k, v in whole["content"].items() if k != key}
        found[f"content without {key}"] = whole | {"content": rest}
        found[f"content with {key} as text"] = whole | {"content": rest | {key: str(value)}}
    return found


def test_any_edit_is_named(tmp_path: Path):
    path = tmp_path / "layer_0000.json"
    write_kept(path, CONTENT, b"raw")
    whole = json.loads(path.read_text())
    for edit, changed in edits(whole).items():
        path.write_text(json.dumps(changed))
        with pytest.raises(QuantMLAError) as caught:
            print(edit, read_kept(path))
        assert str(caught.value) == (
            f"{path} is damaged or has been changed: remove this file to make it again with "
            "--resume"
        )


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
def test_what_is_no_part_is_named(text: bytes, tmp_path: Path):
    path = tmp_path / "layer_0000.json"
    path.write_bytes(text)
    with pytest.raises(QuantMLAError, match=r"layer_0000.json is damaged"):
        read_kept(path)


def test_a_part_under_another_name_or_with_other_tensors_is_named(tmp_path: Path):
    one, two = tmp_path / "layer_0000.json", tmp_path / "layer_0001.json"
    for path, tensors in ((one, b"one"), (two, b"two")):
        write_kept(path, CONTENT, tensors)
    tensors_of(one).write_bytes(b"two")
    with pytest.raises(QuantMLAError, match=r"layer_0000.json is damaged"):
        read_kept(one)
    tensors_of(one).unlink()
    with pytest.raises(QuantMLAError, match=r"layer_0000.json is damaged"):
        read_kept(one)
    one.write_bytes(two.read_bytes())
    tensors_of(one).write_bytes(b"two")
    with pytest.raises(QuantMLAError, match=r"layer_0000.json is damaged"):
        read_kept(one)
    one.unlink()
    one.mkdir()
    with pytest.raises(QuantMLAError, match=r"layer_0000.json is damaged"):
        read_kept(one)
