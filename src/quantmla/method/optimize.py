"""The learning loop that the learned methods share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantmla.errors import QuantMLAError, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """AdamW without decay: linear warm-up, cosine to 0, clipped gradients, best held-out step."""

    steps: int
    warm_up: float = 0.1  # share of the steps
    max_norm: float = 1.0
    validate_every: int = 20


def minimize(
    parameters: Sequence[tuple[Tensor, float]],
    loss: Callable[[int], Tensor],
    held_out: Callable[[], float],
    schedule: Schedule,
) -> list[tuple[int, float]]:
    """Leaves the parameters (tensor, learning rate) at their best held-out values.

    `loss(step)` is the training loss of one step. Returns (step, held-out loss) every
    `validate_every` steps, step 0 and the last included.
    """
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": rate} for p, rate in parameters], weight_decay=0.0
    )
    tensors = [p for p, _ in parameters]
    warm = max(1, round(schedule.warm_up * schedule.steps))
    history = [(0, held_out())]
    best = (history[0][1], [p.detach().clone() for p in tensors])
    for step in range(schedule.steps):
        done = (step - warm) / max(1, schedule.steps - warm)
        share = (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * done))
        for group, (_, rate) in zip(optimizer.param_groups, parameters, strict=True):
            group["lr"] = rate * share
        optimizer.zero_grad(set_to_none=True)
        value = loss(step)
        value.backward()
        torch.nn.utils.clip_grad_norm_(tensors, schedule.max_norm)
        optimizer.step()
        if (step + 1) % schedule.validate_every == 0 or step + 1 == schedule.steps:
            now = held_out()
            require(math.isfinite(now), f"learning diverged at step {step + 1}", QuantMLAError)
            history.append((step + 1, now))
            if now < best[0]:
                best = (now, [p.detach().clone() for p in tensors])
    with torch.no_grad():
        for p, value in zip(tensors, best[1], strict=True):
            p.copy_(value)
    return history
