"""What one step of the engine needs to know beside vLLM's own metadata; nothing waits for the GPU.

On a GPU, what every step of decoding needs is found by kernels.triton.step in one launch each.

B sequences of the step, T token rows, W entries of a window table, M tokens of a window page.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantmla.kernels.api import Tokens
from quantmla.serve.vllm.pool import PoolLayout

NULL_PAGE = 0  # vLLM's number of the page that holds nothing


def locate_tokens(ends_B: Tensor, lengths_B: Tensor, slots_T: Tensor, row_T: Tensor) -> Tokens:
    """Sequence and position of every row; rows without a slot are padding.

    `ends_B` is one past each sequence's last row, `lengths_B` its tokens with those of the step.
    """
    sequence = torch.searchsorted(ends_B, row_T, right=True, out_int32=True)
    sequence.clamp_(max=len(ends_B) - 1)  # rows after the last sequence
    position = (lengths_B - ends_B)[sequence] + row_T
    return Tokens(torch.where(slots_T >= 0, sequence, -1), position)


def locate_decodes(lengths_B: Tensor, slots_T: Tensor, row_T: Tensor, queries: int) -> Tokens:
    """The same where every sequence has `queries` rows."""
    sequence = row_T // queries
    position = lengths_B[sequence] - queries + row_T % queries
    return Tokens(torch.where(slots_T >= 0, sequence, -1), position)


def write_decodes(
    lengths_B: Tensor, slots_T: Tensor, row_T: Tensor, queries: int, out: Tokens
) -> None:
    """`locate_decodes` into tensors that stay where they are."""
    if out.sequence_T.is_cuda:
        from quantmla.kernels.triton.step import locate_launch

        locate_launch(lengths_B, slots_T, queries, out).run()
        return
    write_tokens(locate_decodes(lengths_B, slots_T, row_T, queries), out)


def write_tokens(found: Tokens, out: Tokens) -> None:
    for kept, new in zip(out, found, strict=True):
        kept.copy_(new)


class FirstLayer:
    """What the layers of a step share on the device, written by the first of them that runs.

    Where the step is a CUDA graph this is a part of the graph, and the host launches nothing.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._write, self._name = write, ""

    def enter(self, name: str) -> None:
        """Writes again where the first layer comes again: a trial run may be before a capture."""
        self._name = self._name or name
        if name == self._name:
            self._write()


class Call(NamedTuple):
    """Sequences that the decode kernel takes together, S tokens of each: the last, or a piece.

    Rows before a sequence's own ones are made up: what they give goes to a row after all others.
    """

    sequences: slice | Tensor  # B of the step; one that comes in pieces is there for each
    rows: slice | Tensor  # of the queries: B * S
    batch: int  # B
    after: Tensor | None = None  # tokens of the sequence after these, int32 [B]; None: no tokens
    places: Tensor | None = None  # of the rows in the step's result, [B * S]; None: `rows`, a slice

    def to(self, device: torch.device) -> "Call":
        """Copies that nothing waits for."""
        rows = _moved(self.rows, device)
        places = rows if self.places is self.rows else _moved(self.places, device)
        assert not isinstance(places, slice)
        return Call(
            _moved(self.sequences, device), rows, self.batch, _moved(self.after, device), places
        )


Index = TypeVar("Index", slice | Tensor, Tensor | None)


def _moved(index: Index, device: torch.device) -> Index:
    if not isinstance(index, Tensor) or device.type == "cpu":
        return index
    return index.pin_memory().to(device, non_blocking=True)


def split_queries(ascending: Sequence[int], decode_length: int, most: int) -> list[range]:
    """Which sequences go to the kernel together, their query lengths being in ascending order.

    Decodes, which have up to `decode_length` tokens, never wait for a longer one. Longer ones are
    padded among themselves as long as this makes no more than `most` queries.
    """
    first = bisect_right(ascending, decode_length)
    found = [range(first)] if first else []
    while first < len(ascending):
        last = first + 1
        while last < len(ascending) and (last + 1 - first) * ascending[last] <= most:
            last += 1
        found.append(range(first, last))
        first = last
    return found


class Pieces(NamedTuple):
    """Rows of sequences, each in pieces one after the other; P in all."""

    bounds: NDArray[np.int64]  # begin and end of the pieces' rows [P + 1]
    sequence_P: NDArray[np.int64]
    after_P: NDArray[np.int64]  # rows of the sequence after the piece


