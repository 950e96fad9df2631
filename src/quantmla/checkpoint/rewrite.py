"""A copy of a checkpoint folder in which some tensors are others: all or nothing.

Headers are copied byte for byte, so that names, shapes, dtypes, order and metadata stay; the data
goes through one tensor at a time. The folder appears under its name only once it is complete.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quantmla.checkpoint.source import Entry, TensorSource
from quantmla.errors import QuantMLAError, UsageError, require
from quantmla.interrupts import is_interrupt
from quantmla.workdir import check_makeable, present_part

COPY_BYTES = 16 * 2**20
# Other copies of the weights: they would stay as they were, beside weights that are not.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What `rewrite_checkpoint` did."""

    path: Path
    replaced: tuple[str, ...]  # tensors
    left_out: tuple[str, ...]  # files with other copies of the weights, not taken along


def rewrite_checkpoint(
    source: TensorSource,
    replace: Mapping[str, Callable[[], Tensor]],
    out: Path,
    *,
    config_update: Mapping[str, Any],
    extra_files: Mapping[str, bytes | str],
    overwrite: bool = False,
) -> Rewritten:
    """Writes `source` to the folder `out` with the tensors of `replace` made anew.

    config.json gains the keys of `config_update` and changes in no other byte. `extra_files` go
    beside it, and win over files of the same name in the source. Raises QuantMLAError for an output
    that must not be written, a full disk, or a tensor of another shape or dtype; nothing is left
    behind then, nor after Ctrl-C.
    """
    out = Path(out)
    unknown = sorted(set(replace) - set(source.entries))
    require(not unknown, f"{source.path} has no tensor {unknown[:1]}, so it cannot be replaced")
    check_output(source.path, out, overwrite=overwrite, marks=tuple(config_update))
    config = add_keys((source.path / "config.json").read_bytes().decode(), config_update)
    files, left_out = auxiliary(source)
    texts = {"config.json": config, **extra_files}
    _check_space(source, files, texts, out)
    with _temporary(out) as part:
        for shard in source.shards:
            _write_shard(source, shard.name, replace, part)
        for name in files:
            if name not in texts:
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.path / name, part / name)
        for name, content in texts.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_bytes(content.encode() if isinstance(content, str) else content)
        _sync(part)
        _put_in_place(part, out)
        remove_replaced(out)  # not before: it may be all that is left of `out`
    return Rewritten(out, tuple(n for n in source.names if n in replace), tuple(left_out))


def check_output(source: Path, out: Path, *, overwrite: bool, marks: tuple[str, ...]) -> None:
    """Refuses an output folder that exists, cannot be made, or holds or lies in the source.

    With `overwrite`, an existing folder is replaced only if it is empty or if its config.json has
    one of the keys `marks`: that is, if it is an earlier output.
    """
    inside, target = source.resolve(), Path(os.path.realpath(out))
    require(
        target != inside and inside not in target.parents and target not in inside.parents,
        f"the output folder {out} overlaps the model's own folder {source}",
        UsageError,
    )
    check_makeable(_part_of(target), out)  # beside it, under the longest name that is written
    if not target.exists():
        return
    earlier = target.is_dir() and _has_mark(target, marks)
    checked = f"; it is an earlier output, which `quantmla verify {out}` checks" if earlier else ""
    require(
        overwrite,
        f"{out} exists: choose another output folder, or pass --overwrite{checked}",
        UsageError,
    )
    require(
        earlier or (target.is_dir() and not any(target.iterdir())),
        f"{out} is not an earlier output, so --overwrite does not replace it",
        UsageError,
    )


def check_space(source: TensorSource, out: Path) -> None:
    """Refuses a disk that cannot hold a copy of `source`."""
    _check_space(source, auxiliary(source)[0], {}, out)


def _has_mark(folder: Path, marks: tuple[str, ...]) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and any(mark in config for mark in marks)


def add_keys(text: str, update: Mapping[str, Any]) -> str:
    """A JSON object's text with more keys at its end; all that was there stays byte for byte."""
    old = json.loads(text)
    taken = sorted(set(old) & set(update))
    require(
        not taken,
        f"config.json already has {', '.join(taken)}: start from the original checkpoint",
    )
    if not update:
        return text
    end = text.rindex("}")
    head, tail = text[:end].rstrip(), text[end:]
    indent = re.search(r"\n([ \t]+)\"", text)
    step = indent[1] if indent else ""
    lines = []
    for key, value in update.items():
        dumped = json.dumps(value, indent=step or None, ensure_ascii=False)
        lines.append(f"{json.dumps(key)}: " + dumped.replace("\n", "\n" + step))
    comma = "," if old else ""
    gap = "\n" + step if indent else " "
    new = head + comma + gap + ("," + gap).join(lines) + ("\n" if indent else "") + tail
    assert json.loads(new) == old | dict(update)
    return new


