"""Decode attention against the BF16 kernels, on the same GPU in the same run."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantmla.bench.baselines import BASELINES, Bf16Cache, bf16_cache, load
from quantmla.bench.inputs import synthetic_cache, synthetic_query
from quantmla.bench.timing import interleaved_us
from quantmla.cache.view import CacheView
from quantmla.errors import UsageError, require
from quantmla.kernels import BACKENDS
from quantmla.kernels.api import Tokens, decode, gather
from quantmla.kernels.problem import DecodeQuery
from quantmla.quant.format import parse_format

Row = dict[str, Any]
DEQUANTIZED = "gather_then_"  # before a baseline's name: unpack all to bf16, then attend


class Shape(NamedTuple):
    heads: int
    query_len: int
    context: int
    batch: int
    format: str = "c4r4"


GOALS = (
    Shape(16, 1, 32768, 32),
    Shape(16, 1, 131072, 8),
    Shape(16, 1, 8192, 32),
    Shape(16, 1, 131072, 1),
    Shape(16, 1, 32768, 1),
    Shape(32, 1, 32768, 32),
    Shape(64, 1, 32768, 32),
    Shape(128, 1, 32768, 32),
    Shape(16, 1, 32768, 32, "c2r4"),
)
SWEEP = tuple(Shape(16, 1, 1024 * 4**i, batch) for batch in (8, 32) for i in range(6))


def _gather_first(
    query: DecodeQuery,
    view: CacheView,
    cache: Bf16Cache,
    attend: Callable[[DecodeQuery, Bf16Cache], Callable],
) -> Callable[[], object]:
    """Unpacks every token to bf16 and runs a baseline over the result."""
    batch, context = view.lengths_B.shape[0], int(view.lengths_B[0])
    width = cache.block_table_BJ.shape[1]
    token = torch.arange(batch * width * 64, dtype=torch.int32, device="cuda")
    sequence, position = token // (width * 64), token % (width * 64)
    tokens = Tokens(torch.where(position < context, sequence, -1), position)
    table = torch.arange(batch * width, dtype=torch.int32, device="cuda").view(batch, width)
    ordered = Bf16Cache(pages_JLC=cache.pages_JLC, block_table_BJ=table, lengths_B=cache.lengths_B)
    call = attend(query, ordered)

    def run() -> object:
        gather(tokens, view, cache.pages_JLC.flatten(0, 1))
        return call()

    return run


def measure(
    shape: Shape, backends: Sequence[str], baselines: Sequence[str], repetitions: int = 30
) -> list[Row]:
    """One row per backend. `baseline` is the faster of the BF16 kernels; all are in `others_us`."""
    view = synthetic_cache(shape.context, shape.batch, parse_format(shape.format))
    query = synthetic_query(shape.batch, shape.query_len, shape.heads)
    calls: dict[str, Callable[[], object]] = {
        name: partial(decode, query, view, backend=name) for name in backends
    }
    if baselines:
        cache = bf16_cache(shape.context, shape.batch, view.block_table_BJ)
        calls |= {name: BASELINES[name](query, cache) for name in baselines}
        last = baselines[-1]
        calls[DEQUANTIZED + last] = _gather_first(query, view, cache, BASELINES[last])
    times = interleaved_us(calls, repetitions)
    rivals = {name: times[name] for name in baselines}
    best = min(rivals, key=rivals.__getitem__, default=None)
    others = {name: round(us, 2) for name, us in times.items() if name not in backends}
    rows = []
    for name in backends:
        row = {"backend": name, **shape._asdict(), "us": round(times[name], 2), "baseline": best}
        if best is not None:
            row |= {
                "baseline_us": round(rivals[best], 2),
                "ratio": round(rivals[best] / times[name], 3),
            }
        rows.append(row | {"others_us": others})
    return rows


def bench_decode(
    shapes: Sequence[Shape],
    libraries: Sequence[Path] = (),
    backends: Sequence[str] | None = None,
    repetitions: int = 30,
) -> list[Row]:
    """Rows of all shapes; without libraries there is no baseline and no ratio."""
    require(torch.cuda.is_available(), "bench decode needs a GPU, and torch sees none", UsageError)
    names = (
        [name for name in BACKENDS if name != "reference"] if backends is None else list(backends)
    )
    baselines = load(list(libraries)) if libraries else []
    rows: list[Row] = []
    for shape in shapes:
        rows += measure(shape, names, baselines, repetitions)
        torch.cuda.empty_cache()
    return rows