def divide(bounds: NDArray[np.int64], piece: int) -> Pieces:
    """Sequences whose rows begin and end at `bounds` [B + 1], in pieces of up to `piece` rows."""
    count_B = -(-np.diff(bounds) // piece)
    sequence_P = np.arange(len(count_B)).repeat(count_B)
    number_P = np.arange(len(sequence_P)) - (count_B.cumsum() - count_B)[sequence_P]
    start_P = bounds[sequence_P] + piece * number_P
    after_P = (bounds[sequence_P + 1] - start_P - piece).clip(min=0)
    return Pieces(np.append(start_P, bounds[-1]), sequence_P, after_P)


def plan_calls(bounds: Tensor, decode_length: int, most: int, piece: int) -> tuple[Call, ...]:
    """Of sequences in any order whose rows begin and end at `bounds` [B + 1]; all on the CPU.

    Those of more than `piece` rows are there in pieces; every row is in one call. Numpy, for it is
    quicker with a few numbers and every step that is no graph waits for this.
    """
    begin_P, sequence_P, after_P = divide(bounds.numpy().astype(np.int64), piece)
    length_P = np.diff(begin_P)
    order_P = length_P.argsort(kind="stable")
    ascending = length_P[order_P].tolist()
    calls = []
    for together in split_queries(ascending, decode_length, most):
        chosen = np.sort(order_P[together.start : together.stop])  # as they lie
        longest = ascending[together.stop - 1]
        rows, places = _rows(begin_P[chosen], begin_P[chosen + 1], longest, begin_P[-1])
        calls.append(
            Call(
                sequences=_index(sequence_P[chosen]),
                rows=rows,
                batch=len(chosen),
                after=_tensor(after_P[chosen].astype(np.int32)) if after_P[chosen].any() else None,
                places=places,
            )
        )
    return tuple(calls)


def _rows(
    start_B: NDArray[np.int64], end_B: NDArray[np.int64], longest: int, past: int
) -> tuple[slice | Tensor, Tensor | None]:
    """The last `longest` rows up to each end, none of them before its start, and their places.

    That of rows which are made up is `past`.
    """
    row_BS = end_B[:, None] - longest + np.arange(longest)
    made_up_BS = row_BS < start_B[:, None]
    rows = _index(np.maximum(row_BS, start_B[:, None]).ravel())
    if isinstance(rows, slice):
        return rows, None
    if not made_up_BS.any():
        return rows, rows
    return rows, _tensor(np.where(made_up_BS, past, row_BS).ravel())


def _index(index: NDArray[np.int64]) -> slice | Tensor:
    """A slice where it will do: the engine's own tables and queries are read then."""
    first = int(index[0])
    if bool((np.diff(index) == 1).all()):
        return slice(first, first + len(index))
    return _tensor(index)


def _tensor(numbers: NDArray[Any]) -> Tensor:
    return torch.from_numpy(numbers)


def kept_only(table_BW: Tensor) -> Tensor:
    """The table with -1 for pages that hold nothing: rows that go there are dropped."""
    return torch.where(table_BW == NULL_PAGE, -1, table_BW)


def window_entries(layout: PoolLayout) -> int:
    """Of a table from the first page that a step may read on."""
    return layout.kept_tokens // layout.window_page_size + 1


def window_starts(context_B: Tensor, table_BW: Tensor, layout: PoolLayout) -> Tensor:
    """For every sequence, the page border before which the recent window was lost, or 0.

    `context_B` is its tokens before this step. A reused prefix may come without the rows of its
    window; then the table has null pages up to the prefix's end. Older null pages do not matter.
    """
    size, page = layout.window_page_size, layout.fmt.page_size
    old = (context_B - layout.recent_window).clamp(min=0) // page * page
    columns = torch.arange(window_entries(layout), device=table_BW.device)
    column_BK = (old // size)[:, None] + columns
    entry_BK = table_BW.gather(1, column_BK.clamp(max=table_BW.shape[1] - 1))
    lost_BK = (entry_BK == NULL_PAGE) & (column_BK * size < context_B[:, None])
    end_B = torch.where(lost_BK, (column_BK + 1) * size, 0).amax(dim=1)
    return ((end_B + page - 1) // page * page).to(torch.int32)


def write_window_starts(
    lengths_B: Tensor, bounds: Tensor, table_BW: Tensor, layout: PoolLayout, out_B: Tensor
) -> None:
    """`window_starts` of sequences whose rows begin and end at `bounds` [B + 1]."""
    if out_B.is_cuda:
        from quantmla.kernels.triton.step import WindowRule, starts_launch

        rule = WindowRule(
            recent_window=layout.recent_window,
            page_size=layout.fmt.page_size,
            window_page_size=layout.window_page_size,
            entries=window_entries(layout),
        )
        starts_launch(lengths_B, bounds, table_BW, rule, out_B).run()
        return
    context_B = lengths_B - bounds.diff()
    out_B.copy_(window_starts(context_B, table_BW, layout))


def context_tokens(
    sequence_T: Tensor, starts_B: Tensor, first_row_B: Tensor, row_T: Tensor
) -> Tokens:
    """Tokens of one chunk of context, laid out sequence after sequence from `first_row_B` on.

    `starts_B` is the position of each sequence's first token in the chunk.
    """
    return Tokens(sequence_T, (starts_B - first_row_B)[sequence_T] + row_T)


def without_context(query_bounds: Tensor, context_bounds: Tensor, row_T: Tensor) -> Tensor:
    """Which query rows are of sequences that have no token in a chunk of context, bool [T].

    Queries and tokens of sequence b begin and end at `query_bounds` and `context_bounds` [B + 1].
    """
    sequence_T = torch.searchsorted(query_bounds[1:], row_T, right=True)
    return (context_bounds.diff() == 0)[sequence_T.clamp_(max=len(context_bounds) - 2)]


class ContextChunk(NamedTuple):
    """A part of the prefills' context that is gathered and attended to at once."""

    tokens: Tokens
    rows_TC: Tensor  # where they are gathered: the engine's workspace, the same for every layer
    empty_T: Tensor | None  # `without_context` of the prefills' queries; None: there are none
