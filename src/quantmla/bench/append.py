"""Appending: single tokens of many requests, and packing of whole prompts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from quantmla.bench.inputs import synthetic_cache
from quantmla.bench.timing import interleaved_us
from quantmla.cache.view import CacheView
from quantmla.errors import UsageError, require
from quantmla.kernels import BACKENDS
from quantmla.kernels.api import Rows, Tokens, append
from quantmla.quant.format import parse_format
from quantmla.quant.layout import bf16_row_bytes

Row = dict[str, Any]


def _random_rows(count: int) -> Rows:
    latent = torch.randn(count, 512, device="cuda").to(torch.bfloat16)
    return Rows(latent, torch.randn(count, 64, device="cuda").to(torch.bfloat16))


def _one_token_each(batch: int, position: int) -> Tokens:
    sequence = torch.arange(batch, dtype=torch.int32, device="cuda")
    return Tokens(sequence, torch.full_like(sequence, position))


def _prompt(count: int) -> Tokens:
    position = torch.arange(count, dtype=torch.int32, device="cuda")
    return Tokens(torch.zeros_like(position), position)


def _bytes(count: int, pages: int, view: CacheView) -> int:
    """Read once and written to the window; a page is read again where only its end is new."""
    row = bf16_row_bytes(512, 64)
    read = max(count, pages * view.fmt.page_size) * row
    return read + count * row + pages * view.layout.page_bytes


def measure(
    fmt_name: str, backends: Sequence[str], batch: int = 256, repetitions: int = 30
) -> list[Row]:
    """One token each, with no page or every page complete; prompts of several lengths."""
    fmt = parse_format(fmt_name)
    many = synthetic_cache(1024, batch, fmt)
    prompts = (8192, 65536)
    one = synthetic_cache(max(prompts), 1, fmt, window_width=max(prompts) // 64)  # keeps all rows
    jobs = {
        f"tokens_{batch}": (_one_token_each(batch, 1000), many, 0),
        f"tokens_{batch}_all_pack": (_one_token_each(batch, 1023), many, batch),
        **{f"prompt_{n}": (_prompt(n), one, n // fmt.page_size) for n in prompts},
    }
    rows: list[Row] = []
    for job, (tokens, view, pages) in jobs.items():
        data = _random_rows(len(tokens.position_T))
        calls = {name: partial(append, data, tokens, view, backend=name) for name in backends}
        moved = _bytes(len(tokens.position_T), pages, view)
        for name, us in interleaved_us(calls, repetitions).items():
            rate = round(moved / us / 1e3, 1)
            rows.append(
                {
                    "backend": name,
                    "format": fmt_name,
                    "job": job,
                    "us": round(us, 2),
                    "bytes": moved,
                    "gb_per_s": rate,
                }
            )
    return rows


def bench_append(
    formats: Sequence[str] = ("c4r4", "c2r4"),
    backends: Sequence[str] | None = None,
    repetitions: int = 30,
) -> list[Row]:
    require(torch.cuda.is_available(), "bench append needs a GPU, and torch sees none", UsageError)
    names = (
        [name for name in BACKENDS if name != "reference"] if backends is None else list(backends)
    )
    return [row for fmt in formats for row in measure(fmt, names, repetitions=repetitions)]
