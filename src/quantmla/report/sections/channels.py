"""How evenly the cache's channels and frequency pairs are filled, before and after learning."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantmla.report.charts import Axis, Series, legend, profiles
from quantmla.report.collect import RunFiles
from quantmla.report.learned import learned_layers, short
from quantmla.report.markup import Markup, el, figure, figures, join, number, table
from quantmla.report.provenance import how
from quantmla.report.sections import Data, Headline

TITLE = "Channels before and after"
COMMAND = "quantmla quantize MODEL -o OUT"
READS = ("log", "checkpoint", "quantize")
KIND = "root mean square over held-out calibration tokens"
PATHS = {"content": "latent channels, largest first", "rope": "frequency pairs, fastest first"}
PANELS, POINTS = 8, 64
WHEN = ("before", "after")


def gather(run: RunFiles) -> Data | None:
    parts: list[Data] = []
    for found in learned_layers(run):
        layers = [layer for layer in found.layers if layer.get("spread")]
        chosen = _evenly(layers, PANELS)
        for path in tuple(PATHS) if chosen else ():
            panels = [_panel(layer, path) for layer in chosen]
            flat = [_flatness(layer, path) for layer in layers]
            source = found.measured(KIND)
            part: Data = {"name": found.name, "path": path, "panels": panels, "flatness": flat}
            parts.append(part | {"measured": source})
    parts = [part for part in parts if any(panel["before"] for panel in part["panels"])]
    return {"parts": parts} if parts else None


def _evenly(items: Sequence[Any], most: int) -> list[Any]:
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _panel(layer: Mapping[str, Any], path: str) -> Data:
    """Curves relative to their own mean square, so that the scale of a layer does not matter."""
    curves = {}
    for when in WHEN:
        values = _relative(layer["spread"][when][path])
        curves[when] = _evenly(
            sorted(values, reverse=True) if path == "content" else values, POINTS
        )
    return {"layer": short(layer["prefix"])} | curves


def _relative(values: Sequence[float]) -> list[float]:
    mean = (sum(v * v for v in values) / len(values)) ** 0.5 if values else 0.0
    return [v / mean for v in values] if mean else []


def _flatness(layer: Mapping[str, Any], path: str) -> Data:
    """The largest channel over the mean square: 1 where all are equal."""
    largest = {when: max(_relative(layer["spread"][when][path]), default=None) for when in WHEN}
    return {"layer": short(layer["prefix"])} | largest


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    return []


def render(data: Mapping[str, Any]) -> Markup:
    words = el(
        "p",
        "Learned coordinates are not meant to be flat: a channel is made large where an error in "
        "it costs little, small where it costs much.",
    )
    return join([words, figures(*map(_drawing, data["parts"])), *map(_table, data["parts"])])


def _drawing(part: Mapping[str, Any]) -> Markup:
    panels = [
        (
            f"layer {panel['layer']}",
            [
                Series(
                    name=when,
                    colour=when,
                    points=[(i, v) for i, v in enumerate(panel[when]) if v > 0],
                )
                for when in WHEN
                if any(v > 0 for v in panel[when])
            ],
        )
        for panel in part["panels"]
    ]
    title = f"{part['path'].capitalize()} of the cache, {part['name'].upper()}"
    axis = Axis(label=f"rms ÷ the layer's rms (log); {PATHS[part['path']]}", log=True)
    drawing = join([profiles(panels, axis, title), legend([(when, when) for when in WHEN])])
    return figure(title, drawing, how=how(part["measured"]))


def _table(part: Mapping[str, Any]) -> Markup:
    body = [
        [row["layer"], number(row["before"], ".2f"), number(row["after"], ".2f")]
        for row in part["flatness"]
    ]
    title = f"Largest {part['path']} channel over the rms, {part['name'].upper()}"
    head = ("layer", *WHEN)
    return el("details", el("summary", title), table(head, body, caption=title))
