"""Causal attention in which each query sees each key either exact or as read from packed bytes.

B sequences, N heads, T tokens (queries and keys), D key width (content, then E rope channels),
V value width, L page size. Query q sees key k exact iff k is a sink or k >= first_recent(q + 1).
Queries are taken in blocks of whole pages, so memory is bounded by one block's scores.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quantmla.quant.format import CacheFormat
from quantmla.quant.roundtrip import read_rope

BLOCK_TOKENS = 256
SEGMENT_BLOCKS = 8  # blocks whose unfinished pages are quantised together


class BothForms(NamedTuple):
    """Keys and values of one layer, in the dtype to compute in, and the stored rope keys."""

    exact_key_BNTD: Tensor
    exact_value_BNTV: Tensor
    read_key_BNTD: Tensor
    read_value_BNTV: Tensor
    stored_rope_BTE: Tensor  # before quantising, in the cache's coordinates


RestoreRope = Callable[[Tensor], Tensor]  # stored rope keys to those that the queries meet


def attend(
    query_BNTD: Tensor, forms: BothForms, fmt: CacheFormat, scale: float, restore: RestoreRope
) -> Tensor:
    """Attention outputs [B, N, T, V]; every query as decoding would have seen it."""
    length, page = query_BNTD.shape[2], fmt.page_size
    block = max(1, BLOCK_TOKENS // page) * page
    dependent = prefix_dependent(fmt, forms.stored_rope_BTE.shape[-1])
    parts = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        query = query_BNTD[:, :, start:stop] * scale
        scores = query @ forms.read_key_BNTD[:, :, :stop].transpose(2, 3)
        if dependent:
            at = start % (SEGMENT_BLOCKS * block)
            if at == 0:
                segment = forms.stored_rope_BTE[:, start : start + SEGMENT_BLOCKS * block]
                own_rope = restore(_own_page_rope(segment, fmt)).to(query.dtype)
            _own_page_scores(scores, query, forms, own_rope[:, at // page : (at + block) // page])
        parts.append(_block_output(scores, query, forms, fmt))
    return torch.cat(parts, dim=2)


def prefix_dependent(fmt: CacheFormat, rope_channels: int) -> bool:
    """Whether a token of an unfinished page reads differently once later tokens arrive."""
    centred = fmt.rope_centring == "page" and fmt.rope_bits < 16 and rope_channels > 0
    return centred and fmt.recent_window is None


def _block_output(
    scores_BNST: Tensor, query_BNSD: Tensor, forms: BothForms, fmt: CacheFormat
) -> Tensor:
    size, stop = scores_BNST.shape[2:]
    start, device = stop - size, scores_BNST.device
    queries = torch.arange(start, stop, device=device)
    future = torch.arange(start, stop, device=device) > queries[:, None]
    columns, exact_SC = _exact_columns(start, stop, fmt, device)
    if len(columns):
        direct = query_BNSD @ forms.exact_key_BNTD[:, :, columns].transpose(2, 3)
        scores_BNST[..., columns] = torch.where(exact_SC, direct, scores_BNST[..., columns])
    scores_BNST[..., start:].masked_fill_(future, -torch.inf)
    p_BNST = torch.softmax(scores_BNST, dim=-1)
    if not len(columns):
        return p_BNST @ forms.read_value_BNTV[:, :, :stop]
    p_exact = p_BNST[..., columns] * exact_SC
    p_BNST[..., columns] -= p_exact
    out = p_BNST @ forms.read_value_BNTV[:, :, :stop]
    return out + p_exact @ forms.exact_value_BNTV[:, :, columns]


def _exact_columns(
    start: int, stop: int, fmt: CacheFormat, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys that some query of [start, stop) sees exact, and which query sees which so, [S, C]."""
    if fmt.recent_window is None:
        empty = torch.empty(0, dtype=torch.long, device=device)
        return empty, empty.bool()[None]
    first_S = torch.tensor([fmt.first_recent(q + 1) for q in range(start, stop)], device=device)
    oldest = fmt.first_recent(start + 1)
    sinks = min(fmt.num_sink_tokens, oldest)
    columns = torch.cat(
        (torch.arange(sinks, device=device), torch.arange(oldest, stop, device=device))
    )
    return columns, (columns < fmt.num_sink_tokens) | (columns >= first_S[:, None])


def _own_page_scores(
    scores_BNST: Tensor, query_BNSD: Tensor, forms: BothForms, rope_BJLKE: Tensor
) -> None:
    """Replaces the scores of keys in the query's own page by those of the page as it was then."""
    size, stop = scores_BNST.shape[2:]
    page, width = rope_BJLKE.shape[2], rope_BJLKE.shape[-1]
    for j in range(rope_BJLKE.shape[1]):
        rows = slice(j * page, min((j + 1) * page, size))
        keys = slice(stop - size + rows.start, stop - size + rows.stop)
        n = rows.stop - rows.start
        query = query_BNSD[:, :, rows]
        content = query[..., :-width] @ forms.read_key_BNTD[:, :, keys, :-width].transpose(2, 3)
        rope = torch.einsum("bnle,blke->bnlk", query[..., -width:], rope_BJLKE[:, j, :n, :n])
        scores_BNST[:, :, rows, keys] = content + rope


def _own_page_rope(stored_STE: Tensor, fmt: CacheFormat) -> Tensor:
    """[B, J, L, L, E]: key k of page j as read when the page held its first l + 1 tokens.

    Keys after the query (k > l) are zero; tokens beyond the end of the text are padding.
    """
    size, page = stored_STE.shape[1], fmt.page_size
    pages = -(-size // page)
    padded = torch.nn.functional.pad(stored_STE, (0, 0, 0, pages * page - size))
    padded = padded.unflatten(1, (pages, page))
    out = padded.new_zeros(padded.shape[0], pages, page, page, padded.shape[-1])
    for held in range(1, page + 1):
        out[:, :, held - 1, :held] = read_rope(padded[:, :, :held], fmt)
    return out
