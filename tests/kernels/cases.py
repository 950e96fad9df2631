"""Decode cases for every backend, and the caches they run on.

A cache is filled by the reference; unused bytes are poison: NaN rows, 0xff pages (NaN scales), and
table entries far outside the pools.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.kernels import reference
from quantmla.kernels.problem import DecodeQuery, Rows, Tokens
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.quant.layout import page_layout

DEAD = 2**30  # a table entry that must not be used
BORDERS = (0, 1, 63, 64, 65, 127, 128, 129, 130, 131, 132, 133, 191, 192, 193, 4096)
RAGGED = (0, 5, 300, 1000)


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    lengths: tuple[int, ...] = RAGGED
    fmt: str = "c4r4"
    rank: int = 512
    rope: int = 64
    heads: int = 16
    query_len: int = 1
    row_scale: float = 1.0
    num_splits: int | None = None
    window_page: int = 64
    ring: bool = False  # a window table that is reused, not as wide as the sequence
    sinks: int = 4
    lost_sinks: bool = False  # sequence 0 has no sink page
    lost_window: bool = False  # bf16 rows of sequence 0 are gone up to its last page border
    pool_stride: int = 1  # pages lie so many pages apart
    changes: dict = field(default_factory=dict)  # of the format


def _grid() -> list[Case]:
    cases = [Case(name="borders", lengths=BORDERS)]
    cases += [Case(name="borders_c2r4", lengths=BORDERS, fmt="c2r4")]
    cases += [Case(name=f"heads_{n}", heads=n) for n in (1, 4, 5, 12, 16, 20, 64, 128)]
    cases += [
        Case(name=f"query_{s}", query_len=s, heads=5, lengths=(0, 3, 64, 200, 777))
        for s in range(1, 9)
    ]
    cases += [Case(name=f"scale_{x}", row_scale=x) for x in (0.3, 1.7, 1e-3, 300.0)]
    cases += [
        Case(name=f"splits_{k}", num_splits=k, lengths=(193, 4096, 2111)) for k in (1, 3, 16, 64)
    ]
    for rank in (128, 256, 512):
        for rope in (32, 64):
            for fmt in ("c4r4", "c2r4"):
                cases.append(
                    Case(name=f"{fmt}_{rank}_{rope}", fmt=fmt, rank=rank, rope=rope, query_len=2)
                )
    cases += [Case(name=f"window_page_{m}", window_page=m) for m in (8, 16)]
    cases += [
        Case(name="ring", ring=True, window_page=16),
        Case(name="no_sinks", sinks=0),
        Case(name="lost_sinks", lost_sinks=True, lengths=(900, 3, 300)),
        Case(name="lost_window", lost_window=True, lengths=(900, 3, 300)),
        Case(name="strided_pool", pool_stride=3),
        Case(name="short_window", changes={"recent_window": 16}, query_len=3, heads=8),
    ]
    return cases


CASES = _grid()
LONG = [
    Case(name="64k", lengths=(65536, 40000)),
    Case(name="64k_c2r4_query_4", lengths=(65536, 1), fmt="c2r4", query_len=4),
    Case(name="chunk_of_17", lengths=(3, 17, 200, 2061), query_len=17, window_page=16),
    Case(name="chunk_of_64", lengths=(5, 64, 192, 2112), query_len=64, window_page=16),
    Case(name="chunk_of_64_c2r4", lengths=(64, 2111), fmt="c2r4", query_len=64, window_page=8),
]
SMALL = [  # for the interpreter
    Case(
        name="small",
        rank=128,
        rope=32,
        heads=5,
        query_len=2,
        lengths=(0, 1, 65, 330),
        window_page=16,
    ),
    Case(
        name="small_c2r4", fmt="c2r4", rank=128, rope=64, heads=3, lengths=(193, 400), num_splits=3
    ),
    Case(
        name="small_ring",
        rank=128,
        rope=32,
        heads=2,
        lengths=(260,),
        ring=True,
        window_page=16,
        lost_sinks=True,
    ),
    Case(
        name="small_lost",
        rank=128,
        rope=64,
        heads=20,
        lengths=(300,),
        lost_window=True,
        pool_stride=2,
    ),
]


def format_of(case: Case) -> CacheFormat:
    return parse_format(case.fmt, num_sink_tokens=case.sinks, **case.changes)


def random_rows(count: int, case: Case, generator: torch.Generator) -> Rows:
    """Latents with a few strong channels; rope keys with a bias per channel, as real ones have."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    gain = torch.exp(0.5 * normal(case.rank))
    latent = normal(count, case.rank) * gain / gain.square().mean().sqrt()
    k_rope = 0.5 * normal(count, case.rope) + 2 * normal(case.rope)
    return Rows(*((x * case.row_scale).to(torch.bfloat16) for x in (latent, k_rope)))


def all_tokens(lengths: tuple[int, ...]) -> Tokens:
    sequence = torch.cat([torch.full((n,), b) for b, n in enumerate(lengths)])
    position = torch.cat([torch.arange(n) for n in lengths])
    return Tokens(sequence.to(torch.int32), position.to(torch.int32))


