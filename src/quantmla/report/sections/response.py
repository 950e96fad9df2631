"""Matched error: what the attention output makes of the same relative error in each path."""

from collections.abc import Mapping
from typing import Any

from quantmla.report.charts import MANY, Axis, Dot, Series, dots, lines
from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup, el, figure, figures, join, number, numbers, plain, table
from quantmla.report.provenance import STUDIED, how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Response to matched errors"
COMMAND = "quantmla analyze MODEL -o DIR --studies matched_error"
READS = ("analysis",)
PATHS = ("content", "rope")


def gather(run: RunFiles) -> Data | None:
    record = run.newest("analysis")
    if record is None or "matched_error" not in record.data["summary"]:
        return None
    summary = record.data["summary"]["matched_error"]
    keys = ("content", "rope", "ratio", "interval")
    rows = [
        {"layer": str(layer["layer"])} | {key: layer["matched_error"][key] for key in keys}
        for layer in record.data["layers"]
    ]
    protocol = record.data["protocol"]
    facts = {"n": summary["sequences"], "of": "sequences", "seeds": protocol["draws"]}
    return {
        "layers": rows,
        "model": {key: summary[key] for key in (*keys, "cache_nmse", "median_layer_ratio")},
        "measured": measured(record, STUDIED, **facts),
    }


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    return [Headline("rope / content response", data["model"]["ratio"], ".3f", "")]


def render(data: Mapping[str, Any]) -> Markup:
    model = data["model"]
    words = el(
        "p",
        "The direction of each layer's 4-bit error is scaled to a cache error (NMSE) of ",
        number(model["cache_nmse"], "g"),
        ". Over the model the rope key's response is ",
        number(model["ratio"], ".3f"),
        " times the latent's; the median layer's ratio is ",
        number(model["median_layer_ratio"], ".2f"),
        ".",
    )
    body = [_row(row["layer"], row) for row in data["layers"]] + [_row("model", model)]
    head = ("layer", *PATHS, "rope / content", "95 % interval")
    drawings = [_responses(data), _ratios(data)]
    caption = "Output NMSE over cache NMSE"
    shown = table(head, body, caption=caption, strong=[len(body) - 1])
    if len(body) > MANY:
        shown = el("details", el("summary", caption), shown)
    return join([words, figures(*drawings), shown])


def _row(name: str, row: Mapping[str, Any]) -> list[object]:
    interval = numbers(*((v, ".2f") for v in row["interval"]), between=" to ")
    return [name, *(number(row[p], ".3f") for p in PATHS), number(row["ratio"], ".2f"), interval]


def _responses(data: Mapping[str, Any]) -> Markup:
    rows = list(enumerate(data["layers"]))
    drawn = [
        Series(
            name=path,
            colour=path,
            points=[(index, row[path]) for index, row in rows],
            tips=[f"layer {row['layer']}: {row[path]:.3f}" for _, row in rows],
        )
        for path in PATHS
    ]
    title = "Response by layer and path"
    y = Axis(label="output NMSE ÷ cache NMSE (log)", log=True)
    drawing = lines(drawn, Axis(label="layer"), y, title)
    return figure(title, drawing, how=how(data["measured"]))


def _ratios(data: Mapping[str, Any]) -> Markup:
    rows = [*data["layers"], {"layer": "model", **data["model"]}]
    drawn = [
        Dot(
            label=row["layer"] if row["layer"] == "model" else f"layer {row['layer']}",
            value=row["ratio"],
            text=plain(row["ratio"], ".2f"),
            colour="quantmla" if row["layer"] == "model" else "other",
            interval=tuple(row["interval"]),
        )
        for row in rows
    ]
    title = "Rope over content"
    axis = Axis(label="ratio of responses, 95 % interval (log)", log=True)
    return figure(title, dots(drawn, axis, title, reference=1.0), how=how(data["measured"]))
