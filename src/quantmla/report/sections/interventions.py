"""Errors of equal energy with their structure taken away: does the gain change as predicted?"""

from collections.abc import Mapping
from typing import Any

from quantmla.report.charts import Axis, Dot, dots
from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup, figure, figures, join, number, numbers, plain, table
from quantmla.report.provenance import STUDIED, how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Interventions"
COMMAND = "quantmla analyze MODEL -o DIR --studies interventions"
READS = ("analysis",)
KINDS = {"signs": "random signs", "tokens": "rows on other tokens", "isotropic": "isotropic"}
KEYS = ("ratio", "interval", "mean", "expected", "agree", "layers")


def gather(run: RunFiles) -> Data | None:
    record = run.newest("analysis")
    if record is None or "interventions" not in record.data["summary"]:
        return None
    found = record.data["summary"]["interventions"]
    rows = [
        {"path": path, "kind": kind} | {key: found[path][kind][key] for key in KEYS}
        for path in ("content", "rope")
        for kind in KINDS
    ]
    repeats = record.data["protocol"]["repetitions"]
    return {"rows": rows, "measured": measured(record, STUDIED, repeats=repeats)}


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    return []


def render(data: Mapping[str, Any]) -> Markup:
    body = [
        [
            f"{row['path']}: {KINDS[row['kind']]}",
            number(row["ratio"], ".3f"),
            numbers(*((v, ".3f") for v in row["interval"]), between=" to "),
            number(row["mean"], ".3f"),
            number(row["expected"], ".3f"),
            numbers((row["agree"], "d"), (row["layers"], "d"), between=" of "),
        ]
        for row in data["rows"]
    ]
    head = ("error replaced by", "gain ratio", "95 % interval", "mean", "by theory", "layers agree")
    caption = "Gain of the replaced error over the real one's"
    return join([figures(_drawing(data)), table(head, body, caption=caption)])


def _drawing(data: Mapping[str, Any]) -> Markup:
    drawn = [
        Dot(
            label=f"{row['path']}, {row['kind']}",
            value=row["ratio"],
            text=plain(row["ratio"], ".3f"),
            colour=row["path"],
            interval=tuple(row["interval"]),
            shape="circle" if row["path"] == "content" else "square",
        )
        for row in data["rows"]
    ]
    title = "Gain when the error's structure is taken away"
    axis = Axis(label="gain ÷ real error's gain, 95 % interval")
    return figure(title, dots(drawn, axis, title, reference=1.0), how=how(data["measured"]))
