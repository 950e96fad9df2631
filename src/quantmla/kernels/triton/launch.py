"""A kernel launch as a value: it can be run, or compiled for a GPU that is not there."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    kernel: Any  # a function made by triton.jit
    grid: tuple[int, ...]
    args: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def run(self) -> None:
        self.kernel[self.grid](
            **self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages
        )
