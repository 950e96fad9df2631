"""Left padding of a batch: what its attention mask says, and whether position ids agree with it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantmla.errors import UsageError, require


def left_padding(attention_mask: Tensor | None) -> list[int] | None:
    """Padding tokens before each row's first real token; None without a mask."""
    if attention_mask is None:
        return None
    require(
        isinstance(attention_mask, Tensor)
        and attention_mask.ndim == 2
        and attention_mask.numel() > 0,
        "attention_mask must be 2-D with padding on the left only, a tensor that is not empty",
        UsageError,
    )
    mask = attention_mask == 1
    other = attention_mask[~mask & (attention_mask != 0)]  # NaN is not 0 either
    require(
        not len(other),
        f"attention_mask has {other[:1].tolist()}, and must hold 0 for padding and 1 for all else",
        UsageError,
    )
    require(
        bool((mask.int().diff(dim=1) >= 0).all()) and bool(mask[:, -1].all()),
        "attention_mask must be 2-D with padding on the left only",
        UsageError,
    )
    return torch.sum(~mask, dim=1).tolist()


def check_positions(
    positions: Any, padding: Sequence[int], seen: int, size: int, masked: bool
) -> None:
    """Refuses `size` tokens after `seen` whose position ids tell another padding than the mask.

    Positions that count every column, as a forward without position ids has them, tell nothing.
    """
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[1] != size:
        return
    end, last = seen + size, positions[:, -1].tolist()
    last = last * len(padding) if len(last) == 1 else last
    if len(last) != len(padding) or min(last) >= end - 1:
        return
    for row, (hidden, position) in enumerate(zip(padding, last, strict=True)):
        told = end - 1 - position
        if told < 0 or (hidden >= end and position <= 1):  # nothing but padding so far
            continue
        require(
            masked or told == 0,
            "the batch seems to be left-padded (positions end before its length): "
            "give QuantMLACache the attention_mask",
            UsageError,
        )
        require(
            told == hidden,
            f"attention_mask has {hidden} padding tokens in row {row}, but by the position ids "
            f"there are {told}: give QuantMLACache the whole mask of the prompt",
            UsageError,
        )
