"""Append, decode and gather in torch, written to be read: what every kernel is tested against.

Letters as in cache/view.py. On any device, for every format that has bytes. A query in float64 is
computed in float64: that is the oracle. It waits for the device and holds all of a sequence's rows.
"""

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels.plan import unprepared
from quantmla.kernels.problem import DecodeQuery, Problem, Rows, Tokens
from quantmla.mla.attention import causal_mask
from quantmla.mla.partial import Partial, attend
from quantmla.quant.page import pack_pages, unpack_pages


def why_not(problem: Problem) -> str | None:
    del problem  # it can do all that passes the checks
    return None


def _window_page(view: CacheView, tokens: Tokens) -> Tensor:
    number = tokens.position_T // view.window_page_size % view.window_table_BW.shape[1]
    return view.window_table_BW[tokens.sequence_T, number]


def _packed_rows(view: CacheView, tokens: Tokens) -> Tensor:
    size = view.fmt.page_size
    page_T = view.block_table_BJ[tokens.sequence_T, tokens.position_T // size]
    page_J, where_T = torch.unique(page_T, return_inverse=True)
    latent, k_rope = unpack_pages(
        view.pages_JY[page_J], view.kv_lora_rank, view.qk_rope_head_dim, view.fmt
    )
    return torch.cat((latent, k_rope), dim=-1)[where_T, tokens.position_T % size]


def read_rows(tokens: Tokens, view: CacheView) -> Tensor:
    """Tokens (no padding) as decode reads them, float32 [T, C]."""
    sequence, position = tokens
    sink = position < view.sinks_B()[sequence]
    packed = ~sink & (position < view.packed_length_B()[sequence])
    page = torch.where(sink, view.sink_pages_B[sequence], _window_page(view, tokens))
    row = torch.where(sink, position, position % view.window_page_size)
    rows = torch.empty(len(position), view.window_pages_JMC.shape[-1], device=position.device)
    rows[~packed] = view.window_pages_JMC[page[~packed], row[~packed]].float()
    rows[packed] = _packed_rows(view, Tokens(sequence[packed], position[packed]))
    return rows


def decode(
    query: DecodeQuery,
    view: CacheView,
    num_splits: int | None = None,
    out_BSNR: Tensor | None = None,
) -> Partial:
    """One sequence after the other; `num_splits` changes nothing here."""
    del num_splits
    dtype = torch.promote_types(query.latent_BSNR.dtype, torch.float32)
    q_BSNC = torch.cat((query.latent_BSNR, query.rope_BSNE), dim=-1).to(dtype)
    outs, lses = [], []
    for b, length in enumerate(view.lengths_B.tolist()):
        position = torch.arange(length, device=q_BSNC.device)
        rows = read_rows(Tokens(torch.full_like(position, b), position), view).to(dtype)
        scores = query.softmax_scale * torch.einsum("snc,tc->nst", q_BSNC[b], rows)
        mask = causal_mask(q_BSNC.shape[1], length, q_BSNC.device)
        scores = scores.masked_fill(~mask, -torch.inf)
        part = attend(scores[None], rows[None, :, : view.kv_lora_rank])
        outs.append(part.out_BSNR)
        lses.append(part.lse_BSN)
    if not outs:  # of no sequences
        empty_BSN = q_BSNC[..., 0].float()
        new = torch.empty_like(query.latent_BSNR)
        return Partial(new if out_BSNR is None else out_BSNR, empty_BSN)
    new = torch.cat(outs).to(query.latent_BSNR.dtype)
    return Partial(new if out_BSNR is None else out_BSNR.copy_(new), torch.cat(lses))


def append(rows: Rows, tokens: Tokens, view: CacheView) -> None:
    """Writes the window first, then packs the pages that end in these rows."""
    rows_TC = torch.cat(rows, dim=-1)
    real = tokens.sequence_T >= 0
    _write_window(rows_TC[real], Tokens(*(x[real] for x in tokens)), view)
    ends = real & (tokens.position_T % view.fmt.page_size == view.fmt.page_size - 1)
    _pack(rows_TC, tokens, ends.nonzero()[:, 0], view)


def _write_window(rows_TC: Tensor, tokens: Tokens, view: CacheView) -> None:
    page = _window_page(view, tokens)
    kept = page >= 0
    view.window_pages_JMC[page[kept], tokens.position_T[kept] % view.window_page_size] = rows_TC[
        kept
    ]
    sink_page = view.sink_pages_B[tokens.sequence_T]
    sink = (tokens.position_T < view.fmt.num_sink_tokens) & (sink_page >= 0)
    view.window_pages_JMC[sink_page[sink], tokens.position_T[sink]] = rows_TC[sink]


def _pack(rows_TC: Tensor, tokens: Tokens, last_J: Tensor, view: CacheView) -> None:
    """Packs the pages whose last tokens are the rows `last_J`."""
    size = view.fmt.page_size
    sequence_J, position_J = tokens.sequence_T[last_J], tokens.position_T[last_J]
    page_J = view.block_table_BJ[sequence_J, position_J // size]
    kept = page_J >= 0
    back_L = torch.arange(size - 1, -1, -1, device=last_J.device)
    row_JL = last_J[kept, None] - back_L
    position_JL = position_J[kept, None] - back_L
    sequence_JL = sequence_J[kept, None].expand_as(position_JL)
    here = (row_JL >= 0) & (tokens.sequence_T[row_JL.clamp(min=0)] == sequence_JL)
    old = _window_page(view, Tokens(sequence_JL, position_JL))
    old_rows = view.window_pages_JMC[old.clamp(min=0), position_JL % view.window_page_size]
    pages_JLC = torch.where(here[..., None], rows_TC[row_JL.clamp(min=0)], old_rows)
    latent, k_rope = pages_JLC.split((view.kv_lora_rank, view.qk_rope_head_dim), dim=-1)
    view.pages_JY[page_J[kept]] = pack_pages(latent, k_rope, view.fmt)


def gather(tokens: Tokens, view: CacheView, out_TC: Tensor) -> None:
    real = tokens.sequence_T >= 0
    out_TC[real] = read_rows(Tokens(*(x[real] for x in tokens)), view).to(torch.bfloat16)


plan_decode, plan_append, plan_gather = unprepared(decode, append, gather)
