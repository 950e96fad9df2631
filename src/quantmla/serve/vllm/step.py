"""What one step of the engine needs to know beside vLLM's own metadata; nothing waits for the GPU.

On a GPU, what every step of decoding needs is found by kernels.triton.step in one launch each.

B sequences of the step, T token rows, W entries of a window table, M tokens of a window page.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
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


def locate_decodes(lengths_B: Tensor, slots_T: Tensor, row_T: Tensor) -> Tokens:
    """The same where every sequence has one row."""
    return Tokens(torch.where(slots_T >= 0, row_T, -1), lengths_B - 1)


def write_decodes(lengths_B: Tensor, slots_T: Tensor, row_T: Tensor, out: Tokens) -> None:
    """`locate_decodes` into tensors that stay where they are."""
    if out.sequence_T.is_cuda:
        from quantmla.kernels.triton.step import locate_launch

        locate_launch(lengths_B, slots_T, out).run()
        return
    for kept, new in zip(out, locate_decodes(lengths_B, slots_T, row_T), strict=True):
        kept.copy_(new)


class Call(NamedTuple):
    """Sequences that the decode kernel takes together, the last S tokens of each.

    Rows before a sequence's own ones are made up, and what they give is not read.
    """

    sequences: slice | Tensor  # B of the step
    rows: slice | Tensor  # of the queries: B * S
    batch: int  # B


class Calls(NamedTuple):
    """Decodes of a step, and the rows' places in what all calls give, one after the other."""

    calls: tuple[Call, ...]
    query_T: Tensor | None  # None: as they are

    def to(self, device: torch.device) -> "Calls":
        """Copies that nothing waits for."""
        calls = (
            Call(_moved(call.sequences, device), _moved(call.rows, device), call.batch)
            for call in self.calls
        )
        return Calls(tuple(calls), _moved(self.query_T, device))


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


def plan_calls(bounds: Tensor, decode_length: int, most: int) -> Calls:
    """Of sequences in any order whose rows begin and end at `bounds` [B + 1]; all on the CPU."""
    length_B = bounds.diff()
    order_B = length_B.argsort(stable=True)
    ascending = length_B[order_B].tolist()
    calls, after, end_B = [], 0, torch.empty_like(length_B)
    for together in split_queries(ascending, decode_length, most):
        chosen = order_B[together.start : together.stop].sort().values  # as they lie
        longest = ascending[together.stop - 1]
        calls.append(_call(chosen, bounds, longest))
        end_B[chosen] = after + longest * torch.arange(1, len(chosen) + 1, dtype=end_B.dtype)
        after += longest * len(chosen)
    row_T = torch.arange(int(bounds[-1] - bounds[0]))
    query_T = (end_B - bounds[1:]).repeat_interleave(length_B) + row_T
    in_order = after == len(row_T) and torch.equal(query_T, row_T)
    return Calls(tuple(calls), None if in_order else query_T)


def _call(chosen_B: Tensor, bounds: Tensor, longest: int) -> Call:
    """Slices where they will do: the engine's own tables and queries are read then."""
    start_B, end_B = bounds[chosen_B], bounds[chosen_B + 1]
    first, count = int(chosen_B[0]), len(chosen_B)
    side_by_side = bool((chosen_B.diff() == 1).all())
    sequences = slice(first, first + count) if side_by_side else chosen_B
    if side_by_side and int(end_B[-1] - start_B[0]) == count * longest:
        return Call(sequences, slice(int(start_B[0]), int(end_B[-1])), count)
    row_BS = torch.maximum(end_B[:, None] - longest + torch.arange(longest), start_B[:, None])
    return Call(sequences, row_BS.flatten(), count)


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
