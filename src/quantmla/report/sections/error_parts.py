"""Where the output's error comes from, and how far it stays below the bound."""

from collections.abc import Mapping
from typing import Any

from quantmla.report.charts import Axis, Stack, legend, stacks
from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup, el, figure, figures, join, number, table
from quantmla.report.provenance import STUDIED, how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Parts of the error, and its bound"
COMMAND = "quantmla analyze MODEL -o DIR --studies split,bound"
READS = ("analysis",)
PARTS = ("matching", "aggregation", "interaction")
CROSS = ("matching_aggregation", "matching_interaction", "aggregation_interaction")
NAMES = {"content": "content alone", "rope": "rope alone", "both": "both"}


def gather(run: RunFiles) -> Data | None:
    record = run.newest("analysis")
    if record is None or not {"split", "bound"} & set(record.data["summary"]):
        return None
    split, bound = (record.data["summary"].get(key) for key in ("split", "bound"))
    return {
        "split": None if split is None else {name: split[name] for name in NAMES},
        "joint": None if split is None else split["joint"],
        "bound": bound,
        "measured": measured(record, STUDIED),
    }


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    if data["bound"] is None:
        return []
    return [Headline("bound violations", data["bound"]["violations"], "d", "lower")]


def render(data: Mapping[str, Any]) -> Markup:
    parts: list[Markup] = []
    if data["split"] is not None:
        parts += _split(data)
    if data["bound"] is not None:
        parts += _bound(data["bound"])
    return join([*parts, how(data["measured"])])


def _split(data: Mapping[str, Any]) -> list[Markup]:
    head = ("quantised", *PARTS, "2 m·a", "2 m·i", "2 a·i", "output NMSE")
    body = [
        [
            NAMES[name],
            *(number(of[key], "+.4f") for key in (*PARTS, *CROSS)),
            number(of["nmse"], ".2e"),
        ]
        for name, of in data["split"].items()
    ]
    drawn = [
        Stack(
            label=NAMES[name],
            parts=[(key, of[key], key) for key in PARTS],
            text=f"{of['nmse']:.1e}",
        )
        for name, of in data["split"].items()
    ]
    title = "Shares of the output's squared error"
    axis = Axis(label="share (cross terms left out); right: output NMSE", zero=True)
    drawing = join([stacks(drawn, axis, title), legend([(key, key) for key in PARTS])])
    return [
        figures(figure(title, drawing, how=how(data["measured"]))),
        table(head, body, caption="Shares, cross terms included, sum to 1"),
    ]


def _bound(bound: Mapping[str, Any]) -> list[Markup]:
    words = el(
        "p",
        number(bound["violations"], "d"),
        " violations of the output bound in ",
        number(bound["cases"], ",d"),
        " cases.",
    )
    body = [
        [bits.upper(), number(of["published"], ".2e"), number(of["centred"], ".2e")]
        for bits, of in bound["ratio"].items()
    ]
    head = ("rope bits", "of the published bound", "of the centred bound")
    return [words, table(head, body, caption="Measured distortion as a share of the bound")]
