"""Learning of the rope transform on positional scores, through the quantiser of the format.

F pairs. Scores' errors are exact and cost O(S E^2), see objective.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantmla.method.layer import Layer, Validation
from quantmla.method.optimize import Schedule, minimize
from quantmla.method.statistics import MAX_LOG_SCALE, rope_log_gain
from quantmla.objective import Activations, positional_loss, query_moments
from quantmla.quant.format import CacheFormat
from quantmla.quant.roundtrip import read_rope
from quantmla.transform.layer import RopeTransform

ALPHAS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)  # of the statistical start; ties go to the first


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeLearning:
    """How the pair angles and gains are learned."""

    steps: int
    batch_size: int  # sequences
    angle_rate: float
    gain_rate: float
    anchor: float  # pull to the start, mean squares
    row_centred: bool  # leave out the part of an error that the softmax cannot see


def learn_rope(
    layer: Layer, fmt: CacheFormat, learning: RopeLearning, generator: torch.Generator
) -> tuple[RopeTransform, tuple[Validation, ...]]:
    """Starts from the best statistical gains, keeps the best held-out step."""

    def loss_of(rope: RopeTransform, x: Activations) -> Tensor:
        read = rope.invert_key(read_rope(rope.apply_key(x.k_rope_BSE), fmt))
        moments = query_moments(x.q_rope_BSNE)
        return positional_loss(
            x.k_rope_BSE - read, x.k_rope_BSE, moments, row_centred=learning.row_centred
        )

    @torch.no_grad()
    def held_out(rope: RopeTransform) -> float:
        batches = layer.batches(layer.held_out, learning.batch_size)
        losses = [loss_of(rope, x).item() for x in batches]
        return sum(losses) / len(losses)

    def start(alpha: float) -> Tensor:
        return rope_log_gain(layer.train, alpha).to(layer.device)

    def scaled(alpha: float) -> RopeTransform:
        return RopeTransform(torch.zeros_like(start(alpha)), start(alpha).exp())

    initial_F = start(min(ALPHAS, key=lambda a: held_out(scaled(a))))
    angle_F = torch.zeros_like(initial_F, requires_grad=True)
    log_gain_F = initial_F.clone().requires_grad_()

    def transform() -> RopeTransform:
        return RopeTransform(angle_F, log_gain_F.clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE).exp())

    def loss(step: int) -> Tensor:
        rows = torch.randperm(len(layer.train), generator=generator)[: learning.batch_size]
        pull = angle_F.square().mean() + (log_gain_F - initial_F).square().mean()
        return loss_of(transform(), layer.batch(layer.train, rows)) + learning.anchor * pull

    rates = [(angle_F, learning.angle_rate), (log_gain_F, learning.gain_rate)]
    curve = minimize(rates, loss, lambda: held_out(transform()), Schedule(steps=learning.steps))
    return transform(), tuple(Validation("rope", *point) for point in curve)
