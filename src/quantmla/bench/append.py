"""Appending: single tokens of many requests, packing of whole prompts; and gathering."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from quantmla.bench.able import able
from quantmla.bench.inputs import RANK, ROPE, synthetic_cache, synthetic_query
from quantmla.bench.timing import interleaved_us
from quantmla.cache.view import CacheView
from quantmla.errors import UsageError, require
from quantmla.kernels.api import Rows, Tokens, append, decode, gather
from quantmla.kernels.problem import append_problem, gather_problem
from quantmla.quant.format import parse_format
from quantmla.quant.layout import bf16_row_bytes

Row = dict[str, Any]
FORMATS = ("c4r4", "c2r4")
REQUESTS = 256  # that append a token each
LAYERS = 61  # of DeepSeek-V3: so many appends in one graph
FED_CONTEXT, FED_HEADS = 8192, 16  # of the decode attention that the appends feed
PROMPTS = (8192, 65536)
GATHERED = 1 << 20  # tokens
COPY = "copy"
SMALLEST = "smallest_launch"  # one element is set to zero: what any launch costs
COLUMNS = (
    ("backend", "backend", -9),
    ("format", "format", -6),
    ("job", "job", -24),
    ("us", "us", 10),
    ("bytes", "bytes", 12),
    ("GB/s", "gb_per_s", 8),
    ("of a copy", "share_of_copy", 9),
    ("us a layer", "us_per_layer", 10),
    ("of decode", "share_of_decode", 9),
)


class Job(NamedTuple):
    name: str
    tokens: Tokens
    view: CacheView
    pages: int = 0  # that are completed
    read_back: int = 0  # their rows that came before
    layers: int = 1


def random_rows(count: int) -> Rows:
    latent = torch.randn(count, RANK, device="cuda").to(torch.bfloat16)
    return Rows(latent, torch.randn(count, ROPE, device="cuda").to(torch.bfloat16))


def _one_token_each(batch: int, position: int) -> Tokens:
    sequence = torch.arange(batch, dtype=torch.int32, device="cuda")
    return Tokens(sequence, torch.full_like(sequence, position))


def _prompt(count: int) -> Tokens:
    position = torch.arange(count, dtype=torch.int32, device="cuda")
    return Tokens(torch.zeros_like(position), position)


def _bytes(job: Job) -> int:
    """Rows are read once and written to the window; a page's earlier rows are read again."""
    rows = 2 * len(job.tokens.position_T) + job.read_back
    page = job.view.layout.page_bytes
    return job.layers * (rows * bf16_row_bytes(RANK, ROPE) + job.pages * page)


