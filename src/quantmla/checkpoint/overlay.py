"""A checkpoint in which some tensors are others, without a copy on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from quantmla.checkpoint.source import TensorSource


@dataclass(frozen=True)
class _Overlay(TensorSource):
    changed: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def tensor(self, name: str) -> Tensor:
        return self.changed[name] if name in self.changed else super().tensor(name)


def overlay(source: TensorSource, changed: Mapping[str, Tensor]) -> TensorSource:
    """`source` read as if it held `changed`, whose shapes and dtypes must be those on disk."""
    for name, x in changed.items():
        assert (x.dtype, tuple(x.shape)) == (source.dtype(name), source.shape(name)), name
    return _Overlay(source.path, source.config, source.shards, source.entries, changed)
