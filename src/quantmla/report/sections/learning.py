"""Learning curves: the held-out objective of every layer, as a share of its start."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantmla.report.charts import Axis, Series, profiles
from quantmla.report.collect import RunFiles
from quantmla.report.learned import learned_layers, short
from quantmla.report.markup import Markup, figure, figures
from quantmla.report.provenance import LEARNED, how
from quantmla.report.sections import Data, Headline

TITLE = "Learning curves"
COMMAND = "quantmla quantize MODEL -o OUT"
READS = ("log", "checkpoint", "quantize")
PATHS = ("content", "rope")


def gather(run: RunFiles) -> Data | None:
    parts = []
    for found in learned_layers(run):
        curves = []
        for layer in found.layers:
            for path in PATHS:
                phases = _phases([(s, v) for name, s, v in layer["history"] if name == path])
                curves += [
                    {"layer": short(layer["prefix"]), "path": path, "phase": i, "points": points}
                    for i, points in enumerate(phases)
                ]
        if curves:
            source = found.measured(LEARNED)
            parts.append({"name": found.name, "curves": curves, "measured": source})
    return {"parts": parts} if parts else None


def _phases(history: Sequence[tuple[int, float]]) -> list[list[list[float]]]:
    """A phase begins where a step is repeated; each is a share of its own first value."""
    phases: list[list[tuple[int, float]]] = []
    for step, value in history:
        if not phases or step <= phases[-1][-1][0]:
            phases.append([])
        phases[-1].append((step, value))
    return [
        [[step, value / points[0][1]] for step, value in points]
        for points in phases
        if len(points) > 1 and points[0][1] > 0
    ]


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    return []


def render(data: Mapping[str, Any]) -> Markup:
    return figures(*(_drawing(part) for part in data["parts"]))


def _drawing(part: Mapping[str, Any]) -> Markup:
    panels = []
    for path in PATHS:
        phases = sorted({c["phase"] for c in part["curves"] if c["path"] == path})
        for phase in phases:
            members = [c for c in part["curves"] if (c["path"], c["phase"]) == (path, phase)]
            first = min(c["points"][0][0] for c in members)
            series = [
                Series(
                    name=f"layer {c['layer']}, ends at {c['points'][-1][1]:.2f}",
                    colour=path,
                    points=[(step - first, value) for step, value in c["points"]],
                )
                for c in members
            ]
            steps = max(c["points"][-1][0] for c in members) - first
            words = " (polish)" if path == "content" and phase else ""
            panels.append((f"{path}{words}, {steps} steps", series))
    title = f"Held-out objective while learning, {part['name'].upper()}"
    note = "One line for each layer, as a share of its value at the phase's first step."
    drawing = profiles(panels, Axis(label="share of the start", log=True), title)
    return figure(title, drawing, how=how(part["measured"]), note=note)
