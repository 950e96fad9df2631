"""Which backends a measurement is of."""

from collections.abc import Sequence
from importlib import import_module

from quantmla.errors import UsageError, require
from quantmla.kernels import BACKENDS
from quantmla.kernels.api import choose
from quantmla.kernels.problem import Problem


def able(problem: Problem, names: Sequence[str] | None) -> list[str]:
    """The named backends, which all must be able; or all that are, but for the reference."""
    if names is not None:
        for name in names:
            choose(problem, name)  # raises with its reason
        return list(names)
    reasons = {
        name: import_module(path).why_not(problem)
        for name, path in BACKENDS.items()
        if name != "reference"
    }
    found = [name for name, reason in reasons.items() if reason is None]
    said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    require(bool(found), f"no backend can {problem.operation} here ({said})", UsageError)
    return found
