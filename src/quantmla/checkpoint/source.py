"""A checkpoint folder, checked when opened and read one tensor at a time."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantmla.checkpoint.block_fp8 import SCALE_SUFFIX, dequantize_blocks
from quantmla.checkpoint.locate import locate, model_config, read_json
from quantmla.errors import QuantMLAError, one_line, require

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
MOST = 2**63  # that a size or an offset stays below
METADATA = "__metadata__"  # the one key of a header that is no tensor
SAMPLE_BYTES = 65536  # of a shard's first and last data that enter the digest

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Entry(NamedTuple):
    """One tensor in a shard; begin and end are byte offsets from the start of the file."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Shard(NamedTuple):
    name: str
    header: bytes  # length field included: everything before the first tensor
    size: int  # bytes of the whole file


@dataclass(frozen=True)
class TensorSource:
    """What a model's folder holds. Nothing is kept in memory but the headers."""

    path: Path
    config: Mapping[str, Any]  # config.json
    shards: tuple[Shard, ...]
    entries: Mapping[str, Entry] = field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names, in the order of the files."""
        return tuple(self.entries)

    @property
    def shard_of(self) -> Mapping[str, str]:
        """File name of each tensor."""
        return {name: entry.shard for name, entry in self.entries.items()}

    def entry(self, name: str) -> Entry:
        require(name in self.entries, f"{self.path} has no tensor {name}")
        return self.entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        stored = self.entry(name).dtype
        require(stored in DTYPES, f"{name} is stored as {stored}; known: {sorted(DTYPES)}")
        return DTYPES[stored]

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored."""
        file = self.path / self.entry(name).shard
        try:
            with safe_open(file, framework="pt") as shard:
                return shard.get_tensor(name)
        except SafetensorError as error:
            raise QuantMLAError(f"{file} does not give {name}: {one_line(error)}") from error

    def scale_name(self, name: str) -> str | None:
        """Name of the block scales of an FP8 weight; None for what is not FP8."""
        if self.dtype(name) not in (torch.float8_e4m3fn, torch.float8_e5m2):
            return None
        scale = name + SCALE_SUFFIX
        require(
            self.dtype(name) == torch.float8_e4m3fn and scale in self.entries,
            f"{name} is {self.entries[name].dtype} without a tensor {scale}: "
            "of FP8 checkpoints, only e4m3 with block scales is read",
        )
        return scale

    def float_tensor(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        """The tensor's values; block FP8 is multiplied by its scales."""
        scale = self.scale_name(name)
        if scale is not None:
            return dequantize_blocks(self.tensor(name), self.tensor(scale), self.fp8_block).to(
                dtype
            )
        require(
            self.dtype(name).is_floating_point,
            f"{name} is stored as {self.entries[name].dtype}: "
            "of quantized weights, only block FP8 is read",
        )
        return self.tensor(name).to(dtype)

    @property
    def fp8_block(self) -> tuple[int, int]:
        """Rows and columns of an FP8 scale block."""
        block = (self.config.get("quantization_config") or {}).get("weight_block_size") or (
            128,
            128,
        )
        return int(block[0]), int(block[1])

    def digest(self) -> str:
        """Hex SHA-256 that tells this model from others without reading all of it.

        Covers config.json, each shard's name, size and header, and the first and last 64 KiB of its
        data. A change in the middle of a shard that touches neither goes unseen.
        """
        sha = hashlib.sha256((self.path / "config.json").read_bytes())
        for shard in self.shards:
            sha.update(f"\0{shard.name}\0{shard.size}\0".encode())
            sha.update(shard.header)
            with (self.path / shard.name).open("rb") as file:
                for start in (len(shard.header), max(len(shard.header), shard.size - SAMPLE_BYTES)):
                    file.seek(start)
                    sha.update(file.read(SAMPLE_BYTES))
        return sha.hexdigest()


def open_source(model: str | Path, *, revision: str | None = None) -> TensorSource:
    """Opens a packaged model ("nano"), a local folder or a hub id, and checks that it is whole.

    Raises QuantMLAError with one sentence for a missing or truncated file, a tensor that the index
    promises and no shard has, or weights in another form than safetensors.
    """
    path = locate(model, revision)
    config = model_config(path / "config.json")
    weight_map = _weight_map(path)
    files = list(dict.fromkeys(weight_map.values())) if weight_map else [SINGLE_FILE]
    shards, entries = [], {}
    for name in files:
        shard, found = _read_header(path, name)
        shards.append(shard)
        entries.update(found)
    for name, file in weight_map.items():
        require(
            name in entries and entries[name].shard == file,
            f"{path / INDEX_FILE} says that {name} is in {file}, but it is not",
        )
    return TensorSource(path=path, config=config, shards=tuple(shards), entries=entries)


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name to file name; empty for a single file, which goes first as in transformers."""
    if (path / SINGLE_FILE).is_file():
        return {}
    if not (path / INDEX_FILE).is_file():
        others = sorted(
            p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf")
        )
        found = f"only {', '.join(others[:3])}" if others else "no weights"
        raise QuantMLAError(
            f"{path} holds {found}: only {SINGLE_FILE} or shards with {INDEX_FILE} are read"
        )
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    require(
        isinstance(weight_map, dict) and bool(weight_map), f"{path / INDEX_FILE} has no weight_map"
    )
    assert isinstance(weight_map, dict)
    outside = [
        file for file in weight_map.values() if not isinstance(file, str) or Path(file).name != file
    ]
    require(not outside, f"{path / INDEX_FILE} names a file outside the folder: {outside[:1]}")
    return weight_map


def _read_header(path: Path, name: str) -> tuple[Shard, dict[str, Entry]]:
    file = path / name
    require(file.is_file(), f"{file} is missing")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        require(
            8 + length <= size, f"{file} is truncated: {size} bytes do not even hold its header"
        )
        require(length <= MAX_HEADER_BYTES, f"{file} is not a safetensors file")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        start = 8 + length
        entries = {
            key: _entry(name, value, start) for key, value in header.items() if key != METADATA
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise QuantMLAError(
            f"{file} is not a safetensors file: its header cannot be read"
        ) from error
    expected = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        where = f"its tensors overlap or leave bytes out at {expected}"
        require(entry.begin == expected, f"{file} is not a safetensors file: {where}")
        expected = entry.end
    require(size >= expected, f"{file} is truncated: {size} bytes instead of {expected}")
    require(size == expected, f"{file} is damaged: {size} bytes instead of {expected}")
    return Shard(name, length.to_bytes(8, "little") + raw, size), entries


def _entry(shard: str, described: Mapping[str, Any], start: int) -> Entry:
    """One tensor of a header. Raises ValueError, KeyError or TypeError for what cannot be one."""
    dtype, shape = described["dtype"], tuple(described["shape"])
    begin, end = described["data_offsets"]
    sizes = (*shape, begin, end, end - begin)
    if not all(isinstance(n, int) and 0 <= n < MOST for n in sizes):
        raise ValueError("sizes and offsets must be whole numbers of at least 0")
    if not isinstance(dtype, str):
        raise TypeError("a dtype must be a name")
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise ValueError("offsets do not fit the shape")
    return Entry(shard, dtype, shape, start + begin, start + end)


def require_finite(name: str, x: Tensor) -> Tensor:
    """`x` itself, once it is known to hold neither NaN nor infinity."""
    values = x.float() if x.dtype.itemsize == 1 else x  # of FP8 codes nothing else can be asked
    # The extremes take no memory of their own, and a NaN is both of them.
    if x.numel() and not torch.stack(torch.aminmax(values)).isfinite().all():
        bad = x.numel() - int(torch.isfinite(values).sum())
        raise QuantMLAError(f"{name} has {bad} of {x.numel()} values that are NaN or infinite")
    return x
