"""What a study looks at: one captured attention, or the whole model.

B sequences of S = T tokens; N heads, R latent rank, E rope channels (interleaved).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from quantmla.arch.adapter import Adapter
from quantmla.capture.stream import OnProgress
from quantmla.checkpoint.source import TensorSource
from quantmla.method.layer import Sample
from quantmla.mla.attention import Inputs
from quantmla.mla.weights import MlaWeights
from quantmla.objective import Activations
from quantmla.quant.format import CacheFormat
from quantmla.quant.roundtrip import read_content, read_rope

CachePath = Literal["content", "rope"]
PATHS: tuple[CachePath, ...] = get_args(CachePath)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyLayer:
    """One attention as the model runs it, and what it read on every cell's sequences."""

    prefix: str
    weights: MlaWeights  # float32, on the device of the studies
    softmax_scale: float
    sample: Sample  # sequences of cell after cell
    sequences: int  # of each cell

    @property
    def device(self) -> torch.device:
        return self.weights.norm_R.device

    @property
    def cached_weights(self) -> MlaWeights:
        """For latents that have kv_a_layernorm's weight in them, as the cache does."""
        return replace(self.weights, norm_R=torch.ones_like(self.weights.norm_R))

    def batches(self, size: int) -> Iterator[Activations]:
        """All sequences in order, float32, with unit latents."""
        for start in range(0, len(self.sample), size):
            rows = slice(start, start + size)
            yield Activations(*(x[rows].to(self.device, torch.float32) for x in self.sample))

    def cached_batches(self, size: int) -> Iterator[Activations]:
        """The same with the latents that the cache holds: use `cached_weights`."""
        for x in self.batches(size):
            yield x._replace(unit_latent_BSR=x.unit_latent_BSR * self.weights.norm_R)

    def points(self, count: int) -> Iterator[Inputs]:
        """The first `count` sequences of each cell, one by one, as the cache holds them."""
        for start in range(0, len(self.sample), self.sequences):
            for row in range(start, start + min(count, self.sequences)):
                latent, key, content, rope = (
                    x[row].to(self.device, torch.float32) for x in self.sample
                )
                yield Inputs(content, rope, latent * self.weights.norm_R, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSubject:
    """A checkpoint, and what the layer studies found in it."""

    source: TensorSource
    adapter: Adapter
    device: str
    texts: Sequence[tuple[str, str]]  # name and text
    layers: Sequence[Mapping[str, Any]]  # of analysis.json
    budget: float | None  # bytes per token and layer
    workdir: Path
    report: OnProgress


def cached(x: Inputs, path: CachePath) -> Tensor:
    return x.latent_TR if path == "content" else x.k_rope_TE


def with_cached(x: Inputs, path: CachePath, rows: Tensor) -> Inputs:
    """The inputs with one of the two cached paths replaced."""
    return x._replace(**{"latent_TR" if path == "content" else "k_rope_TE": rows})


def quantiser_error(rows: Tensor, path: CachePath, fmt: CacheFormat) -> Tensor:
    """What a reader gets minus what was cached, for `path`; [..., T, R] or [..., T, E]."""
    return (read_content if path == "content" else read_rope)(rows, fmt) - rows


def scaled_to(error: Tensor, rows: Tensor, nmse: float) -> Tensor:
    """The error's direction with ||error||^2 = nmse ||rows||^2 in each sequence [..., T, C]."""
    energy = rows.square().sum((-2, -1), keepdim=True)
    own = error.square().sum((-2, -1), keepdim=True)
    return error * (nmse * energy / own.clamp(min=1e-30)).sqrt()
