"""What each layer, path and width costs, and the plan of bits that follows from it."""

from collections.abc import Mapping
from typing import Any

from quantmla.report.charts import Axis, Cell, Dot, dots, heat
from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup, figure, figures, join, number, numbers, plain, table
from quantmla.report.provenance import SIMULATED, how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Bits by layer"
COMMAND = "quantmla analyze MODEL -o DIR --studies sensitivity --budget 256"
READS = ("analysis", "bit_plan")


def gather(run: RunFiles) -> Data | None:
    record, found = run.newest("bit_plan"), None
    if record is not None:
        found = record.data
    elif (record := run.newest("analysis")) is not None:
        found = record.data["model_studies"].get("sensitivity")
    if record is None or found is None:
        return None
    plan = found["plan"]
    keys = ("budget", "bytes_per_token", "predicted_kl", "measured_kl", "formats")
    rows = [_row(row) for row in found.get("rows", ())]
    windows = (record.data.get("header") or {}).get("windows") or found.get("windows")
    return {
        "costs": [{k: c[k] for k in ("layer", "path", "bits", "cost")} for c in found["costs"]],
        "plan": None if plan is None else {key: plan[key] for key in keys},
        "uniform": None if plan is None else plan.get("best_uniform"),
        "rows": rows,
        "measured": measured(record, SIMULATED, n=windows, of="windows", repeats=1),
    }


def _row(row: Mapping[str, Any]) -> Data:
    keys = ("name", "protected", "bytes_per_token", "predicted_kl", "kl_mean", "kl_error")
    return {key: row[key] for key in keys}


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    plan = data["plan"]
    if plan is None:
        return []
    name = f"measured KL of the plan at {plan['budget']:g} bytes"
    return [Headline(name, plan["measured_kl"], ".5f", "lower")]


def render(data: Mapping[str, Any]) -> Markup:
    bare = [row for row in data["rows"] if not row["protected"]]
    drawings = [_costs(data), _comparison(data, bare) if bare else None]
    parts = [figures(*drawings)]
    if data["plan"] is not None:
        parts.append(_plan(data["plan"], data["uniform"]))
    if data["rows"]:
        parts.append(_rows(data["rows"]))
    return join([*parts, how(data["measured"])])


def _costs(data: Mapping[str, Any]) -> Markup:
    found = {(c["path"], c["bits"], c["layer"]): c["cost"] for c in data["costs"]}
    layers = sorted({layer for _, _, layer in found})
    rows = []
    for path in ("content", "rope"):
        for bits in sorted({b for p, b, _ in found if p == path}):
            cells = [
                Cell(
                    value=found[path, bits, layer],
                    text=_shown(1e4 * found[path, bits, layer]),
                    tip=f"layer {layer}, {path} in {bits} bits: {found[path, bits, layer]:.2e}",
                )
                for layer in layers
            ]
            rows.append((f"{path}, {bits} bits", cells))
    title = "Cost by layer, path and bits"
    words = "1e-4 nats per token, each alone; columns: layers"
    drawing = heat(rows, [str(layer) for layer in layers], words, title)
    return figure(title, drawing, how=how(data["measured"]))


def _shown(cost: float) -> str:
    return plain(cost, ".1f" if cost < 100 else ".0f")


def _comparison(data: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> Markup:
    drawn = [
        Dot(
            label=row["name"],
            value=row["kl_mean"],
            text=plain(row["kl_mean"], ".4f"),
            colour="quantmla" if row["name"].startswith("plan") else "other",
            interval=(
                max(row["kl_mean"] - row["kl_error"], 0.1 * row["kl_mean"]),
                row["kl_mean"] + row["kl_error"],
            ),
        )
        for row in sorted(rows, key=lambda row: row["kl_mean"])
    ]
    title = "Plans and uniform formats, nothing protected"
    axis = Axis(label="mean KL, nats per token, ± one standard error (log)", log=True)
    return figure(title, dots(drawn, axis, title), how=how(data["measured"]))


def _plan(plan: Mapping[str, Any], uniform: Mapping[str, Any] | None) -> Markup:
    lines = [("plan", plan)] + ([] if uniform is None else [("best uniform", uniform)])
    body = [
        [
            name,
            number(of["bytes_per_token"], ".1f"),
            number(of["predicted_kl"], ".5f"),
            number(of["measured_kl"], ".5f"),
            ", ".join(f"{layer}: {fmt}" for layer, fmt in of["formats"].items()),
        ]
        for name, of in lines
    ]
    head = ("formats", "bytes / token / layer", "predicted KL", "measured KL", "by layer")
    caption = f"Under a budget of {plan['budget']:g} bytes per token and layer"
    return table(head, body, caption=caption, strong=[0])


def _rows(rows: list[Mapping[str, Any]]) -> Markup:
    body = [
        [
            row["name"],
            "4 + 128 in bf16" if row["protected"] else "unprotected",
            number(row["bytes_per_token"], ".1f"),
            number(row["predicted_kl"], ".5f"),
            numbers((row["kl_mean"], ".5f"), (row["kl_error"], ".5f")),
        ]
        for row in sorted(rows, key=lambda r: (r["protected"], -r["bytes_per_token"], r["kl_mean"]))
    ]
    head = ("format", "protection", "bytes / token / layer", "predicted KL", "KL mean")
    own = [i for i, row in enumerate(body) if str(row[0]).startswith("plan")]
    return table(head, body, caption="On held-out text, ± standard error over windows", strong=own)
