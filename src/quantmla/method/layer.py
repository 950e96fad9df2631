"""All that a method may look at, and what it returns.

B sequences of S tokens; R latent rank, E rope channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quantmla.errors import require
from quantmla.mla.weights import MlaWeights
from quantmla.objective import (
    Activations,
    attention_output,
    output_loss,
    positional_energy,
    summarize_queries,
)
from quantmla.quant.format import CacheFormat
from quantmla.transform.layer import (
    ContentTransform,
    LayerTransform,
    RopeTransform,
    read_rope_key,
    read_unit_latent,
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Whole causal sequences of one attention's inputs, as captured (any device and dtype).

    Its length is the number of sequences; iteration gives the four tensors.
    """

    unit_latent_BSR: Tensor
    k_rope_BSE: Tensor
    q_content_BSNP: Tensor
    q_rope_BSNE: Tensor

    def __len__(self) -> int:
        return self.unit_latent_BSR.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.unit_latent_BSR, self.k_rope_BSE, self.q_content_BSNP, self.q_rope_BSNE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One attention: its weights in float32 on the learner's device, and two disjoint samples."""

    weights: MlaWeights
    softmax_scale: float
    train: Sample
    held_out: Sample

    @property
    def device(self) -> torch.device:
        return self.weights.norm_R.device

    def batch(self, sample: Sample, rows: Tensor | slice) -> Activations:
        """Some sequences, float32 on the learner's device."""
        return Activations(*(x[rows].to(self.device, torch.float32) for x in sample))

    def batches(self, sample: Sample, size: int) -> Iterator[Activations]:
        """All sequences in order, `size` at a time."""
        for start in range(0, len(sample), size):
            yield self.batch(sample, slice(start, start + size))


class Validation(NamedTuple):
    """One line of a learning curve; losses as the path's objective defines them."""

    path: str  # content or rope
    step: int
    held_out: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """A layer's transform (float64 on CPU) and how learning went."""

    transform: LayerTransform
    history: tuple[Validation, ...] = field(default=())


def always_fused(fmt: CacheFormat) -> None:
    """`why_not_fused` of a method whose transform folds into the weights in every format."""


def on_device(transform: LayerTransform, device: torch.device) -> LayerTransform:
    """The transform in float32 on a device, as learning and evaluation use it."""

    def moved(x: Tensor) -> Tensor:
        return x.to(device, torch.float32)

    content, rope, online = transform
    return LayerTransform(
        ContentTransform(moved(content.rotation_RR), moved(content.scale_R)),
        RopeTransform(moved(rope.angle_F), moved(rope.gain_F)),
        None if online is None else moved(online),
    )


def off_device(transform: LayerTransform) -> LayerTransform:
    """The transform in float64 on the CPU, as fusing takes it."""

    def moved(x: Tensor) -> Tensor:
        return x.detach().to("cpu", torch.float64)

    content, rope, online = transform
    return LayerTransform(
        ContentTransform(moved(content.rotation_RR), moved(content.scale_R)),
        RopeTransform(moved(rope.angle_F), moved(rope.gain_F)),
        None if online is None else moved(online),
    )


class PathErrors(NamedTuple):
    """Held-out errors of a transform with each path quantised alone; nothing is protected."""

    content_output: float  # normalised attention-output error
    rope_output: float
    rope_scores: float  # normalised positional-score error, row-centred


@torch.no_grad()
def held_out_errors(
    layer: Layer, transform: LayerTransform, fmt: CacheFormat, batch_size: int = 2
) -> PathErrors:
    """Errors of every method by the same measure: what the log's "before" and "after" are.

    Raises QuantMLAError where they are not finite.
    """
    moved = on_device(transform, layer.device)
    sums = torch.zeros(5, dtype=torch.float64)
    for x in layer.batches(layer.held_out, batch_size):
        target = attention_output(layer.weights, x, layer.softmax_scale)
        latent = read_unit_latent(moved.content, x.unit_latent_BSR, fmt)
        key = read_rope_key(moved, x.k_rope_BSE, fmt)
        content = attention_output(
            layer.weights, x._replace(unit_latent_BSR=latent), layer.softmax_scale
        )
        rope = attention_output(layer.weights, x._replace(k_rope_BSE=key), layer.softmax_scale)
        queries = summarize_queries(x.q_rope_BSNE)
        parts = (
            (content - target).square().sum(),
            (rope - target).square().sum(),
            target.square().sum(),
            positional_energy(x.k_rope_BSE - key, queries, row_centred=True),
            positional_energy(x.k_rope_BSE, queries, row_centred=True),
        )
        sums += torch.stack(parts).double().cpu()
    require(
        bool(sums.isfinite().all()),
        "errors on held-out text are not finite: the weights give numbers too large for float32",
    )
    content_sum, rope_sum, target_sum, score_sum, key_sum = sums.clamp(min=1e-30).tolist()
    return PathErrors(content_sum / target_sum, rope_sum / target_sum, score_sum / key_sum)


@torch.no_grad()
def content_output_loss(
    layer: Layer, content: ContentTransform, fmt: CacheFormat, batch_size: int
) -> float:
    """Mean normalised attention-output error on the held-out sample, the rope path exact."""
    losses = []
    for x in layer.batches(layer.held_out, batch_size):
        target = attention_output(layer.weights, x, layer.softmax_scale)
        latent = read_unit_latent(content, x.unit_latent_BSR, fmt)
        read = attention_output(
            layer.weights, x._replace(unit_latent_BSR=latent), layer.softmax_scale
        )
        losses.append(output_loss(read, target).item())
    return sum(losses) / len(losses)
