"""Append, decode and gather: the only way in, whatever the backend.

A backend is a module with four functions:

    why_not(problem) -> str | None          None: it can; else the reason, as the end of a sentence
    plan_decode(query, view, num_splits) -> plan.DecodeLaunch
    plan_append(rows, tokens, view) -> Callable[[Rows, pages, window_pages], None]
    plan_gather(tokens, view, out_TC) -> Callable[[out_TC, pages, window_pages], None]

The last three see checked inputs and launch nothing. What they return is called any number of
times, with inputs like theirs; it may keep the view, but no rows or queries. plan.unprepared makes
all three for a backend that prepares nothing.

No call waits for the device, so all of them can be captured in a CUDA graph and replayed with other
lengths, tables and tokens (the reference is the exception: it is there to be read).
"""

from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.errors import UsageError, require
from quantmla.kernels import BACKENDS
from quantmla.kernels.plan import AppendPlan, DecodePlan, GatherPlan, likes
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

__all__ = [
    "AppendPlan",
    "DecodePlan",
    "DecodeQuery",
    "GatherPlan",
    "Rows",
    "Tokens",
    "append",
    "choose",
    "decode",
    "gather",
    "plan_append",
    "plan_decode",
    "plan_gather",
]


def decode(
    query: DecodeQuery, view: CacheView, *, backend: str = "auto", num_splits: int | None = None
) -> Partial:
    """Attention of the last S tokens of every sequence over all its tokens, one global softmax.

    The S tokens must be appended already. `num_splits` is into how many parts a sequence's packed
    pages are divided over thread blocks; None lets the backend choose, by the widths of the tables
    and never by lengths, so that results are reproducible. Output has the query's dtype; LSE is
    float32, natural log, softmax scale included. A query that sees no token gets (0, -inf).
    """
    plan = plan_decode(query, view, backend=backend, num_splits=num_splits)
    return plan.launch(query, view.pages_JY, view.window_pages_JMC)


def append(rows: Rows, tokens: Tokens, view: CacheView, *, backend: str = "auto") -> None:
    """Writes tokens into the bf16 window, and packs every page whose last token is among them.

    Rows of one sequence are consecutive and in order, none twice. A page's other rows are taken
    from this call, or else from the window. Sinks are written to the sink page too. A page or
    window page with a number below 0 is skipped. `view.lengths_B` is not read. Bytes depend on a
    page's own tokens alone: the same for every backend and every way to cut a prompt into calls.
    """
    plan = plan_append(rows, tokens, view, backend=backend)
    plan.launch(rows, view.pages_JY, view.window_pages_JMC)


def gather(tokens: Tokens, view: CacheView, out_TC: Tensor, *, backend: str = "auto") -> None:
    """Writes each token as decode reads it to its row of `out_TC`, rounded to bfloat16.

    Latent first, then the rope key. Rows of padding keep what they hold.
    """
    plan = plan_gather(tokens, view, out_TC, backend=backend)
    plan.launch(out_TC, view.pages_JY, view.window_pages_JMC)


def plan_decode(
    query: DecodeQuery, view: CacheView, *, backend: str = "auto", num_splits: int | None = None
) -> DecodePlan:
    """`decode` for the layers of a step, whose queries and pools differ in their addresses alone.

    Everything is checked here, with the errors of `decode`, and nothing is launched.
    """
    problem = decode_problem(query, view)
    require(
        num_splits is None or num_splits >= 1,
        f"num_splits {num_splits} must be at least 1",
        UsageError,
    )
    launch = choose(problem, backend).plan_decode(query, view, num_splits)
    inputs = (("latent_BSNR", query.latent_BSNR), ("rope_BSNE", query.rope_BSNE))
    return DecodePlan(likes(*inputs, *_pools(view)), query.softmax_scale, launch)


def plan_append(
    rows: Rows, tokens: Tokens, view: CacheView, *, backend: str = "auto"
) -> AppendPlan:
    """`append` for the layers of a step, as `plan_decode`; the tokens are part of the plan."""
    launch = choose(append_problem(rows, tokens, view), backend).plan_append(rows, tokens, view)
    inputs = zip(rows._fields, rows, strict=True)
    return AppendPlan(likes(*inputs, *_pools(view)), launch)


def plan_gather(
    tokens: Tokens, view: CacheView, out_TC: Tensor, *, backend: str = "auto"
) -> GatherPlan:
    """`gather` for the layers of a step, as `plan_decode`; the tokens are part of the plan."""
    launch = choose(gather_problem(tokens, view, out_TC), backend).plan_gather(tokens, view, out_TC)
    return GatherPlan(likes(("out_TC", out_TC), *_pools(view)), launch)


def _pools(view: CacheView) -> tuple[tuple[str, Tensor], ...]:
    return ("pages_JY", view.pages_JY), ("window_pages_JMC", view.window_pages_JMC)


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
