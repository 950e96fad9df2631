"""Bits for each layer under a budget of bytes, from what each layer's paths cost at each width.

Costs are taken to add up over layers and paths, as squared errors do while they are small. Pages of
a layer must be whole legal pages, so a layer chooses one pair of widths with that pair's page size;
the choice of least total cost is then found exactly, by dynamic programming over bytes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from quantmla.errors import UsageError, require
from quantmla.mla.geometry import MlaGeometry
from quantmla.quant.format import BITS, parse_format
from quantmla.quant.layout import layout_for

PAGE_TOKENS = 64
Costs = Mapping[tuple[str, int], float]  # (path, bits) to cost, for one layer


class Choice(NamedTuple):
    """One format that a layer may have."""

    format: str
    page_bytes: int
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BitPlan:
    """A format for every layer, by cache index."""

    formats: Mapping[int, str]
    page_bytes: int  # of all layers' pages together
    cost: float  # as the additive model predicts it

    @property
    def bytes_per_token(self) -> float:
        """Mean over the layers."""
        return self.page_bytes / PAGE_TOKENS / len(self.formats)


def layer_choices(costs: Costs, geometry: MlaGeometry) -> tuple[Choice, ...]:
    """Every pair of measured widths, fewest bytes first; 16 bits cost nothing."""
    widths = {
        path: sorted({bits for name, bits in costs if name == path} | {BITS[-1]})
        for path in ("content", "rope")
    }
    every = []
    for content, rope in product(widths["content"], widths["rope"]):
        name = f"c{content}r{rope}"
        page = layout_for(geometry, parse_format(name, page_size=PAGE_TOKENS)).page_bytes
        cost = costs.get(("content", content), 0.0) + costs.get(("rope", rope), 0.0)
        every.append(Choice(name, page, cost))
    return tuple(sorted(every, key=lambda c: (c.page_bytes, c.cost)))


def _undominated(layer: Sequence[Choice]) -> list[Choice]:
    """Without those that another betters or equals in bytes and in cost; fewest bytes first."""
    kept: list[Choice] = []
    for choice in sorted(layer, key=lambda c: (c.page_bytes, c.cost)):
        if not kept or choice.cost < kept[-1].cost:
            kept.append(choice)
    return kept


def plan_bits(choices: Mapping[int, Sequence[Choice]], bytes_per_token: float) -> BitPlan:
    """The plan of least cost whose pages take at most `bytes_per_token`, on average over layers.

    Exact. Raises UsageError for a budget below the smallest formats.
    """
    require(
        math.isfinite(bytes_per_token) and bytes_per_token > 0,
        f"budget {bytes_per_token} must be a finite number of more than 0 bytes per token",
        UsageError,
    )
    unit = math.gcd(*(c.page_bytes for layer in choices.values() for c in layer))
    most = sum(max(c.page_bytes for c in layer) for layer in choices.values())
    # no more than all can take, as a budget near a float's largest would overflow
    room = int(min(bytes_per_token, most) * PAGE_TOKENS * len(choices)) // unit
    least = sum(min(c.page_bytes for c in layer) for layer in choices.values())
    require(
        room * unit >= least,
        f"budget {bytes_per_token:g} bytes per token is less than the smallest formats take: "
        f"{least / PAGE_TOKENS / len(choices):g}",
        UsageError,
    )
    useful = {index: _undominated(layer) for index, layer in choices.items()}
    return _least_cost(useful, unit, min(room, most // unit))


def _least_cost(choices: Mapping[int, Sequence[Choice]], unit: int, room: int) -> BitPlan:
    """best[u]: least cost of the layers so far in at most u units of bytes."""
    best, taken = [0.0] * (room + 1), []
    for layer in choices.values():
        now = [math.inf] * (room + 1)
        picked = [-1] * (room + 1)
        for number, choice in enumerate(layer):
            size = choice.page_bytes // unit
            for used in range(size, room + 1):
                cost = best[used - size] + choice.cost
                if cost < now[used]:  # on a tie the earlier choice, which has fewer bytes
                    now[used], picked[used] = cost, number
        taken.append(picked)
        best = now
    formats, left, pages = {}, room, 0
    for index, picked in zip(reversed(list(choices)), reversed(taken), strict=True):
        choice = choices[index][picked[left]]
        formats[index] = choice.format
        pages += choice.page_bytes
        left -= choice.page_bytes // unit
    return BitPlan(formats=dict(sorted(formats.items())), page_bytes=pages, cost=best[room])


def uniform_plan(choices: Mapping[int, Sequence[Choice]], name: str) -> BitPlan:
    """One format for all layers, with its bytes and cost by the same model."""
    every = [next(c for c in layer if c.format == name) for layer in choices.values()]
    return BitPlan(
        formats=dict.fromkeys(sorted(choices), name),
        page_bytes=sum(choice.page_bytes for choice in every),
        cost=sum(choice.cost for choice in every),
    )


def costs_by_layer(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[tuple[str, int], float]]:
    """Rows of `layer`, `path`, `bits` and `cost`, by cache index."""
    found: dict[int, dict[tuple[str, int], float]] = {}
    for row in rows:
        found.setdefault(row["layer"], {})[row["path"], row["bits"]] = row["cost"]
    return found


def recipe_format(formats: Mapping[int, str]) -> dict[str, Any]:
    """The plan as a recipe's `format`: the commonest name, and the layers that differ."""
    common = Counter(formats.values()).most_common(1)[0][0]
    return {"name": common, "layers": {i: name for i, name in formats.items() if name != common}}
