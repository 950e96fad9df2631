"""Perplexity and divergence over windows of a text, for any number of variants at once.

Memory holds the logits of one window for the baseline and one variant, never those of the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn

from quantmla.errors import UsageError, require
from quantmla.evaluate.divergence import (
    Bucket,
    Divergence,
    TokenMeasures,
    by_context,
    compare_logits,
    summarize,
)
from quantmla.evaluate.variant import Variant, logits

Progress = Callable[[str, int, int], None]  # what is running, done, of


@dataclass(frozen=True, slots=True, kw_only=True)
class TextResult:
    """One variant against the baseline on one text."""

    overall: Divergence
    buckets: tuple[Bucket, ...]


def default_text() -> str:
    """The packaged held-out text, which the embedded model was not trained on."""
    path = files("quantmla") / "assets" / "text" / "heldout.txt"
    return path.read_text(encoding="utf-8")


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text of any length, none of them special, and no warning about the length."""
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def beginning_ids(tokenizer: Any) -> list[int]:
    """Tokens that the tokenizer puts before every text, such as its beginning-of-sequence token."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return list(full[:at])
    return []


def token_windows(
    tokenizer: Any, text: str, context: int, limit: int | None = None
) -> list[Tensor]:
    """Consecutive windows of `context` tokens, [1, context] each; at most `limit`.

    Every window begins as a text does for this tokenizer. A rest shorter than a window is left out.
    """
    require(context >= 2, f"context {context} must be at least 2 tokens", UsageError)
    require(limit is None or limit >= 1, f"limit {limit} must be at least 1 window", UsageError)
    begin = beginning_ids(tokenizer)
    step = context - len(begin)
    ids = text_ids(tokenizer, text)
    count = len(ids) // step
    require(
        count >= 1,
        f"the text has {len(ids)} tokens, fewer than one window of {step}: lower the context "
        "or give more text",
        UsageError,
    )
    count = count if limit is None else min(count, limit)
    return [torch.tensor([begin + ids[i * step : (i + 1) * step]]) for i in range(count)]


def measure_text(
    base: nn.Module,
    variants: Sequence[Variant],
    windows: Sequence[Tensor],
    progress: Progress | None = None,
) -> list[TextResult]:
    """Every variant against `base`, whose forward runs once per window."""
    measures: list[list[TokenMeasures]] = [[] for _ in variants]
    for done, ids in enumerate(windows):
        labels = ids[0, 1:]
        baseline = logits(base, Variant(name="bf16"), ids)[0, :-1]
        for variant, kept in zip(variants, measures, strict=True):
            plain = variant.model is None and variant.fmt is None
            measured = baseline if plain else logits(base, variant, ids)[0, :-1]
            kept.append(compare_logits(baseline, measured, labels))
        if progress is not None:
            progress("text", done + 1, len(windows))
    return [TextResult(overall=summarize(kept), buckets=by_context(kept)) for kept in measures]


def evaluate_text(
    base: nn.Module,
    tokenizer: Any,
    text: str,
    variant: Variant,
    context: int = 2048,
    limit: int | None = None,
) -> TextResult:
    """One variant against the unquantised `base`; at most `limit` windows of `context` tokens."""
    return measure_text(base, [variant], token_windows(tokenizer, text, context, limit))[0]
