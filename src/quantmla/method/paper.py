"""QuantMLA as published (arXiv 2609.36760: equations 6-10, 37, Table 7, C.4).

Content: Cayley rotation and log scales on the attention output. Rope: pair angles and tied log
gains on positional scores. Each path is learned with the other exact, without protected tokens,
through the quantiser of the given format.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantmla.method.layer import (
    Fitted,
    Layer,
    Validation,
    always_fused,
    content_output_loss,
    off_device,
)
from quantmla.method.optimize import Schedule, minimize
from quantmla.method.rope_learning import ALPHAS, RopeLearning, learn_rope
from quantmla.method.statistics import MAX_LOG_SCALE, content_magnitudes, log_scales
from quantmla.objective import attention_output, output_loss
from quantmla.quant.format import CacheFormat
from quantmla.transform.layer import ContentTransform, LayerTransform, identity, read_unit_latent
from quantmla.transform.orthogonal import cayley

PUBLISHED_FORMAT = True
CALIBRATION = {"num_sequences": 128, "held_out_sequences": 32, "sequence_length": 2048}
why_not_fused = always_fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Table 7."""

    steps: int = 300  # of each path
    batch_size: int = 4  # sequences
    rotation_rate: float = 3e-3
    scale_rate: float = 1e-3
    angle_rate: float = 1e-3
    gain_rate: float = 1e-3
    anchor: float = 1e-4  # pull to the initial values; its form is ours, mean squares


def fit(layer: Layer, fmt: CacheFormat, options: Options, generator: torch.Generator) -> Fitted:
    """Both paths, one after the other."""
    plain = identity(layer.weights.norm_R, layer.train.k_rope_BSE.shape[-1] // 2)
    content = plain.content
    history: tuple[Validation, ...] = ()
    if fmt.content_bits < 16:
        content, history = _fit_content(layer, fmt, options, generator)
    rope = plain.rope
    if fmt.rope_bits < 16 and layer.train.k_rope_BSE.shape[-1]:
        learning = RopeLearning(
            steps=options.steps,
            batch_size=options.batch_size,
            angle_rate=options.angle_rate,
            gain_rate=options.gain_rate,
            anchor=options.anchor,
            row_centred=False,
        )
        rope, more = learn_rope(layer, fmt, learning, generator)
        history = (*history, *more)
    return Fitted(off_device(LayerTransform(content, rope)), history)


def _draw(layer: Layer, options: Options, generator: torch.Generator) -> Tensor:
    return torch.randperm(len(layer.train), generator=generator)[: options.batch_size]


def _fit_content(
    layer: Layer, fmt: CacheFormat, options: Options, generator: torch.Generator
) -> tuple[ContentTransform, tuple[Validation, ...]]:
    rank, device = len(layer.weights.norm_R), layer.device
    eye = torch.eye(rank, device=device)

    magnitude_R = content_magnitudes(layer.train).to(device)

    def start(alpha: float) -> Tensor:
        return log_scales(magnitude_R, alpha)

    initial_R = start(
        min(
            ALPHAS,
            key=lambda a: content_output_loss(
                layer, ContentTransform(eye, start(a).exp()), fmt, options.batch_size
            ),
        )
    )
    free_RR = torch.zeros(rank, rank, device=device, requires_grad=True)
    log_scale_R = initial_R.clone().requires_grad_()

    def transform() -> ContentTransform:
        log_scale = log_scale_R.clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE)
        return ContentTransform(cayley(free_RR), log_scale.exp())

    def loss(step: int) -> Tensor:
        x = layer.batch(layer.train, _draw(layer, options, generator))
        with torch.no_grad():
            target = attention_output(layer.weights, x, layer.softmax_scale)
        latent = read_unit_latent(transform(), x.unit_latent_BSR, fmt)
        read = attention_output(
            layer.weights, x._replace(unit_latent_BSR=latent), layer.softmax_scale
        )
        pull = free_RR.square().mean() + (log_scale_R - initial_R).square().mean()
        return output_loss(read, target) + options.anchor * pull

    def held_out() -> float:
        return content_output_loss(layer, transform(), fmt, options.batch_size)

    rates = [(free_RR, options.rotation_rate), (log_scale_R, options.scale_rate)]
    curve = minimize(rates, loss, held_out, Schedule(steps=options.steps))
    with torch.no_grad():
        exact = ContentTransform(
            cayley(free_RR.double()), log_scale_R.clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE).exp()
        )
    return exact, tuple(Validation("content", *point) for point in curve)
