"""Bytes of the cache: by token and layer, by token of the model, tokens in a gigabyte."""

from collections.abc import Mapping
from typing import Any

from quantmla.estimate import Workload, estimate
from quantmla.manifest import CONFIG_KEY
from quantmla.quant.mixed import format_from_json
from quantmla.report.charts import Axis, Stack, legend, stacks
from quantmla.report.collect import Record, RunFiles
from quantmla.report.learned import format_name
from quantmla.report.markup import Markup, figure, figures, join, number, plain, table
from quantmla.report.provenance import COMPUTED, how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Capacity"
COMMAND = "quantmla quantize MODEL -o OUT"
READS = ("checkpoint", "eval")
GIGABYTE = 10**9
CONTEXT = 131_072
PLANES = {
    "content": "content codes",
    "rope": "rope codes",
    "scales": "scales",
    "zero_points": "zero points",
    "mean": "mean rope key",
    "padding": "padding",
    "rows": "all planes",
}


def gather(run: RunFiles) -> Data | None:
    rows = [_of_checkpoint(record) for record in run.of("checkpoint")]
    seen = {row["format"] for row in rows}
    for record in run.of("eval"):
        for row in _of_rows(record):
            if row["format"] not in seen:
                rows.append(row)
                seen.add(row["format"])
    if not rows:
        return None
    layers = {row["layers"] for row in rows if row["layers"] is not None}
    if len(layers) == 1:
        rows = [_with_layers(row, *layers) for row in rows]
    rows = [row | {"factor": row["bf16_bytes"] / row["bytes"]} for row in rows]
    return {"bf16_bytes": rows[0]["bf16_bytes"], "context": CONTEXT, "rows": rows}


def _of_checkpoint(record: Record) -> Data:
    config = record.data
    found = config[CONFIG_KEY]
    fmt = format_from_json(found["format"])
    size = estimate(config, fmt, Workload(context=CONTEXT))
    per_layer, page = size.bytes_per_token_and_layer, fmt.page_size
    planes = None
    if "layout" in found:
        spans = {k: v for k, v in found["layout"].items() if k != "page_bytes"}
        planes = {name: (end - begin) / page for name, (begin, end) in spans.items()}
        planes["padding"] = per_layer - sum(planes.values())
    row = {
        "format": format_name(record),
        "bytes": per_layer,
        "bf16_bytes": size.bf16_bytes_per_token / size.cached_layers,
        "layers": None,
        "planes": planes,
        "request_ratio": size.ratio,
        "measured": measured(record, COMPUTED),
    }
    return _with_layers(row, size.cached_layers)


def _of_rows(record: Record) -> list[Data]:
    rows = record.data["rows"]
    plain_row = next((row for row in rows if row["format"] == "bf16"), None)
    if plain_row is None:
        return []
    sizes: dict[str, float] = {}
    for row in rows:
        sizes[row["format"]] = max(sizes.get(row["format"], 0.0), row["bytes_per_token"])
    return [
        {
            "format": name,
            "bytes": size,
            "bf16_bytes": plain_row["bytes_per_token"],
            "layers": None,
            "planes": None,
            "request_ratio": None,
            "measured": measured(record, COMPUTED),
        }
        for name, size in sizes.items()
        if name != "bf16"
    ]


def _with_layers(row: Data, layers: int) -> Data:
    return row | {
        "layers": layers,
        "model_bytes": row["bytes"] * layers,
        "bf16_model_bytes": row["bf16_bytes"] * layers,
        "tokens_per_gb": int(GIGABYTE // (row["bytes"] * layers)),
        "bf16_tokens_per_gb": int(GIGABYTE // (row["bf16_bytes"] * layers)),
    }


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    row = data["rows"][0]
    return [
        Headline("bytes per token and layer", row["bytes"], ",.4g", "lower"),
        Headline("tokens per GB", row.get("tokens_per_gb"), ",d", "higher"),
        Headline("times bf16's tokens", row["factor"], ".2f", "higher"),
    ]


def render(data: Mapping[str, Any]) -> Markup:
    rows = data["rows"]
    head = ["cache", "bytes / token / layer", "bytes / token", "tokens / GB", "× bf16"]
    head.append(f"× bf16 with window, {data['context']:,} tokens")
    body = [
        [
            row["format"],
            number(row["bytes"], ",.4g"),
            number(row.get("model_bytes"), ",.0f"),
            number(row.get("tokens_per_gb"), ",d"),
            number(row["factor"], ".2f"),
            number(row["request_ratio"], ".2f"),
        ]
        for row in rows
    ]
    first = rows[0]
    plain_cells = ["bf16", number(data["bf16_bytes"], ",.4g"), number(None, ""), number(None, "")]
    if first["layers"] is not None:
        plain_cells[2] = number(first["bf16_model_bytes"], ",.0f")
        plain_cells[3] = number(first["bf16_tokens_per_gb"], ",d")
    body.append([*plain_cells, number(None, ""), number(None, "")])
    shown = table(head, body, caption="Size of the cache; a GB is 10⁹ bytes")
    return join([figures(_drawing(data)), shown])


def _drawing(data: Mapping[str, Any]) -> Markup:
    drawn, used = [], []
    for row in data["rows"]:
        planes = row["planes"] or {"rows": row["bytes"]}
        kept = [(name, size) for name, size in planes.items() if size > 0]
        used += [name for name, _ in kept if name not in used]
        parts = [(PLANES[name], size, f"plane-{name}") for name, size in kept]
        drawn.append(Stack(label=row["format"], parts=parts, text=plain(row["bytes"], ".4g")))
    whole = data["bf16_bytes"]
    drawn.append(Stack(label="bf16", parts=[("bf16", whole, "bf16")], text=f"{whole:g}"))
    axis = Axis(label="bytes per token and layer", zero=True)
    drawing = join(
        [
            stacks(drawn, axis, "Bytes per token and layer by cache format"),
            legend([(PLANES[name], f"plane-{name}") for name in used] + [("bf16", "bf16")]),
        ]
    )
    sources = {row["measured"]["file"]: row["measured"] for row in data["rows"]}
    return figure("What a token takes", drawing, how=how(*sources.values()))
