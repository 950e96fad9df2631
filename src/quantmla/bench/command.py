"""`quantmla bench`: case after case, each printed and stored as soon as it is measured."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantmla.bench import append, decode
from quantmla.bench.baselines import find_libraries, load
from quantmla.bench.results import Table, merged, read_rows, result_path, write
from quantmla.errors import UsageError, require
from quantmla.kernels import BACKENDS
from quantmla.progress import say
from quantmla.quant.format import parse_format
from quantmla.workdir import check_makeable

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    what: str  # "decode" or "append"
    backends: Sequence[str] | None = None  # None: all that can, but for the reference
    formats: Sequence[str] | None = None
    cases: str = "musts"
    seconds: float | None = None
    libraries: Path | None = None
    output: Path


def check(request: Request) -> None:
    """Refuses what cannot be run, before anything is built."""
    for name in request.backends or ():
        require(name in BACKENDS, f"backend {name!r} is not one of {tuple(BACKENDS)}", UsageError)
    for name in request.formats or ():
        parse_format(name)
    require(
        request.libraries is None or request.libraries.is_dir(),
        f"no folder at {request.libraries}",
        UsageError,
    )
    check_makeable(request.output, request.output)
    require(
        torch.cuda.is_available(),
        f"bench {request.what} needs a GPU, and torch sees none",
        UsageError,
    )


def bench_and_store(request: Request) -> Path:
    """Measures, prints and stores rows; the file's path.

    Rows of earlier runs with the same GPU and versions stay in the file, unless measured again.
    Raises UsageError without a GPU, for unknown names, and if a named backend cannot.
    """
    check(request)
    path = result_path(request.output, request.what)
    kept = read_rows(path)
    table = Table(decode.COLUMNS if request.what == "decode" else append.COLUMNS)
    rows: list[Row] = []
    stored = 0
    try:
        for new in _limited(_cases(request), request.seconds):
            rows += new
            try:
                write(path, merged(kept, rows, table.keys))
                stored = len(rows)
            finally:  # a full disk does not cost what was measured
                table.show(new)
    finally:
        if stored:
            say(f"{stored} rows are in {path}", True)
    return path


def _cases(request: Request) -> Iterator[tuple[str, Any]]:
    """Names of cases, and what measures them."""
    if request.what == "append":
        return append.cases(request.formats or append.FORMATS, request.backends)
    libraries = find_libraries(request.libraries)
    baselines = load(libraries)
    if not libraries:
        say("no vLLM kernels found: the baseline is torch's bf16 products", True)
    return decode.cases(
        decode.shapes_of(request.cases, request.formats), request.backends, baselines
    )


def _limited(cases: Iterator[tuple[str, Any]], seconds: float | None) -> Iterator[list[Row]]:
    """Rows of each case; those that the time does not allow are named."""
    end = None if seconds is None else time.monotonic() + seconds
    left = []
    for name, measure in cases:
        if end is not None and time.monotonic() >= end:
            left.append(name)
            continue
        yield measure()
        torch.cuda.empty_cache()
    if left:
        say(f"not measured, {seconds:g} seconds are over: {', '.join(left)}", True)
