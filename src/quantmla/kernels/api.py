"""Append, decode and gather: the only way in, whatever the backend.

A backend is a module with four functions:

    why_not(problem) -> str | None          None: it can; else the reason, as the end of a sentence
    decode(query, view, num_splits) -> Partial
    append(rows, tokens, view) -> None
    gather(tokens, view, out_TC) -> None

None of them waits for the device, so all of them can be captured in a CUDA graph and replayed with
other lengths, tables and tokens (the reference is the exception: it is there to be read).
"""

from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.errors import UsageError, require
from quantmla.kernels import BACKENDS
from quantmla.kernels.problem import (
    DecodeQuery,
    Problem,
    Rows,
    Tokens,
    append_problem,
    decode_problem,
    gather_problem,
)
from quantmla.mla.partial import Partial

__all__ = ["DecodeQuery", "Rows", "Tokens", "append", "choose", "decode", "gather"]


def decode(
    query: DecodeQuery, view: CacheView, *, backend: str = "auto", num_splits: int | None = None
) -> Partial:
    """Attention of the last S tokens of every sequence over all its tokens, one global softmax.

    The S tokens must be appended already. `num_splits` is into how many parts a sequence's packed
    pages are divided over thread blocks; None lets the backend choose, by the widths of the tables
    and never by lengths, so that results are reproducible. Output has the query's dtype; LSE is
    float32, natural log, softmax scale included. A query that sees no token gets (0, -inf).
    """
    problem = decode_problem(query, view)
    require(
        num_splits is None or num_splits >= 1,
        f"num_splits {num_splits} must be at least 1",
        UsageError,
    )
    return choose(problem, backend).decode(query, view, num_splits)


def append(rows: Rows, tokens: Tokens, view: CacheView, *, backend: str = "auto") -> None:
    """Writes tokens into the bf16 window, and packs every page whose last token is among them.

    Rows of one sequence are consecutive and in order, none twice. A page's other rows are taken
    from this call, or else from the window. Sinks are written to the sink page too. A page or
    window page with a number below 0 is skipped. `view.lengths_B` is not read. Bytes depend on a
    page's own tokens alone: the same for every backend and every way to cut a prompt into calls.
    """
    choose(append_problem(rows, tokens, view), backend).append(rows, tokens, view)


def gather(tokens: Tokens, view: CacheView, out_TC: Tensor, *, backend: str = "auto") -> None:
    """Writes each token as decode reads it to its row of `out_TC`, rounded to bfloat16.

    Latent first, then the rope key. Rows of padding keep what they hold.
    """
    choose(gather_problem(tokens, view, out_TC), backend).gather(tokens, view, out_TC)


@cache
def choose(problem: Problem, backend: str) -> ModuleType:
    """The backend module for a problem: the one that is named, or the first that can.

    "auto" never takes the reference on a GPU: it is far slower, so it must be named.
    """
    allowed = ("auto", *BACKENDS)
    require(backend in allowed, f"backend {backend!r} is not one of {allowed}", UsageError)
    if backend != "auto":
        module = import_module(BACKENDS[backend])
        reason = module.why_not(problem)
        require(
            reason is None, f"backend {backend!r} cannot {problem.operation}: {reason}", UsageError
        )
        return module
    reasons = []
    for name, path in BACKENDS.items():
        if name == "reference" and problem.platform != "cpu":
            reasons.append("reference: only when named")
            continue
        module = import_module(path)
        reason = module.why_not(problem)
        if reason is None:
            return module
        reasons.append(f"{name}: {reason}")
    raise UsageError(f"no backend can {problem.operation} here ({'; '.join(reasons)})")
