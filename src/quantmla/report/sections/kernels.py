"""Decode, append and generation on a GPU, beside BF16 ones."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantmla.report.charts import Axis, Dot, dots
from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup, figure, figures, join, number, plain, table
from quantmla.report.provenance import NATIVE, how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Kernels"
COMMAND = "quantmla bench decode"
READS = ("decode", "append", "native")
DECODE = ("backend", "format", "heads", "query_len", "context", "batch", "us", "baseline")
APPEND = ("backend", "format", "job", "us", "bytes", "gb_per_s")
DECODE_TITLE = "Decode against the fastest BF16 kernel"
GENERATE = ("cache", "layers", "batch", "context", "ms_per_step")


def gather(run: RunFiles) -> Data | None:
    found: Data = {}
    wanted = {"decode": (*DECODE, "baseline_us"), "append": APPEND, "native": GENERATE}
    for kind, keys in wanted.items():
        record = run.newest(kind)
        found[kind] = None
        if record is not None:
            kept = [row for row in record.data["rows"] if set(keys) <= set(row)]
            rows = [{key: row[key] for key in keys} for row in kept]
            for row in rows if kind == "decode" else ():
                other = row["baseline_us"]
                row["ratio"] = None if other is None else other / row["us"]  # the file's is rounded
            source = NATIVE if kind != "native" else "generation in transformers"
            found[kind] = {"rows": rows, "measured": measured(record, source)}
    return found if any(found.values()) else None


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    if not data["decode"]:
        return []
    return [
        Headline(f"decode × {row['baseline']}: {_job(row)}", row["ratio"], ".2f", "higher")
        for row in data["decode"]["rows"]
    ]


def _job(row: Mapping[str, Any]) -> str:
    return f"{row['backend']} {row['format']}, {row['heads']} heads, {_size(row)}"


def _size(row: Mapping[str, Any]) -> str:
    context = row["context"]
    words = f"{context // 1024}k" if context % 1024 == 0 else f"{context:,}"
    return f"{words} × {row['batch']}"


def render(data: Mapping[str, Any]) -> Markup:
    parts: list[Markup] = []
    if data["decode"]:
        parts += _decode(data["decode"])
    if data["append"]:
        parts += _simple(data["append"], "Append", ("µs", "bytes moved", "GB/s"))
    if data["native"]:
        parts += _simple(data["native"], "Generation", ("layers", "batch", "context", "ms / step"))
    return join(parts)


def _decode(found: Mapping[str, Any]) -> list[Markup]:
    body = [
        [
            row["backend"],
            row["format"],
            *(number(row[key], ",d") for key in ("heads", "query_len", "context", "batch")),
            number(row["us"], ",.1f"),
            row["baseline"],
            number(row["baseline_us"], ",.1f"),
            number(row["ratio"], ".2f"),
        ]
        for row in found["rows"]
    ]
    head = ["backend", "cache", "heads", "queries", "context", "batch", "µs"]
    head += ["BF16 kernel", "its µs", "×"]
    shown = table(head, body, caption=DECODE_TITLE)
    return [figures(_decode_drawing(found)), shown, how(found["measured"])]


def _decode_drawing(found: Mapping[str, Any]) -> Markup:
    drawn = [
        Dot(
            label=f"{row['format']} {row['heads']}h {_size(row)}",
            value=row["ratio"],
            text=plain(row["ratio"], ".2f"),
            colour="quantmla" if row["format"] == "c4r4" else "paper",
            shape="circle" if row["backend"] == "triton" else "square",
        )
        for row in found["rows"]
    ]
    axis = Axis(label="BF16 time ÷ ours; 1 is as fast", zero=True)
    note = "Heads, context × batch; circles Triton, squares CUDA."
    drawing = dots(drawn, axis, DECODE_TITLE, reference=1.0)
    return figure(DECODE_TITLE, drawing, how=how(found["measured"]), note=note)


def _simple(found: Mapping[str, Any], title: str, heads: Sequence[str]) -> list[Markup]:
    rows = found["rows"]
    words = [key for key, value in rows[0].items() if isinstance(value, str)]
    values = [key for key in rows[0] if key not in words]
    body = [
        [
            *(row[key] for key in words),
            *(number(row[key], ",.1f" if isinstance(row[key], float) else ",d") for key in values),
        ]
        for row in rows
    ]
    return [table([*words, *heads], body, caption=title), how(found["measured"])]