def append_jobs(fmt_name: str, batch: int = REQUESTS) -> Iterator[Job]:
    fmt = parse_format(fmt_name)
    many = synthetic_cache(1024, batch, fmt)
    before = fmt.page_size - 1
    none, every = _one_token_each(batch, 1000), _one_token_each(batch, 1023)
    # as in use: one token in 64 ends a page
    few = every.sequence_T % fmt.page_size == 0
    some = Tokens(none.sequence_T, torch.where(few, every.position_T, none.position_T))
    ends = -(-batch // fmt.page_size)
    yield Job(f"tokens_{batch}", none, many)
    yield Job(f"tokens_{batch}_in_use_x{LAYERS}", some, many, ends, before * ends, LAYERS)
    yield Job(f"tokens_{batch}_all_pack", every, many, batch, before * batch)
    longest = max(PROMPTS)
    one = synthetic_cache(longest, 1, fmt, window_width=longest // 64)  # keeps all rows
    for count in PROMPTS:
        yield Job(f"prompt_{count}", _prompt(count), one, count // fmt.page_size)


def _copy(num_bytes: int) -> Callable[[], object]:
    """torch's copy of half as many bytes, which moves so many: the rate that memory allows."""
    source = torch.randint(0, 256, (num_bytes // 2,), dtype=torch.uint8, device="cuda")
    return partial(torch.empty_like(source).copy_, source)


def _repeated(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def _measure_job(job: Job, backends: Sequence[str] | None, repetitions: int) -> list[Row]:
    data, fmt = random_rows(len(job.tokens.position_T)), job.view.fmt
    names = able(append_problem(data, job.tokens, job.view), backends)
    calls: dict[str, Callable[[], object]] = {
        name: partial(
            _repeated, partial(append, data, job.tokens, job.view, backend=name), job.layers
        )
        for name in names
    }
    if job.layers > 1:
        batch = len(job.tokens.position_T)
        fed = synthetic_cache(FED_CONTEXT, batch, fmt)
        calls["decode"] = partial(decode, synthetic_query(batch, 1, FED_HEADS), fed)
        scratch = torch.ones(1, device="cuda")
        calls[SMALLEST] = scratch.zero_
    elif job.pages:
        calls[COPY] = _copy(_bytes(job))
    times = interleaved_us(calls, repetitions)
    rows = [_row(name, fmt.name, job.name, _bytes(job), times) for name in names]
    if job.layers > 1:
        for row, name in zip(rows, names, strict=True):
            layer = times[name] / job.layers
            row |= {
                "us_per_layer": round(layer, 2),
                "decode": {"context": FED_CONTEXT, "heads": FED_HEADS},
                "decode_us": round(times["decode"], 2),
                "share_of_decode": round(layer / times["decode"], 4),
                "smallest_launch_us": round(times[SMALLEST], 2),
            }
    return rows


def _row(backend: str, fmt: str, job: str, moved: int, times: dict[str, float]) -> Row:
    us = times[backend]
    row: Row = {"backend": backend, "format": fmt, "job": job, "us": round(us, 2)}
    row |= {"bytes": moved, "gb_per_s": round(moved / us / 1e3, 1)}
    if COPY in times:
        row |= {"copy_us": round(times[COPY], 2), "share_of_copy": round(times[COPY] / us, 3)}
    return row


def _measure_gather(fmt_name: str, backends: Sequence[str] | None, repetitions: int) -> list[Row]:
    fmt = parse_format(fmt_name)
    view = synthetic_cache(GATHERED // 32, 32, fmt)
    token = torch.arange(GATHERED, dtype=torch.int32, device="cuda")
    tokens = Tokens(token // (GATHERED // 32), token % (GATHERED // 32))
    out = torch.empty(GATHERED, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    names = able(gather_problem(tokens, view, out), backends)
    page = view.layout.page_bytes // fmt.page_size
    moved = GATHERED * (page + bf16_row_bytes(RANK, ROPE))
    calls: dict[str, Callable[[], object]] = {
        name: partial(gather, tokens, view, out, backend=name) for name in names
    }
    times = interleaved_us(calls | {COPY: _copy(moved)}, repetitions)
    return [_row(name, fmt.name, f"gather_{GATHERED}", moved, times) for name in names]


def measure(
    fmt_name: str,
    backends: Sequence[str] | None = None,
    batch: int = REQUESTS,
    repetitions: int = 30,
) -> list[Row]:
    """One token each, with no page or every page complete; prompts of several lengths; gather."""
    rows: list[Row] = []
    for job in append_jobs(fmt_name, batch):
        rows += _measure_job(job, backends, repetitions)
    torch.cuda.empty_cache()
    return rows + _measure_gather(fmt_name, backends, repetitions)


def cases(
    formats: Sequence[str], backends: Sequence[str] | None
) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """One case a format."""
    for name in formats:
        yield name, partial(measure, name, backends)


def bench_append(
    formats: Sequence[str] = FORMATS,
    backends: Sequence[str] | None = None,
    repetitions: int = 30,
) -> list[Row]:
    require(torch.cuda.is_available(), "bench append needs a GPU, and torch sees none", UsageError)
    return [row for fmt in formats for row in measure(fmt, backends, repetitions=repetitions)]
