"""What learning and studies took: time and memory by layer, and at the sizes of larger models."""

from collections.abc import Mapping
from typing import Any

from quantmla.report.charts import Axis, Series, lines
from quantmla.report.collect import RunFiles
from quantmla.report.learned import learned_layers, short
from quantmla.report.markup import Markup, figure, figures, join, number, table
from quantmla.report.provenance import how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Cost of calibration"
COMMAND = "quantmla quantize MODEL -o OUT"
READS = ("log", "checkpoint", "quantize", "calibration", "study_times")
TIMED = "learning and error measurement of one layer, wall time"


def gather(run: RunFiles) -> Data | None:
    parts = []
    for learned in learned_layers(run):
        layers = [{"layer": short(x["prefix"]), "seconds": x["seconds"]} for x in learned.layers]
        parts.append(
            {
                "name": learned.name,
                "layers": layers,
                "seconds": sum(x["seconds"] for x in learned.layers),
                "peak_gib": max(x["peak_bytes"] for x in learned.layers) / 2**30,
                "measured": learned.measured(TIMED),
            }
        )
    shapes = _rows(run, "calibration", f"{TIMED}, random activations")
    studies = _rows(run, "study_times", "each study of one layer, wall time, random activations")
    found = {"parts": parts, "shapes": shapes, "studies": studies}
    return found if any(found.values()) else None


def _rows(run: RunFiles, kind: str, words: str) -> Data | None:
    record = run.newest(kind)
    if record is None:
        return None
    return {"rows": [dict(row) for row in record.data["rows"]], "measured": measured(record, words)}


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    """Of the run's first checkpoint, whatever its format: formats are what runs differ in."""
    return [
        found
        for part in data["parts"][:1]
        for found in (
            Headline("seconds to learn", part["seconds"], ",.0f", "lower"),
            Headline("peak memory to learn, GiB", part["peak_gib"], ".2f", "lower"),
        )
    ]


def render(data: Mapping[str, Any]) -> Markup:
    parts: list[Markup] = []
    if data["parts"]:
        body = [
            [
                part["name"].upper(),
                number(len(part["layers"]), "d"),
                number(part["seconds"], ",.1f"),
                number(part["peak_gib"], ".2f"),
            ]
            for part in data["parts"]
        ]
        head = ("cache", "layers", "seconds, all layers", "peak memory, GiB")
        parts += [table(head, body, caption="Learning"), figures(*map(_drawing, data["parts"]))]
    if data["shapes"]:
        parts += _table(data["shapes"], "method", ".1f", "Learning one layer of larger models")
    if data["studies"]:
        parts += _table(data["studies"], "study", ".2f", "Studying one layer (analyze)")
    return join(parts)


def _table(found: Mapping[str, Any], what: str, seconds: str, caption: str) -> list[Markup]:
    body = [
        [
            row["shape"],
            row[what],
            number(row["tokens"], ",d"),
            number(row["seconds"], seconds),
            number(row["peak_gib"], ".2f"),
        ]
        for row in found["rows"]
    ]
    names = ("shape of one layer", what, "tokens", "seconds", "peak memory, GiB")
    return [table(names, body, caption=caption), how(found["measured"])]


def _drawing(part: Mapping[str, Any]) -> Markup:
    rows = list(enumerate(part["layers"]))
    series = Series(
        name="seconds",
        colour="quantmla",
        points=[(index, row["seconds"]) for index, row in rows],
        tips=[f"layer {row['layer']}: {row['seconds']:.1f} s" for _, row in rows],
    )
    title = f"Seconds by layer, {part['name'].upper()}"
    drawing = lines([series], Axis(label="layer"), Axis(label="seconds", zero=True), title)
    return figure(title, drawing, how=how(part["measured"]))
