"""Decode attention against the BF16 kernels, on the same GPU in the same run."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantmla.bench.able import able
from quantmla.bench.baselines import BASELINES, TORCH, Bf16Cache, bf16_cache, load
from quantmla.bench.inputs import RANK, ROPE, synthetic_cache, synthetic_query
from quantmla.bench.timing import FLUSH_BYTES, interleaved_us
from quantmla.cache.view import CacheView
from quantmla.errors import UsageError, require
from quantmla.kernels.api import Tokens, decode, gather
from quantmla.kernels.problem import DecodeQuery, decode_problem
from quantmla.progress import say
from quantmla.quant.format import parse_format
from quantmla.quant.layout import bf16_row_bytes, page_layout

Row = dict[str, Any]
DEQUANTIZED = "gather_then_"  # before a baseline's name: unpack all to bf16, then attend
COLUMNS = (
    ("backend", "backend", -9),
    ("format", "format", -6),
    ("heads", "heads", 5),
    ("query", "query_len", 5),
    ("context", "context", 9),
    ("batch", "batch", 5),
    ("us", "us", 10),
    ("baseline", "baseline", -14),
    ("its us", "baseline_us", 10),
    ("ratio", "ratio", 6),
    ("unpack, attend: us", "dequantize_then_attend_us", 18),
)


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
DRAFTS = (Shape(16, 2, 32768, 32), Shape(16, 4, 32768, 32))  # speculative decoding
SWEEP = tuple(Shape(16, 1, 1024 * 4**i, batch) for batch in (8, 32) for i in range(6))
CASES = {"musts": GOALS, "paper": SWEEP, "all": GOALS + DRAFTS + SWEEP}


def shapes_of(cases: str, formats: Sequence[str] | None) -> list[Shape]:
    """Shapes of a set of cases. Given formats are each measured at all of its sizes."""
    shapes = CASES[cases]
    if formats is None:
        return list(shapes)
    names = [parse_format(name).name for name in formats]
    return list(dict.fromkeys(shape._replace(format=name) for name in names for shape in shapes))


def needed_bytes(shape: Shape, baselines: Sequence[str]) -> int:
    """Device memory of a shape: packed pages, the bf16 rows beside them, and what is flushed."""
    page = page_layout(RANK, ROPE, parse_format(shape.format)).page_bytes
    tokens = shape.context * shape.batch
    bf16 = bf16_row_bytes(RANK, ROPE) if baselines else 0
    # torch makes scores, masks them, and makes probabilities
    scores = 6 * shape.heads * shape.query_len if TORCH in baselines else 0
    return tokens * (page // 64 + bf16 + scores + 8) + FLUSH_BYTES + (2 << 30)


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
    shape: Shape, backends: Sequence[str] | None, baselines: Sequence[str], repetitions: int = 30
) -> list[Row]:
    """One row per backend. `baseline` is the faster of the BF16 kernels; all are in `others_us`."""
    view = synthetic_cache(shape.context, shape.batch, parse_format(shape.format))
    query = synthetic_query(shape.batch, shape.query_len, shape.heads)
    names = able(decode_problem(query, view), backends)
    calls: dict[str, Callable[[], object]] = {
        name: partial(decode, query, view, backend=name) for name in names
    }
    unpacked = None
    if baselines:
        cache = bf16_cache(shape.context, shape.batch, view.block_table_BJ)
        calls |= {name: BASELINES[name](query, cache) for name in baselines}
        unpacked = DEQUANTIZED + baselines[-1]
        calls[unpacked] = _gather_first(query, view, cache, BASELINES[baselines[-1]])
    times = {name: round(us, 2) for name, us in interleaved_us(calls, repetitions).items()}
    return _rows(shape, names, baselines, times)


def _rows(
    shape: Shape, names: Sequence[str], baselines: Sequence[str], times: dict[str, float]
) -> list[Row]:
    best = min(baselines, key=times.__getitem__, default=None)
    others = {name: us for name, us in times.items() if name not in names}
    rows = []
    for name in names:
        row: Row = {"backend": name, "format": shape.format, **shape._asdict(), "us": times[name]}
        row |= {"baseline": best, "baseline_us": None, "ratio": None}
        if best is not None:
            row |= {"baseline_us": times[best], "ratio": round(times[best] / times[name], 3)}
            row["dequantize_then_attend_us"] = times[DEQUANTIZED + baselines[-1]]
        rows.append(row | {"others_us": others})
    return rows


def cases(
    shapes: Sequence[Shape], backends: Sequence[str] | None, baselines: Sequence[str]
) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """Every shape that fits the GPU's memory, and what measures it."""
    for shape in shapes:
        need, free = needed_bytes(shape, baselines), torch.cuda.mem_get_info()[0]
        name = f"{shape.heads} heads x {shape.query_len}, {shape.context} x {shape.batch}"
        if need > free:
            say(f"left out: {name} needs {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free", True)
            continue
        yield f"{name}, {shape.format}", partial(measure, shape, backends, baselines)


def bench_decode(
    shapes: Sequence[Shape],
    libraries: Sequence[Path] = (),
    backends: Sequence[str] | None = None,
    repetitions: int = 30,
) -> list[Row]:
    """Rows of all shapes; without libraries torch's own products are the baseline."""
    require(torch.cuda.is_available(), "bench decode needs a GPU, and torch sees none", UsageError)
    baselines = load(libraries)
    rows: list[Row] = []
    for shape in shapes:
        rows += measure(shape, backends, baselines, repetitions)
        torch.cuda.empty_cache()
    return rows