def _window_tables(case: Case, fmt: CacheFormat) -> tuple[Tensor, int]:
    """int32 [B, W], -1 where a page is not kept, and the number of pages in use."""
    page, used, rows = case.window_page, 0, []
    width = -(-256 // page) if case.ring else max(case.lengths) // page + 2
    for length in case.lengths:
        numbers = range(fmt.first_recent(length) // page, -(-length // page))
        row = torch.full((width,), -1, dtype=torch.int32)
        for number in numbers:
            row[number % width] = used
            used += 1
        rows.append(row)
    return torch.stack(rows), used


def empty_cache(case: Case, generator: torch.Generator) -> CacheView:
    """Pools full of poison, shuffled tables; window entries that nothing needs are -1."""
    fmt, batch = format_of(case), len(case.lengths)
    layout = page_layout(case.rank, case.rope, fmt)
    counts = [n // fmt.page_size for n in case.lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).to(torch.int32)
    table = torch.full((batch, max(counts) + 2), DEAD, dtype=torch.int32)
    for b, count in enumerate(counts):
        table[b, :count] = order[sum(counts[:b]) : sum(counts[:b]) + count]
    window_table, used = _window_tables(case, fmt)
    shuffled = torch.randperm(used + batch + 2, generator=generator).to(torch.int32)
    window_table = torch.where(window_table < 0, -1, shuffled[window_table.clamp(min=0).long()])
    pool = torch.full((len(order), case.pool_stride, layout.page_bytes), 255, dtype=torch.uint8)
    window = torch.full((len(shuffled), case.window_page, case.rank + case.rope), torch.nan)
    return CacheView(
        fmt=fmt,
        kv_lora_rank=case.rank,
        pages_JY=pool[:, case.pool_stride - 1],
        block_table_BJ=table,
        lengths_B=torch.tensor(case.lengths, dtype=torch.int32),
        window_pages_JMC=window.to(torch.bfloat16),
        window_table_BW=window_table,
        sink_pages_B=shuffled[used : used + batch],
    )


def _lose(case: Case, view: CacheView) -> CacheView:
    if case.lost_sinks:
        sink_pages = view.sink_pages_B.clone()
        view.window_pages_JMC[sink_pages[0]] = torch.nan
        sink_pages[0] = -1
        view = replace(view, sink_pages_B=sink_pages)
    if case.lost_window:
        start = torch.zeros_like(view.lengths_B)
        start[0] = case.lengths[0] // view.fmt.page_size * view.fmt.page_size
        gone = torch.arange(view.fmt.first_recent(case.lengths[0]), int(start[0]))
        page = view.window_table_BW[0, gone // case.window_page]
        view.window_pages_JMC[page, gone % case.window_page] = torch.nan
        view = replace(view, window_start_B=start)
    return view


def kill_unused(view: CacheView) -> CacheView:
    """Window table entries that are not in use become dangerous."""
    table = torch.where(view.window_table_BW < 0, DEAD, view.window_table_BW)
    return replace(view, window_table_BW=table)


def keep_all_rows(view: CacheView) -> CacheView:
    """Every window table entry has a page: for caches that are filled step by step."""
    table, pool = view.window_table_BW, view.window_pages_JMC
    missing = table < 0
    fresh = torch.arange(pool.shape[0], pool.shape[0] + int(missing.sum()), dtype=torch.int32)
    room = torch.full((len(fresh), *pool.shape[1:]), torch.nan, dtype=pool.dtype)
    table = table.masked_scatter(missing, fresh)
    return replace(view, window_table_BW=table, window_pages_JMC=torch.cat((pool, room)))


def to_device(view: CacheView, device: str) -> CacheView:
    """A copy, with the same distance between pages."""
    names = ("block_table_BJ", "lengths_B", "window_pages_JMC", "window_table_BW", "sink_pages_B")
    moved = {name: getattr(view, name).to(device, copy=True) for name in names}
    start, pool = view.window_start_B, view.pages_JY
    whole = pool.as_strided((pool.shape[0], pool.stride(0)), (pool.stride(0), 1), 0)
    return replace(
        view,
        pages_JY=whole.to(device, copy=True)[:, pool.stride(0) - pool.shape[1] :],
        window_start_B=None if start is None else start.to(device),
        **moved,
    )


def build(case: Case, device: str = "cpu", seed: int = 0) -> tuple[DecodeQuery, CacheView]:
    """A filled cache and queries whose scores spread about 1."""
    generator = torch.Generator().manual_seed(seed)
    view = empty_cache(case, generator)
    tokens = all_tokens(case.lengths)
    reference.append(random_rows(len(tokens.position_T), case, generator), tokens, view)
    view = kill_unused(_lose(case, view))
    shape = (len(case.lengths), case.query_len, case.heads)
    latent = torch.randn(*shape, case.rank, generator=generator)
    rope = torch.randn(*shape, case.rope, generator=generator)
    scale = 1 / (case.row_scale * (case.rank + case.rope) ** 0.5)
    query = DecodeQuery(
        latent.to(torch.bfloat16).to(device), rope.to(torch.bfloat16).to(device), scale
    )
    return query, to_device(view, device)
