"""Serving under memory pressure: the same jobs in the same bytes of cache."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from quantmla.report.charts import Axis, Dot, dots, legend
from quantmla.report.collect import Record, RunFiles
from quantmla.report.markup import Markup, figure, figures, join, number, plain, table
from quantmla.report.provenance import how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Serving"
COMMAND = "python benchmarks/bench_serve.py"
READS = ("serve",)
KIND = "native kernels in vllm, no weights (random), medians of all runs"
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
    newest = run.newest("serve")
    if newest is None:
        return None
    # other machines' rows of that day are no repeats
    here = _measured(newest)["machine"]
    records = [r for r in run.of_date(newest) if _measured(r)["machine"] == here]
    of_all = [row for record in records for row in record.data["rows"]]
    mixed = len({row.get("layers") for row in of_all}) > 1
    jobs: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in of_all:
        job = _of_model(row) if mixed else row["job"]
        jobs.setdefault(job, {}).setdefault(row["variant"], []).append(row)
    rows: list[Data] = [
        {"job": job, "variant": variant, "runs": len(members)}
        | {
            name: _middle([row[name] * unit for row in members])
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
    return {"rows": rows, "measured": [_measured(record) for record in records]}


def _measured(record: Record) -> Data:
    """Some jobs may have been run more often than others."""
    asked = ((row["job"], row.get("layers"), row["variant"]) for row in record.data["rows"])
    runs = sorted(Counter(asked).values())
    few, many = runs[0], runs[-1]
    return measured(record, KIND, repeats=few if few == many else f"{few} to {many}")


def _of_model(row: Mapping[str, Any]) -> str:
    """The job and how large its model was: other models' rows are no repeats."""
    return f"{row['job']}; {row.get('layers')} layers"


def _short(job: str) -> str:
    """As a chart's row has room for it: "5 x (128K + 1K), pool of 3" is "5x(128K+1K), pool 3"."""
    return re.sub(r" ?([x+]) ", r"\1", job).replace("pool of", "pool")


def _middle(values: Sequence[float]) -> float:
    """Their median; a whole number as one, which is written with all its digits."""
    found = median(values)
    return int(found) if float(found).is_integer() else found


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
    return join(
        [figures(_drawing(data)), table(head, body, caption="Jobs"), how(*data["measured"])]
    )


def _drawing(data: Mapping[str, Any]) -> Markup | None:
    drawn = [
        Dot(
            label=_short(row["job"]),
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
    return figure(title, drawing, how=how(*data["measured"]))
