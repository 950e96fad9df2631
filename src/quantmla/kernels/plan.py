"""Plans: calls that differ in nothing but where their pools and their rows or queries lie.

The layers of a step have the same tables, lengths, shapes and strides. A plan is checked, its
backend chosen and what does not change prepared once; a run compares a few facts and launches. The
view and the tokens live as long as the plan, and a run reads what they hold then. Queries and rows
are not kept, and what a run returns is its own, or lies where it was told to write.

A plan serves one thread at a time. It holds no scratch memory, so it does not matter whether it is
made or run while a CUDA graph is being captured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.errors import UsageError, require
from quantmla.kernels.problem import (
    ROW_ALIGNMENT,
    DecodeQuery,
    Rows,
    Tokens,
    check_out,
    is_aligned,
)
from quantmla.mla.partial import Partial
from quantmla.quant.layout import ALIGNMENT


class Like(NamedTuple):
    """What a tensor that takes a planned one's place has in common with it."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    alignment: int  # bytes, of the address; 1 where the planned one had none to keep


Likes = tuple[Like, ...]


def likes(*named: tuple[str, Tensor]) -> Likes:
    """Of tensors that passed the checks of problem.py."""
    found = []
    for name, x in named:
        wanted = ALIGNMENT if name == "pages_JY" and x.is_cuda else ROW_ALIGNMENT
        alignment = wanted if is_aligned(x, wanted) else 1
        found.append(Like(name, x.shape, x.stride(), x.dtype, x.device, alignment))
    return tuple(found)


def fits(planned: Likes, tensors: tuple[Tensor, ...]) -> bool:
    """Makes no sentence and no tensor: it runs for every layer of every step."""
    for (_, shape, stride, dtype, device, alignment), x in zip(planned, tensors, strict=True):
        if (
            x.shape != shape
            or x.stride() != stride
            or x.dtype is not dtype
            or x.device != device
            or x.data_ptr() % alignment
        ):
            return False
    return True


def require_fit(planned: Likes, tensors: tuple[Tensor, ...]) -> None:
    """UsageError that names the first difference."""
    if fits(planned, tensors):
        return
    for (name, shape, stride, dtype, device, alignment), x in zip(planned, tensors, strict=True):
        facts = (
            ("has shape", list(x.shape), list(shape)),
            ("has strides", list(x.stride()), list(stride)),
            ("is", x.dtype, dtype),
            ("is on", x.device, device),
        )
        for verb, have, want in facts:
            require(have == want, f"{name} {verb} {have}, the plan is for {want}", UsageError)
        require(
            x.data_ptr() % alignment == 0,
            f"{name} starts at address {x.data_ptr()}, the plan is for multiples of {alignment}",
            UsageError,
        )


class DecodeLaunch(Protocol):
    """A backend's decode. It writes every row of `out_BSNR`, or of a new tensor where that is None.

    What is given has the query's shape and dtype, is dense, and lies apart from all that is read.
    """

    def __call__(
        self,
        query: DecodeQuery,
        pages_JY: Tensor,
        window_pages_JMC: Tensor,
        out_BSNR: Tensor | None = None,
        /,
    ) -> Partial: ...


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """`api.decode` for queries and pools like those that it was made with.

    `launch` is a run without the comparison, for a caller that has asked `takes`, and whose output,
    if it gives one, passes `problem.check_out`.
    """

    likes: Likes
    softmax_scale: float
    launch: DecodeLaunch

    def takes(self, query: DecodeQuery, pages_JY: Tensor, window_pages_JMC: Tensor) -> bool:
        latent, rope, scale = query
        tensors = (latent, rope, pages_JY, window_pages_JMC)
        return scale == self.softmax_scale and fits(self.likes, tensors)

    def run(
        self,
        query: DecodeQuery,
        pages_JY: Tensor,
        window_pages_JMC: Tensor,
        out_BSNR: Tensor | None = None,
    ) -> Partial:
        """As `api.decode`: new tensors, but for the output where `out_BSNR` is given.

        That is contiguous and has the query's shape, dtype and device; it is written and returned.
        UsageError where something is not as planned; then nothing is written.
        """
        latent, rope, scale = query
        require_fit(self.likes, (latent, rope, pages_JY, window_pages_JMC))
        require(
            scale == self.softmax_scale,
            f"softmax_scale is {scale}, the plan is for {self.softmax_scale}",
            UsageError,
        )
        if out_BSNR is not None:
            check_out(out_BSNR, query)
        return self.launch(query, pages_JY, window_pages_JMC, out_BSNR)


@dataclass(frozen=True, slots=True)
class AppendPlan:
    """`api.append` of rows and to pools like those that it was made with; see DecodePlan."""

    likes: Likes
    launch: Callable[[Rows, Tensor, Tensor], None]

    def takes(self, rows: Rows, pages_JY: Tensor, window_pages_JMC: Tensor) -> bool:
        return fits(self.likes, (*rows, pages_JY, window_pages_JMC))

    def run(self, rows: Rows, pages_JY: Tensor, window_pages_JMC: Tensor) -> None:
        """UsageError where something is not as planned; then nothing is written."""
        require_fit(self.likes, (*rows, pages_JY, window_pages_JMC))
        self.launch(rows, pages_JY, window_pages_JMC)


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """`api.gather` from pools and to rows like those that it was made with; see DecodePlan."""

    likes: Likes
    launch: Callable[[Tensor, Tensor, Tensor], None]

    def takes(self, out_TC: Tensor, pages_JY: Tensor, window_pages_JMC: Tensor) -> bool:
        return fits(self.likes, (out_TC, pages_JY, window_pages_JMC))

    def run(self, out_TC: Tensor, pages_JY: Tensor, window_pages_JMC: Tensor) -> None:
        """UsageError where something is not as planned; then nothing is written."""
        require_fit(self.likes, (out_TC, pages_JY, window_pages_JMC))
        self.launch(out_TC, pages_JY, window_pages_JMC)


PlanDecode = Callable[[DecodeQuery, CacheView, int | None], DecodeLaunch]
PlanAppend = Callable[[Rows, Tokens, CacheView], Callable[[Rows, Tensor, Tensor], None]]
PlanGather = Callable[[Tokens, CacheView, Tensor], Callable[[Tensor, Tensor, Tensor], None]]


def unprepared(
    decode: Callable[[DecodeQuery, CacheView, int | None, Tensor | None], Partial],
    append: Callable[[Rows, Tokens, CacheView], None],
    gather: Callable[[Tokens, CacheView, Tensor], None],
) -> tuple[PlanDecode, PlanAppend, PlanGather]:
    """`plan_decode`, `plan_append` and `plan_gather` of a backend that prepares nothing."""
    return (
        lambda _, view, num_splits: (
            lambda query, pages, window_pages, out=None: decode(
                query, view.with_pools(pages, window_pages), num_splits, out
            )
        ),
        lambda _, tokens, view: lambda rows, *pools: append(rows, tokens, view.with_pools(*pools)),
        lambda tokens, view, _: (
            lambda out_TC, *pools: gather(tokens, view.with_pools(*pools), out_TC)
        ),
    )
