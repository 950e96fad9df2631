"""What an engine has to find out for a step of decoding, each in one launch.

B sequences, T token rows, W entries of a window table. Every small operation of torch is a launch
of its own, and a step of decoding is short.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quantmla.kernels.problem import Tokens
from quantmla.kernels.triton.launch import Launch

ROWS = 128  # of a program


class WindowRule(NamedTuple):
    """Tokens, except where the name says entries."""

    recent_window: int
    page_size: int
    window_page_size: int
    entries: int  # of a table that a step's tokens may read


@triton.jit(do_not_specialize=["queries", "num_rows"])
def locate_rows(lengths, slots, sequences, positions, queries, num_rows, BLOCK: tl.constexpr):
    """The last `queries` tokens of sequence after sequence; a row without a slot is padding."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    sequence = row // queries
    slot = tl.load(slots + row, mask=inside, other=-1)
    length = tl.load(lengths + sequence, mask=inside, other=0)
    tl.store(sequences + row, tl.where(slot >= 0, sequence, -1), mask=inside)
    tl.store(positions + row, length - queries + row % queries, mask=inside)


@triton.jit(do_not_specialize=["stride_table", "width"])
def find_starts(
    lengths,
    query_starts,
    table,
    starts,
    stride_table,
    width,
    RECENT: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The end of the last entry without a page among those that a sequence's step may read."""
    b = tl.program_id(0)
    queries = tl.load(query_starts + b + 1) - tl.load(query_starts + b)
    context = tl.load(lengths + b) - queries
    old = tl.maximum(context - RECENT, 0) // PAGE * PAGE
    index = tl.arange(0, BLOCK)
    column = old // SIZE + index
    place = table + b.to(tl.int64) * stride_table + tl.minimum(column, width - 1)
    entry = tl.load(place, mask=index < ENTRIES, other=1)
    lost = (index < ENTRIES) & (entry == 0) & (column * SIZE < context)
    end = tl.max(tl.where(lost, (column + 1) * SIZE, 0), 0)
    tl.store(starts + b, (end + PAGE - 1) // PAGE * PAGE)


def locate_launch(lengths_B: Tensor, slots_T: Tensor, queries: int, out: Tokens) -> Launch:
    """Sequence and position of every row, where every sequence has `queries` of them."""
    num_rows = slots_T.shape[0]
    return Launch(
        kernel=locate_rows,
        grid=(triton.cdiv(num_rows, ROWS),),
        args={
            "lengths": lengths_B,
            "slots": slots_T,
            "sequences": out.sequence_T,
            "positions": out.position_T,
            "queries": queries,
            "num_rows": num_rows,
        },
        constants={"BLOCK": ROWS},
    )


def starts_launch(
    lengths_B: Tensor, query_starts: Tensor, table_BW: Tensor, rule: WindowRule, out_B: Tensor
) -> Launch:
    """For every sequence, the page border before which its recent window was lost, or 0.

    `query_starts` are the first row of every sequence and the end of the last, int32 [B + 1].
    """
    return Launch(
        kernel=find_starts,
        grid=(out_B.shape[0],),
        args={
            "lengths": lengths_B,
            "query_starts": query_starts,
            "table": table_BW,
            "starts": out_B,
            "stride_table": table_BW.stride(0),
            "width": table_BW.shape[1],
        },
        constants={
            "RECENT": rule.recent_window,
            "PAGE": rule.page_size,
            "SIZE": rule.window_page_size,
            "ENTRIES": rule.entries,
            "BLOCK": triton.next_power_of_2(rule.entries),
        },
        num_warps=1,
    )