def auxiliary(source: TensorSource) -> tuple[list[str], list[str]]:
    """Files to copy, weight files to leave; relative names, hidden folders are skipped."""
    shards = {shard.name for shard in source.shards}
    copied: list[str] = []
    left_out: list[str] = []
    for path in sorted(source.path.rglob("*")):
        relative = path.relative_to(source.path)
        if not path.is_file() or any(part.startswith(".") for part in relative.parts[:-1]):
            continue
        name = relative.as_posix()
        if name in shards or name == "config.json":
            continue
        (left_out if path.suffix in WEIGHT_SUFFIXES else copied).append(name)
    return copied, left_out


def _check_space(
    source: TensorSource, files: list[str], texts: Mapping[str, bytes | str], out: Path
) -> None:
    parent = out.resolve().parent
    need = sum(shard.size for shard in source.shards) + sum(len(t) for t in texts.values())
    need += sum((source.path / name).stat().st_size for name in files)
    free = shutil.disk_usage(present_part(parent)).free
    require(
        need <= free,
        f"writing {out} takes {need / 2**20:.1f} MiB, but {parent} has {free / 2**20:.1f} MiB free",
    )


@contextmanager
def _temporary(out: Path) -> Iterator[Path]:
    """A folder beside `out`, gone at the end in any case: renamed to `out`, or removed."""
    part, begun = _part_of(out.resolve()), False

    def kept() -> str:
        return "it is whole" if begun and not part.exists() else "nothing of it was kept"

    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(out.resolve(), "part")
        part.mkdir()
        begun = True
        yield part
    except BaseException as error:
        if is_interrupt(error):
            raise KeyboardInterrupt(f"interrupted while writing {out}; {kept()}") from None
        if not isinstance(error, OSError):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else (error.strerror or str(error))
        raise QuantMLAError(f"writing {out} failed, {kept()}: {reason}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _part_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.part-{os.getpid()}")


def remove_replaced(out: Path) -> None:
    """Removes the folders that `out` has taken the place of."""
    _remove_left_over(out.resolve(), "old")


def _remove_left_over(target: Path, kind: str) -> None:
    """Removes what killed runs left beside `target`: folders that bear a dead process's number."""
    name = re.compile(re.escape(f"{target.name}.{kind}-") + "([0-9]+)")
    for folder in target.parent.iterdir():
        match = name.fullmatch(folder.name)
        if match is not None and not _is_alive(int(match[1])):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return False  # it had our number before us
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _write_shard(
    source: TensorSource, shard: str, replace: Mapping[str, Callable[[], Tensor]], part: Path
) -> None:
    header = next(s.header for s in source.shards if s.name == shard)
    entries = [(n, e) for n, e in source.entries.items() if e.shard == shard]
    with (source.path / shard).open("rb") as old, (part / shard).open("wb") as new:
        new.write(header)
        for name, entry in sorted(entries, key=lambda item: item[1].begin):
            if name in replace:
                new.write(_bytes_of(source, name, entry, replace[name]()))
            else:
                _copy_range(old, new, entry.begin, entry.end)


def _bytes_of(source: TensorSource, name: str, entry: Entry, x: Tensor) -> memoryview:
    wanted = (source.dtype(name), entry.shape)
    require(
        (x.dtype, tuple(x.shape)) == wanted,
        f"{name} must stay {wanted[0]} {wanted[1]}, but {x.dtype} {tuple(x.shape)} was made for it",
    )
    return memoryview(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _copy_range(old: BinaryIO, new: BinaryIO, begin: int, end: int) -> None:
    old.seek(begin)
    while begin < end:
        block = old.read(min(COPY_BYTES, end - begin))
        require(bool(block), f"{old.name} ended early: it changed while it was read")
        new.write(block)
        begin += len(block)


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(part: Path, out: Path) -> None:
    target = out.resolve()
    if not target.exists():
        part.rename(target)
        return
    old = target.with_name(f"{target.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)  # of a killed run that had our number
    try:
        target.rename(old)
        part.rename(target)
    except BaseException:
        if not target.exists():  # an interrupt may come when all is done
            old.rename(target)
        raise
