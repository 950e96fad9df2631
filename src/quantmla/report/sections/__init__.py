"""The sections of a report, in order: a new one is a module here and a line in SECTIONS.

A section is a module with
- TITLE, its heading;
- COMMAND, what makes its data, which is said where they are missing;
- READS, the kinds of files (collect.KINDS) that it takes data from;
- gather(run), which takes from a run's files all numbers that it shows, None where there are none:
  it alone computes, and what it returns stands in report.json;
- headlines(data), the few figures by which runs are compared;
- render(data), HTML from what gather returned and from nothing else.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup

SECTIONS = (
    "capacity",
    "quality",
    "context",
    "bit_grid",
    "layers",
    "channels",
    "learning",
    "exactness",
    "cost",
    "tasks",
    "needles",
    "response",
    "predictor",
    "interventions",
    "error_parts",
    "rope_pairs",
    "bit_plan",
    "kernels",
    "serving",
)
Data = dict[str, Any]


class Headline(NamedTuple):
    """A figure that runs are compared by; `better` is lower, higher or none."""

    label: str
    value: float | None
    spec: str  # of format()
    better: str


class Section(Protocol):
    """What a module of this package offers."""

    TITLE: str
    COMMAND: str
    READS: Sequence[str]

    def gather(self, run: RunFiles) -> Data | None: ...
    def headlines(self, data: Mapping[str, Any]) -> list[Headline]: ...
    def render(self, data: Mapping[str, Any]) -> Markup: ...


def section(name: str) -> Section:
    return cast(Section, import_module(f"{__name__}.{name}"))
