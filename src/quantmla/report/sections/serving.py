"""Serving under memory pressure: the same jobs in the same bytes of cache."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from quantmla.report.charts import Axis, Dot, dots, legend
from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup, figure, figures, join, number, plain, table
from quantmla.report.provenance import how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Serving"
COMMAND = "python benchmarks/bench_serve.py"
READS = ("serve",)
KIND = "native kernels in vllm, no weights (random), medians of the repeats"
COLOURS = {"c4r4": "quantmla", "c2r4": "paper"}
FIGURES = {
    "pool_tokens": ("pool, tokens", ",.0f", 1),
    "output_tok_s": ("output tok/s", ",.0f", 1),
    "preemptions": ("preemptions", ",.0f", 1),
    "max_running": ("running", ",.0f", 1),
    "ttft_p50": ("TTFT p50, s", ".2f", 1),
    "tpot_p50": ("TPOT p50, ms", ".2f", 1000),
    "tpot_p99": ("TPOT p99, ms", ".2f", 1000),
}


def gather(run: RunFiles) -> Data | None:
    record = run.newest("serve")
    if record is None:
        return None
    jobs: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in record.data["rows"]:
        jobs.setdefault(_asked(row), {}).setdefault(row["variant"], []).append(row)
    rows: list[Data] = [
        {"job": job, "variant": variant, "runs": len(members)}
        | {
            name: median(row[name] for row in members) * unit
            for name, (_, _, unit) in FIGURES.items()
            if all(row.get(name) is not None for row in members)
        }
        for job, variants in jobs.items()
        for variant, members in variants.items()
    ]
    base = {row["job"]: row["output_tok_s"] for row in rows if row["variant"] == "bf16"}
    for row in rows:
        own = base.get(row["job"])
        row["ratio"] = row["output_tok_s"] / own if own else None
    repeats = min(row["runs"] for row in rows)
    return {"rows": rows, "measured": measured(record, KIND, repeats=repeats)}


def _asked(row: Mapping[str, Any]) -> str:
    """The job and how large its model was: other models' rows are no repeats."""
    return row["job"] if row.get("layers") is None else f"{row['job']}; {row['layers']} layers"


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    return [
        Headline(f"{row['job']} × bf16 ({row['variant']})", row["ratio"], ".2f", "higher")
        for row in data["rows"]
        if row["variant"] != "bf16"
    ]


def render(data: Mapping[str, Any]) -> Markup:
    rows: Sequence[Mapping[str, Any]] = data["rows"]
    head = ("job", "cache", *(name for name, _, _ in FIGURES.values()), "× bf16", "runs")
    body = [
        [
            row["job"],
            row["variant"],
            *(number(row.get(name), spec) for name, (_, spec, _) in FIGURES.items()),
            number(row["ratio"], ".2f"),
            number(row["runs"], "d"),
        ]
        for row in rows
    ]
    return join([figures(_drawing(data)), table(head, body, caption="Jobs"), how(data["measured"])])


def _drawing(data: Mapping[str, Any]) -> Markup | None:
    drawn = [
        Dot(
            label=row["job"],
            value=row["ratio"],
            text=plain(row["ratio"], ".2f"),
            colour=COLOURS.get(row["variant"], "other"),
        )
        for row in data["rows"]
        if row["ratio"] is not None and row["variant"] != "bf16"
    ]
    if not drawn:
        return None
    variants = dict.fromkeys(row["variant"] for row in data["rows"] if row["variant"] != "bf16")
    title = "Output tokens a second against bf16 in the same bytes"
    axis = Axis(label="times bf16; 1 is as fast", zero=True)
    key = legend([(name, COLOURS.get(name, "other")) for name in variants])
    drawing = join([dots(drawn, axis, title, reference=1.0), key])
    return figure(title, drawing, how=how(data["measured"]))
