"""The gain model: does curvature times allocation predict the finite response?"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantmla.report.charts import Axis, Series, legend, points
from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup, el, figure, figures, join, number, table
from quantmla.report.provenance import STUDIED, how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Gain model"
COMMAND = "quantmla analyze MODEL -o DIR --studies gain"
READS = ("analysis",)
MODELS = {
    "full": "trace and allocation",
    "trace_only": "trace alone",
    "cache_error_only": "cache error alone",
}
GROUPS = {"fitted": "layers fitted on", "judged": "layers judged on"}


def gather(run: RunFiles) -> Data | None:
    record = run.newest("analysis")
    if record is None or "gain" not in record.data["summary"]:
        return None
    if record.data["summary"]["gain"]["gamma"] is None:
        return None  # one layer alone leaves none to judge on
    found = record.data["summary"]["gain"]
    rows = [
        {"gamma": name, "value": of["gamma"], "points": of["points"], "model": key}
        | of["models"][key]
        for name, of in (("fitted", found), ("published", found["published_gamma"]))
        for key in MODELS
    ]
    dots = [
        {"layer": index, "group": "fitted" if index in found["fitted_on"] else "judged"}
        | _ratios(point, found["gamma"])
        for index, layer in enumerate(record.data["layers"])
        for point in layer["gain"]["points"]
    ]
    return {
        "rows": rows,
        "points": dots,
        "identity_error": found["largest"]["identity_error"],
        "first_order_spearman": found["first_order_spearman"],
        "spearman": record.data["predictor_spearman"],
        "measured": measured(record, STUDIED, n=found["points"], of="judged points"),
    }


def _ratios(point: Mapping[str, Any], gamma: float) -> Data:
    """Rope over content: log of what is measured and of what is predicted."""
    log = {
        key: math.log(point["rope"][key] / point["content"][key])
        for key in ("trace", "allocation", "finite_gain")
    }
    predicted = gamma + log["trace"] + log["allocation"]
    return {"predicted": math.exp(predicted), "measured": math.exp(log["finite_gain"])}


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    return [Headline("predictor's Spearman", data["spearman"], ".3f", "higher")]


def render(data: Mapping[str, Any]) -> Markup:
    body = [
        [
            MODELS[row["model"]],
            row["gamma"],
            number(row["value"], ".3f"),
            number(row["points"], "d"),
            number(row["spearman"], ".3f"),
            number(row["median_log_error"], ".3f"),
            number(row["mean_log_error"], ".3f"),
        ]
        for row in data["rows"]
    ]
    words = el(
        "p",
        "First order and finite gains agree with a rank correlation of ",
        number(data["first_order_spearman"], ".4f"),
        "; the identity G = T·A + O holds to ",
        number(data["identity_error"], ".0e"),
        " of G.",
    )
    head = (
        "predicts by",
        "gamma",
        "value",
        "points",
        "Spearman",
        "median log err.",
        "mean log err.",
    )
    caption = "Prediction of the rope/content gain ratio"
    return join([words, figures(_drawing(data)), table(head, body, caption=caption, strong=[0])])


def _drawing(data: Mapping[str, Any]) -> Markup:
    groups: list[Series] = []
    for key, name in GROUPS.items():
        members: Sequence[Mapping[str, Any]] = [p for p in data["points"] if p["group"] == key]
        if members:
            shape = [(p["predicted"], p["measured"]) for p in members]
            tips = [
                f"layer {p['layer']}: predicted {p['predicted']:.3g}, measured {p['measured']:.3g}"
                for p in members
            ]
            groups.append(Series(name=name, colour=key, points=shape, tips=tips))
    title = "Predicted and measured gain ratio"
    x = Axis(label="predicted rope / content gain (log)", log=True)
    y = Axis(label="measured rope / content gain (log)", log=True)
    key = legend([(name, colour) for colour, name in GROUPS.items()])
    drawing = join([points(groups, x, y, title), key])
    note = "The dashed line is equality; circles were fitted on, squares judged on."
    return figure(title, drawing, how=how(data["measured"]), note=note)
