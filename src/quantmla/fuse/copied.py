"""Proof that a fused folder is its original in all that fusing leaves alone."""

import json
from collections.abc import Container
from pathlib import Path

import torch

from quantmla.arch.adapter import Adapter
from quantmla.checkpoint.rewrite import auxiliary
from quantmla.checkpoint.source import TensorSource
from quantmla.errors import QualityGateFailed, require
from quantmla.fuse.checkpoint import CONFIG_KEY

LOADED = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")  # files that engines read


def changed_tensors(
    source: TensorSource, other: TensorSource, allowed: Container[str]
) -> tuple[str, ...]:
    """Names of tensors that differ in dtype, shape or bytes, or that only one checkpoint has.

    Those in `allowed` may differ in bytes.
    """
    differ = set(source.entries) ^ set(other.entries)
    for name in set(source.entries) - differ:
        if not _same(source, other, name, bytes_too=name not in allowed):
            differ.add(name)
    return tuple(sorted(differ))


def require_copied(
    source: TensorSource, fused: TensorSource, adapter: Adapter, transforms: Container[str]
) -> None:
    """Every tensor that no transform touches is the original, byte for byte."""
    folded = {
        name
        for site in adapter.sites(source.config, source.names)
        if site.prefix in transforms
        for name in adapter.fused_names(source, site)
    }
    differ = changed_tensors(source, fused, folded)
    require(
        not differ,
        f"{len(differ)} tensors that fusing leaves alone are not the original's: "
        f"{', '.join(differ[:3])}",
        QualityGateFailed,
    )


def require_same_files(source: TensorSource, fused: TensorSource) -> None:
    """config.json is the original's but for our key, and so are the tokenizer's files (LOADED)."""
    old, new = (  # as text, in which a NaN equals itself
        {key: json.dumps(value, sort_keys=True) for key, value in one.config.items()}
        for one in (source, fused)
    )
    keys = {*old, *new} - {CONFIG_KEY}
    differ = sorted(key for key in keys if old.get(key) != new.get(key))
    require(
        not differ,
        f"config.json of {fused.path} is not the original's: it differs in {', '.join(differ)}",
        QualityGateFailed,
    )
    for name in auxiliary(source)[0]:
        if Path(name).suffix not in LOADED:
            continue
        copy = fused.path / name
        require(copy.is_file(), f"{copy} is missing: the original has it", QualityGateFailed)
        alike = copy.read_bytes() == (source.path / name).read_bytes()
        require(alike, f"{copy} is not the original's", QualityGateFailed)


def _same(source: TensorSource, other: TensorSource, name: str, *, bytes_too: bool) -> bool:
    one, two = source.entries[name], other.entries[name]
    alike = (one.dtype, one.shape) == (two.dtype, two.shape)
    if not (alike and bytes_too):
        return alike
    raw = [x.tensor(name).reshape(-1).view(torch.uint8) for x in (source, other)]
    return torch.equal(*raw)
