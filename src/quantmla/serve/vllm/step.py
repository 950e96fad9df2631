"""What one step of the engine needs to know beside vLLM's own metadata; nothing waits for the GPU.

On a GPU, what every step of decoding needs is found by kernels.triton.step in one launch each.

B sequences of the step, T token rows, W entries of a window table, M tokens of a window page.
"""

from typing import NamedTuple

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


class Padding(NamedTuple):
    """Decodes of different query lengths side by side: the kernel's queries are the last S tokens.

    Rows before a sequence's own ones are made up, and what they give is not read.
    """

    row_BS: Tensor  # which row each query is
    query_T: Tensor  # where each row's result is, among B * S


def pad_queries(starts_B: Tensor, ends_B: Tensor, sequence_T: Tensor, longest: int) -> Padding:
    """`starts_B` and `ends_B` bound each sequence's rows; S is `longest`."""
    row_BS = ends_B[:, None] - longest + torch.arange(longest, device=ends_B.device)
    row_BS = torch.maximum(row_BS, starts_B[:, None])
    row_T = torch.arange(len(sequence_T), device=ends_B.device)
    query_T = (sequence_T + 1) * longest - ends_B[sequence_T] + row_T
    return Padding(row_BS, query_T)


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
