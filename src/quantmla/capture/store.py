"""Activations that grow batch by batch, in memory or in a file that is mapped once it is whole.

Files are written front to back under another name, flushed and renamed: a full disk ends in an
error at the write, a kill leaves nothing that looks finished.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantmla.errors import QuantMLAError
from quantmla.workdir import UNFINISHED

TENSOR = "activations"  # name of the one tensor in a file
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Shape:
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


class Rows(Protocol):
    """Takes batches of rows in order, then gives all of them as one tensor."""

    def append(self, batch: Tensor) -> None: ...

    def finish(self) -> Tensor: ...

    def discard(self) -> None:
        """Gives memory and disk back; tensors that were handed out stay readable."""


class MemoryRows:
    def __init__(self, shape: Shape) -> None:
        self._whole = torch.empty(shape.sizes, dtype=shape.dtype)
        self._filled = 0

    def append(self, batch: Tensor) -> None:
        self._whole[self._filled : self._filled + len(batch)].copy_(batch)
        self._filled += len(batch)

    def finish(self) -> Tensor:
        assert self._filled == len(self._whole)
        return self._whole

    def discard(self) -> None:
        self._whole = self._whole[:0]


class FileRows:
    """A safetensors file of one tensor."""

    def __init__(self, path: Path, shape: Shape, fingerprint: str = "") -> None:
        self._path, self._shape = path, shape
        self._partial = path.with_name(path.name + UNFINISHED)
        self._left = shape.num_bytes
        with self._writing():
            self._file: BinaryIO = self._partial.open("wb")
            self._file.write(_header(shape, fingerprint))

    def append(self, batch: Tensor) -> None:
        raw = batch.to("cpu", self._shape.dtype).contiguous().view(torch.uint8).numpy()
        with self._writing():
            self._file.write(raw.data)
        self._left -= raw.nbytes

    def finish(self) -> Tensor:
        assert self._left == 0
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.replace(self._path)
        return map_rows(self._path)

    def discard(self) -> None:
        with suppress(OSError):  # the last bytes of a file that nobody wants
            self._file.close()
        self._partial.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise QuantMLAError(
                f"cannot write activations to {self._partial}: {error.strerror}"
            ) from error


def _header(shape: Shape, fingerprint: str) -> bytes:
    entry = {
        "dtype": NAMES[shape.dtype],
        "shape": list(shape.sizes),
        "data_offsets": [0, shape.num_bytes],
    }
    raw = json.dumps({"__metadata__": {"fingerprint": fingerprint}, TENSOR: entry}).encode()
    raw += b" " * (-(8 + len(raw)) % 64)  # mapped rows start aligned
    return len(raw).to_bytes(8, "little") + raw


def map_rows(path: Path) -> Tensor:
    """The tensor of a finished file, mapped: pages are read when they are used."""
    with safe_open(path, framework="pt") as file:
        rows: Tensor = file.get_tensor(TENSOR)
    return rows


def read_fingerprint(path: Path) -> str | None:
    """What a finished file was made from; None when there is no such file or it is unreadable."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("fingerprint")
    except (OSError, SafetensorError):
        return None


def holds(path: Path, shape: Shape) -> bool:
    """Whether a finished file's tensor is of that size and dtype."""
    try:
        with safe_open(path, framework="pt") as file:
            found = file.get_slice(TENSOR)
            return (tuple(found.get_shape()), found.get_dtype()) == (
                shape.sizes,
                NAMES[shape.dtype],
            )
    except (OSError, SafetensorError):
        return False


def open_rows(shape: Shape, path: Path | None, fingerprint: str = "") -> Rows:
    """In memory when `path` is None."""
    return MemoryRows(shape) if path is None else FileRows(path, shape, fingerprint)
