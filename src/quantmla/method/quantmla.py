"""Our method: the published transform spaces, learned through the quantiser that will be used.

Content: the attention output's error is taken to first order, e^T H e with the output gram H of
objective.py, which costs one small matrix product per step instead of an attention, and starts
from the scales that are best for a group with a fixed number of codes. H counts the tokens that
queries read packed: sinks and recent tokens stay in bf16, and codes spent on them are lost. A few
steps on the attention output itself follow. The step kept is the one with the least
attention-output error on held-out text. Rope: angles and gains on row-centred positional scores,
page centring included, at a rate that lets the angles move.
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
from quantmla.method.rope_learning import RopeLearning, learn_rope
from quantmla.objective import (
    Activations,
    attention_output,
    output_gram,
    output_loss,
    packed_pairs,
    unit_trace,
)
from quantmla.quant.format import CacheFormat
from quantmla.transform.layer import ContentTransform, LayerTransform, identity, read_unit_latent
from quantmla.transform.orthogonal import cayley

PUBLISHED_FORMAT = False
CALIBRATION = {"num_sequences": 32, "held_out_sequences": 8, "sequence_length": 1024}
why_not_fused = always_fused
RIDGE = 1e-6  # of the unit-trace gram, so that it has a Cholesky factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Rates are of Adam steps on free parameters; sequences are those of the calibration."""

    steps: int = 300  # of the content path, to first order
    rows_per_step: int = 4096  # tokens
    rotation_rate: float = 1e-2
    scale_rate: float = 2e-2
    polish_steps: int = 60  # of the content path, on the attention output
    polish_tokens: int = 512  # at the beginning of each sequence
    polish_rate: float = 0.3  # share of the rates above
    gram_sequences: int = 8
    probes: int = 4  # backward passes per gram sequence
    rope_steps: int = 150
    rope_batch: int = 4  # sequences
    angle_rate: float = 6e-2
    gain_rate: float = 2e-2
    batch_size: int = 2  # sequences, where an attention runs


def fit(layer: Layer, fmt: CacheFormat, options: Options, generator: torch.Generator) -> Fitted:
    """Both paths, each with the other exact."""
    pairs = layer.train.k_rope_BSE.shape[-1] // 2
    content, rope = identity(layer.weights.norm_R, pairs)[:2]
    history: tuple[Validation, ...] = ()
    if fmt.content_bits < 16:
        content, history = _learn_content(layer, fmt, options, generator)
    if fmt.rope_bits < 16 and pairs:
        learning = RopeLearning(
            steps=options.rope_steps,
            batch_size=options.rope_batch,
            angle_rate=options.angle_rate,
            gain_rate=options.gain_rate,
            anchor=0.0,
            row_centred=True,
        )
        rope, curve = learn_rope(layer, fmt, learning, generator)
        history = (*history, *curve)
    return Fitted(off_device(LayerTransform(content, rope)), history)


def _packed_pairs(fmt: CacheFormat, length: int) -> Tensor | None:
    """As `packed_pairs`; None for all: nothing is protected, or all of a sequence so short is."""
    packed_SS = packed_pairs(fmt, length)
    if fmt.recent_window is None or not bool(packed_SS.any()):
        return None
    return packed_SS


def _gram(layer: Layer, fmt: CacheFormat, options: Options, generator: torch.Generator) -> Tensor:
    """Unit-trace content gram [R, R] of what is read packed, float64 on CPU."""
    packed_SS = _packed_pairs(fmt, layer.train.unit_latent_BSR.shape[1])
    if packed_SS is not None:
        packed_SS = packed_SS.to(layer.device)
    rows = torch.randperm(len(layer.train), generator=generator)[: options.gram_sequences]
    rank = len(layer.weights.norm_R)
    total = torch.zeros(rank, rank, dtype=torch.float64)
    for part in rows.split(options.batch_size):
        total += output_gram(
            layer.weights,
            layer.batch(layer.train, part),
            layer.softmax_scale,
            probes=options.probes,
            generator=generator,
            packed_SS=packed_SS,
        )
    return unit_trace(total)


def _start_scales(gram_RR: Tensor, unit_TR: Tensor) -> Tensor:
    """log s with s^2 proportional to sqrt(H_jj) / sigma_j and mean 0.

    A group's step is a fixed share of its length, so with step^2 = sum_j s_j^2 sigma_j^2 the cost
    sum_j H_jj step^2 / s_j^2 is least there (Cauchy-Schwarz).
    """
    sensitivity_R = gram_RR.diagonal().clamp(min=1e-8).float()
    energy_R = unit_TR.square().mean(0).clamp(min=1e-8).cpu()
    log_scale = (sensitivity_R.log() - energy_R.log()) / 4
    return log_scale - log_scale.mean()


def _learn_content(
    layer: Layer, fmt: CacheFormat, options: Options, generator: torch.Generator
) -> tuple[ContentTransform, tuple[Validation, ...]]:
    device = layer.device
    gram_RR = _gram(layer, fmt, options, generator)
    rank = len(gram_RR)
    eye = torch.eye(rank, dtype=torch.float64)
    factor_RR = torch.linalg.cholesky(gram_RR + RIDGE * eye).to(device, torch.float32)
    unit_TR = layer.train.unit_latent_BSR.flatten(0, 1)
    free_RR = torch.zeros(rank, rank, device=device, requires_grad=True)
    sample = layer.batch(layer.train, slice(0, options.gram_sequences)).unit_latent_BSR
    log_scale_R = _start_scales(gram_RR, sample.flatten(0, 1)).to(device).requires_grad_()

    def transform() -> ContentTransform:
        return ContentTransform(cayley(free_RR), log_scale_R.exp())

    def to_first_order(step: int) -> Tensor:
        rows = torch.randint(0, len(unit_TR), (options.rows_per_step,), generator=generator)
        x_TR = unit_TR[rows].to(device, torch.float32)
        error_TR = x_TR - read_unit_latent(transform(), x_TR, fmt)
        return (error_TR @ factor_RR).square().mean()

    def on_output(step: int) -> Tensor:
        rows = torch.randperm(len(layer.train), generator=generator)[: options.batch_size]
        x = Activations(
            *(part[:, : options.polish_tokens] for part in layer.batch(layer.train, rows))
        )
        with torch.no_grad():
            target = attention_output(layer.weights, x, layer.softmax_scale)
        latent = read_unit_latent(transform(), x.unit_latent_BSR, fmt)
        read = attention_output(
            layer.weights, x._replace(unit_latent_BSR=latent), layer.softmax_scale
        )
        return output_loss(read, target)

    def held_out() -> float:
        with torch.no_grad():
            now = transform()
        return content_output_loss(layer, now, fmt, options.batch_size)

    history = []
    first = 0
    phases = (
        (to_first_order, options.steps, 1.0),
        (on_output, options.polish_steps, options.polish_rate),
    )
    for loss, steps, share in phases:
        rates = [
            (free_RR, share * options.rotation_rate),
            (log_scale_R, share * options.scale_rate),
        ]
        schedule = Schedule(steps=steps, validate_every=max(1, steps // 4))
        curve = minimize(rates, loss, held_out, schedule)
        history += [Validation("content", first + step, value) for step, value in curve]
        first += steps
    with torch.no_grad():
        exact = ContentTransform(cayley(free_RR.double()), log_scale_R.exp())
    return exact, tuple(history)
