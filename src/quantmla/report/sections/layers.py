"""Errors of every layer and path, before and after learning."""

from collections.abc import Mapping
from typing import Any

from quantmla.report.charts import Cell, heat
from quantmla.report.collect import RunFiles
from quantmla.report.learned import errors, learned_layers, short
from quantmla.report.markup import Markup, el, figure, figures, join, number, plain, table
from quantmla.report.provenance import LEARNED, how
from quantmla.report.sections import Data, Headline

TITLE = "Layers"
COMMAND = "quantmla quantize MODEL -o OUT"
READS = ("log", "checkpoint", "quantize")
SHOWN = (("content_output", "content"), ("rope_scores", "rope"))


def gather(run: RunFiles) -> Data | None:
    parts = []
    for found in learned_layers(run):
        rows = []
        for layer in found.layers:
            before, after = errors(layer["before"]), errors(layer["after"])
            factors = {key: _factor(before[key], after[key]) for key, _ in SHOWN}
            names = {"layer": short(layer["prefix"])}
            rows.append({**names, "before": before, "after": after, "factors": factors})
        parts.append({"name": found.name, "layers": rows, "measured": found.measured(LEARNED)})
    return {"parts": parts} if parts else None


def _factor(before: float, after: float) -> float | None:
    return before / after if after > 0 else None


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    return []


def render(data: Mapping[str, Any]) -> Markup:
    words = el(
        "p",
        "Content is the normalised squared error of the attention output, rope that of the "
        "positional scores, row-centred. Before: the same format on the original weights.",
    )
    return join([words, figures(*map(_map, data["parts"])), *map(_table, data["parts"])])


def _map(part: Mapping[str, Any]) -> Markup:
    rows = []
    for key, path in SHOWN:
        for when in ("before", "after"):
            cells = [
                Cell(
                    value=layer[when][key],
                    text=plain(layer[when][key], ".0e").replace("e-0", "e-"),
                    tip=f"layer {layer['layer']}, {path} {when}: {layer[when][key]:.2e}",
                )
                for layer in part["layers"]
            ]
            rows.append((f"{path} {when}", cells))
    title = f"Error by layer and path, {part['name'].upper()}"
    names = [layer["layer"] for layer in part["layers"]]
    drawing = heat(rows, names, "normalised squared error, by layer", title)
    return figure(title, drawing, how=how(part["measured"]))


def _table(part: Mapping[str, Any]) -> Markup:
    head = ["layer"]
    head += [f"{path} {what}" for _, path in SHOWN for what in ("before", "after", "÷")]
    body = []
    for layer in part["layers"]:
        cells: list[object] = [layer["layer"]]
        for key, _ in SHOWN:
            cells += [number(layer[when][key], ".2e") for when in ("before", "after")]
            cells.append(number(layer["factors"][key], ".1f"))
        body.append(cells)
    title = f"Errors by layer, {part['name'].upper()}"
    return el("details", el("summary", title), table(head, body, caption=title))
