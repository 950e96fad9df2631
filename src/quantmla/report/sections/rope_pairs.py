"""Page centring: rope keys by frequency pair, and the error that centring leaves."""

from collections.abc import Mapping
from typing import Any

from quantmla.report.charts import Axis, Cell, Series, heat, lines
from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup, figure, figures, join, number, plain, table
from quantmla.report.provenance import STUDIED, how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Rope keys by frequency pair"
COMMAND = "quantmla analyze MODEL -o DIR --studies centring"
READS = ("analysis",)
ERRORS = {"error_plain": "plain", "error_centred": "centred", "error_banded": "two bands"}
WAYS = ("plain", "centred", "banded")


def gather(run: RunFiles) -> Data | None:
    record = run.newest("analysis")
    if record is None or "centring" not in record.data["summary"]:
        return None
    layers = [
        {"layer": str(layer["layer"]), **layer["centring"]} for layer in record.data["layers"]
    ]
    pairs = [layer["pairs"] for layer in layers]
    means = {
        key: [sum(values) / len(values) for values in zip(*(p[key] for p in pairs), strict=True)]
        for key in ("energy", "page_mean", *ERRORS)
    }
    shares = [
        [m / e if e > 0 else None for m, e in zip(p["page_mean"], p["energy"], strict=True)]
        for p in pairs
    ]
    rows = [
        {key: layer[key] for key in ("layer", "page_mean_share", "score_error", "output_error")}
        | {"mean_shares": share, "fall": _falls(layer)}
        for layer, share in zip(layers, shares, strict=True)
    ]
    summary = record.data["summary"]["centring"]
    return {
        "pairs": means,
        "layers": rows,
        "model": {k: summary[k] for k in ("page_mean_share", "score_error", "output_error")},
        "measured": measured(record, STUDIED),
    }


def _falls(layer: Mapping[str, Any]) -> Data:
    """How many times smaller the errors are than the plain one."""
    return {
        what: {way: layer[what]["plain"] / layer[what][way] for way in WAYS[1:]}
        for what in ("score_error", "output_error")
    }


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    falls = data["model"]["score_error"]
    return [Headline("score error, ÷ by centring", falls["centred"], ".2f", "higher")]


def render(data: Mapping[str, Any]) -> Markup:
    body = []
    for row in data["layers"]:
        cells: list[object] = [row["layer"], number(row["page_mean_share"], ".0%")]
        for what in ("score_error", "output_error"):
            cells.append(number(row[what]["plain"], ".2e"))
            cells += [number(row["fall"][what][way], ".1f") for way in WAYS[1:]]
        body.append(cells)
    model = data["model"]
    last: list[object] = ["model", number(model["page_mean_share"], ".0%")]
    for what in ("score_error", "output_error"):
        last += [number(None, ""), *(number(model[what][way], ".1f") for way in WAYS[1:])]
    head = ["layer", "energy in page means"]
    for what in ("score error", "output error"):
        head += [f"{what}, plain", "÷ centred", "÷ with bands"]
    caption = "What page centring does"
    drawings = figures(_pairs(data), _shares(data))
    shown = table(head, [*body, last], caption=caption, strong=[len(body)])
    return join([drawings, shown, how(data["measured"])])


def _pairs(data: Mapping[str, Any]) -> Markup:
    drawn = [
        Series(
            name=name,
            colour=key.removeprefix("error_"),
            points=list(enumerate(data["pairs"][key])),
        )
        for key, name in ERRORS.items()
    ]
    title = "Error of 4-bit rope keys by frequency pair"
    x = Axis(label="frequency pair, fastest first")
    y = Axis(label="squared error, mean over layers (log)", log=True)
    return figure(title, lines(drawn, x, y, title), how=how(data["measured"]))


def _shares(data: Mapping[str, Any]) -> Markup:
    rows = []
    for layer in data["layers"]:
        cells = [
            Cell(
                value=share,
                text="",
                tip=f"layer {layer['layer']}, pair {i}: {plain(share, '.1%')}",
            )
            for i, share in enumerate(layer["mean_shares"])
        ]
        rows.append((f"layer {layer['layer']}", cells))
    names = [str(i) for i in range(len(data["pairs"]["energy"]))]
    title = "Share of a pair's energy that is its page's mean"
    words = "frequency pair, fastest first; stronger is more"
    return figure(title, heat(rows, names, words, title, share=True), how=how(data["measured"]))
