"""Learning of the rope transform on positional scores, through the quantiser of the format.

F pairs. Scores' errors are exact and cost O(S E^2), see objective.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantmla.method.layer import Layer, Validation
from quantmla.method.optimize import Schedule, minimize
from quantmla.method.statistics import MAX_LOG_SCALE, log_scales, rope_magnitudes
from quantmla.objective import Queries, positional_loss, summarize_queries
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

    def loss_of(rope: RopeTransform, k_rope_BSE: Tensor, queries: Queries) -> Tensor:
        read = rope.invert_key(read_rope(rope.apply_key(k_rope_BSE), fmt))
        return positional_loss(
            k_rope_BSE - read, k_rope_BSE, queries, row_centred=learning.row_centred
        )

    held = [
        (x.k_rope_BSE, summarize_queries(x.q_rope_BSNE))
        for x in layer.batches(layer.held_out, learning.batch_size)
    ]

    @torch.no_grad()
    def held_out(rope: RopeTransform) -> float:
        losses = [loss_of(rope, key, queries).item() for key, queries in held]
        return sum(losses) / len(losses)

    magnitude_F = rope_magnitudes(layer.train).to(layer.device)

    def start(alpha: float) -> Tensor:
        return log_scales(magnitude_F, alpha)

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
        x = layer.batch(layer.train, rows)
        fault = loss_of(transform(), x.k_rope_BSE, summarize_queries(x.q_rope_BSNE))
        return fault + learning.anchor * pull

    rates = [(angle_F, learning.angle_rate), (log_gain_F, learning.gain_rate)]
    curve = minimize(rates, loss, lambda: held_out(transform()), Schedule(steps=learning.steps))
    return transform(), tuple(Validation("rope", *point) for point in curve)
