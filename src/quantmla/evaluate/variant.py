"""One thing to evaluate: weights, how their cache is read, and the transforms to simulate."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantmla.errors import UsageError, require
from quantmla.evaluate.teacher_forced import Transforms, teacher_forced
from quantmla.mla.rope import RopeOrder
from quantmla.quant.mixed import ModelFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`model=None` is the base model; `fmt=None` reads no cache at all, the plain forward."""

    name: str
    model: nn.Module | None = None
    fmt: ModelFormat | None = None
    transforms: Transforms | None = None
    rope_order: RopeOrder | None = None


def require_equal_protection(variants: list[Variant]) -> None:
    """All quantised variants keep the same sinks and the same recent window, or none does."""
    seen = {(v.fmt.num_sink_tokens, v.fmt.recent_window) for v in variants if v.fmt is not None}
    require(
        len(seen) <= 1,
        "variants with unequal protection cannot be compared: (sinks, recent) are "
        f"{sorted(seen, key=str)}",
        UsageError,
    )


@contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


def logits(base: nn.Module, variant: Variant, ids_BT: Tensor, last: int = 0) -> Tensor:
    """Logits [B, T, U] of one forward pass without a cache; only the `last` positions unless 0."""
    model = base if variant.model is None else variant.model
    reading = (
        nullcontext()
        if variant.fmt is None
        else teacher_forced(model, variant.fmt, variant.transforms, rope_order=variant.rope_order)
    )
    device = next(model.parameters()).device
    with _inference(model), reading:
        return model(input_ids=ids_BT.to(device), use_cache=False, logits_to_keep=last).logits
