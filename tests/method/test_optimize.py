"""The loop: schedule, clipping, and which step is kept."""

import itertools
import math

import pytest
import torch

from quantmla.errors import QuantMLAError
from quantmla.method.optimize import Schedule, minimize


def steps_of_constant_gradient(schedule: Schedule, rate: float = 0.1) -> list[float]:
    """How far each step moves: Adam of a constant gradient moves by the learning rate."""
    x = torch.zeros(1, requires_grad=True)
    places = []

    def loss(step: int) -> torch.Tensor:
        places.append(x.item())
        return x.sum()

    seen = iter(range(10_000))
    minimize([(x, rate)], loss, lambda: -float(next(seen)), schedule)  # the last step is best
    places.append(x.item())
    return [before - after for before, after in itertools.pairwise(places)]


def test_the_rate_rises_linearly_for_a_tenth_and_falls_as_a_cosine():
    steps, rate = 50, 0.1
    moved = steps_of_constant_gradient(Schedule(steps=steps), rate)
    expected = [rate * (i + 1) / 5 for i in range(5)]
    expected += [rate * 0.5 * (1 + math.cos(math.pi * i / 45)) for i in range(45)]
    assert moved == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert max(moved) == pytest.approx(rate, rel=1e-3)
    assert moved[-1] < 0.002 * rate


def test_rates_are_per_parameter():
    slow, fast = (torch.zeros(1, requires_grad=True) for _ in range(2))
    seen = iter(range(10_000))
    minimize(
        [(slow, 0.01), (fast, 0.1)],
        lambda step: slow.sum() + fast.sum(),
        lambda: -float(next(seen)),
        Schedule(steps=10),
    )
    assert fast.item() == pytest.approx(10 * slow.item(), rel=1e-3)


def test_the_best_held_out_step_is_kept_not_the_last():
    x = torch.zeros(1, requires_grad=True)
    history = minimize(
        [(x, 0.1)],
        lambda step: -x.sum(),  # training pushes x up without end
        lambda: abs(x.item() - 1.0),
        Schedule(steps=100, validate_every=5),
    )
    steps, values = zip(*history, strict=True)
    assert steps == tuple(range(0, 101, 5))
    best = min(values)
    assert values[0] == 1.0
    assert best < values[-1]
    assert abs(x.item() - 1.0) == best


def test_step_0_is_kept_when_learning_only_hurts():
    x = torch.full((2,), 3.0, requires_grad=True)
    history = minimize([(x, 0.1)], lambda step: -x.sum(), lambda: x.sum().item(), Schedule(steps=7))
    assert [step for step, _ in history] == [0, 7]  # the first and the last, whatever the interval
    assert torch.equal(x.detach(), torch.full((2,), 3.0))


def test_ties_go_to_the_earlier_step():
    x = torch.zeros(1, requires_grad=True)
    minimize([(x, 0.1)], lambda step: x.sum(), lambda: 1.0, Schedule(steps=40))
    assert x.item() == 0


def test_gradients_are_clipped_together(monkeypatch: pytest.MonkeyPatch):
    x, y = (torch.zeros(1, requires_grad=True) for _ in range(2))
    seen = []
    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        seen.append((x.grad.item(), y.grad.item()))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    loss = lambda step: 30 * x.sum() + 40 * y.sum()  # noqa: E731
    minimize([(x, 0.1), (y, 0.1)], loss, lambda: 0.0, Schedule(steps=3, max_norm=1.0))
    assert seen == [pytest.approx((0.6, 0.8), rel=1e-5)] * 3


def test_divergence_is_an_error_that_names_the_step():
    x = torch.zeros(1, requires_grad=True)
    values = iter([1.0, math.nan])
    with pytest.raises(QuantMLAError, match="diverged at step 20"):
        minimize([(x, 0.1)], lambda step: x.sum(), lambda: next(values), Schedule(steps=40))
