"""Activation files."""

from pathlib import Path

import pytest
import torch

from quantmla.capture.store import (
    FileRows,
    MemoryRows,
    Shape,
    map_rows,
    open_rows,
    read_fingerprint,
)
from quantmla.errors import QuantMLAError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on_disk", [False, True])
def test_batches_come_back_as_one_tensor(dtype: torch.dtype, on_disk: bool, tmp_path: Path) -> None:
    whole = torch.randn(7, 3, 5).to(dtype)
    path = tmp_path / "x.safetensors"
    rows = open_rows(Shape((7, 3, 5), dtype), path if on_disk else None, "mark")
    for begin in (0, 2, 4, 6):
        rows.append(whole[begin : begin + 2])
    got = rows.finish()
    assert torch.equal(got, whole)
    assert isinstance(rows, FileRows if on_disk else MemoryRows)
    if on_disk:
        assert read_fingerprint(path) == "mark"
        assert torch.equal(map_rows(path), whole)
    rows.discard()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(got, whole)  # what was handed out stays readable


def test_nothing_looks_finished_before_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    rows = FileRows(path, Shape((4, 2), torch.float32))
    rows.append(torch.ones(2, 2))
    assert not path.exists()
    assert read_fingerprint(path) is None
    rows.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_has_no_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    assert read_fingerprint(path) is None


def test_a_full_disk_is_one_sentence() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    rows = FileRows.__new__(FileRows)
    rows._shape, rows._partial, rows._left = Shape((4, 1024), torch.float32), full, 1 << 20
    rows._file = full.open("wb", buffering=0)
    with pytest.raises(
        QuantMLAError, match=r"cannot write activations to /dev/full.*No space left"
    ):
        rows.append(torch.zeros(4, 1024))
