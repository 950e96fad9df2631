"""Plans of one step: the first layer that needs one makes it, those after it run it.

They lie in the step's metadata, which vLLM makes anew for every step, and go with it.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from operator import is_
from typing import Any, Protocol, TypeVar


class Plan(Protocol):
    """What this module asks of a plan of quantmla.kernels."""

    def takes(self, *inputs: Any) -> bool: ...


P = TypeVar("P", bound=Plan)


class StepPlans:
    """Found by what they do; layers whose tensors differ in shape or strides have their own."""

    def __init__(self) -> None:
        self._step: tuple[object, ...] = ()
        self._plans: defaultdict[Hashable, list[Any]] = defaultdict(list)

    def find(
        self,
        step: tuple[object, ...],
        key: Hashable,
        inputs: tuple[Any, ...],
        make: Callable[[], P],
    ) -> P:
        """The plan of `key` that takes `inputs`, made if there is none.

        `step` are the objects that say where the step's tokens are. Where they are not the very
        ones of the call before, as in a copy of the metadata with other tables, no plan is left.
        """
        if len(step) != len(self._step) or not all(map(is_, step, self._step)):
            self._step = step
            self._plans.clear()
        plans = self._plans[key]
        for plan in plans:
            if plan.takes(*inputs):
                return plan
        plans.append(make())
        return plans[-1]
