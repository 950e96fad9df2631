"""Writes the tables and the plot of docs/serving.md: `python docs/make_serving.py`.

From benchmarks/results/serve_<gpu>_<yyyymmdd>.json, which benchmarks/bench_serve.py writes, and
others of that GPU and date, serve_<gpu>_<yyyymmdd>_<what>.json: medians of all runs of a job;
scheduler_<yyyymmdd>.json, by serve_scheduler.py, answers_<gpu>_<yyyymmdd>.json, by
serve_answers.py, and families_<gpu>_<yyyymmdd>.json, by serve_families.py. The newest are taken.
"""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from markers import replace_in

PAGE = Path(__file__).with_name("serving.md")
PLOT = Path(__file__).with_name("serving.svg")
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
NAMES = {
    "serve": re.compile(r"serve_.+_(\d{8})\.json"),
    "scheduler": re.compile(r"scheduler_(\d{8})\.json"),
    "answers": re.compile(r"answers_.+_(\d{8})\.json"),
    "families": re.compile(r"families_.+_(\d{8})\.json"),
}
COLUMNS = (
    *("cache", "pool, tokens", "output tok/s", "of all runs", "x bf16", "preemptions"),
    "computed twice",
    *("running", "TTFT p50, s", "TPOT p50, ms", "TPOT p99, ms", "gap p50, ms", "runs"),
)
COUNTED = ("pool_bytes", "preemptions", "recomputed_tokens", "max_running", "steps")
COLOURS = {"bf16": "#888888", "c4r4": "#1f6fb2", "c2r4": "#7fb3d8"}
Row = Mapping[str, Any]
Asked = tuple[str, int]  # a job, and of how many layers the model was


def newest(folder: Path, what: str) -> Path | None:
    """The result file of a kind with the latest date in its name."""
    dated = [(match[1], p) for p in folder.iterdir() if (match := NAMES[what].fullmatch(p.name))]
    return max(dated)[1] if dated else None


def jobs(rows: Sequence[Row]) -> dict[Asked, dict[str, dict[str, Any]]]:
    """By job, the model's layers and variant: medians of all numbers, runs and their range.

    What has no clock in it must be the same in all runs; ValueError names a job of others.
    """
    groups: dict[tuple[Asked, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(((row["job"], row["layers"]), row["variant"]), []).append(row)
    found: dict[Asked, dict[str, dict[str, Any]]] = {}
    for (asked, variant), members in groups.items():
        if len({tuple(row.get(name) for name in COUNTED) for row in members}) > 1:
            raise ValueError(f"runs of {asked}, {variant}, differ in one of {COUNTED}")
        middle = {
            name: median(row[name] for row in members)
            for name, value in members[0].items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        speeds = [row["output_tok_s"] for row in members]
        runs = {"runs": len(members), "slowest": min(speeds), "fastest": max(speeds)}
        runs["prefix_caching"] = members[0]["prefix_caching"]
        found.setdefault(asked, {})[variant] = middle | runs
    return found


def gain(variants: Mapping[str, Mapping[str, Any]], variant: str) -> float | None:
    """Output tokens a second against the unquantised cache's."""
    plain = variants.get("bf16")
    return None if plain is None else variants[variant]["output_tok_s"] / plain["output_tok_s"]


def _single(variants: Mapping[str, Mapping[str, Any]], variant: str) -> str:
    """The least and the largest ratio that a run of the packed cache and one of bf16 have."""
    packed, plain = variants[variant], variants["bf16"]
    least = f"{packed['slowest'] / plain['fastest']:.2f}"
    most = f"{packed['fastest'] / plain['slowest']:.2f}"
    return least if least == most else f"{least} to {most}"


def gains_table(rows: Sequence[Row]) -> str:
    """Jobs that all caches have run, by what they gain: ratios of medians and of single runs."""
    caches = ("c4r4", "c2r4")
    lines = [
        "| throughput against bf16 | layers | C4R4 | of single runs | C2R4 | of single runs |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    found = [(asked, v) for asked, v in jobs(rows).items() if {"bf16", *caches} <= set(v)]
    for (job, layers), variants in sorted(found, key=lambda each: -(gain(each[1], "c4r4") or 0)):
        ratios = (f"{gain(variants, name):.2f} | {_single(variants, name)}" for name in caches)
        lines.append(f"| {job} | {layers} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def _line(variants: Mapping[str, Mapping[str, Any]], variant: str) -> str:
    row, ratio = variants[variant], gain(variants, variant)
    cells = (
        variant,
        f"{row['pool_tokens']:,.0f}",
        f"{row['output_tok_s']:,.0f}",
        f"{row['slowest']:,.0f} to {row['fastest']:,.0f}" if row["runs"] > 1 else "",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{row['preemptions']:,.0f}",
        f"{row['recomputed_tokens']:,.0f}",
        f"{row['max_running']:,.0f}",
        f"{row['ttft_p50']:.2f}",
        f"{1000 * row['tpot_p50']:.2f}",
        f"{1000 * row['tpot_p99']:.2f}",
        f"{1000 * row['gap_p50']:.2f}",
        str(row["runs"]),
    )
    return f"| {' | '.join(cells)} |"


def tables(rows: Sequence[Row]) -> list[str]:
    """One table for each job."""
    title = f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}"
    parts = []
    for (job, layers), variants in jobs(rows).items():
        first = next(iter(variants.values()))
        gib = max(row["pool_bytes"] for row in variants.values()) / 2**30
        caching = "on" if first["prefix_caching"] else "off"
        head = f"**{job}**: {layers} layers, cache of {gib:.2f} GiB, prefix caching "
        lines = [_line(variants, variant) for variant in variants]
        parts.append("\n".join((f"{head}{caching}\n", title, *lines)))
    return parts


def plot(rows: Sequence[Row]) -> str:
    """Output tokens a second of every job against bf16's, as SVG."""
    found = jobs(rows)
    ratios = [gain(variants, variant) or 1.0 for variants in found.values() for variant in variants]
    most = max(ratios, default=1.0)
    unit = min(90.0, 560 / most)  # width of 1.00; a figure stands behind its bar
    bars, top = [], 50
    for (job, layers), variants in found.items():
        bars.append(
            f'<text x="8" y="{top + 12}"><tspan font-weight="bold">{escape(job)}</tspan>'
            f"; {layers} layers</text>"
        )
        top += 20
        for variant in variants:
            ratio = gain(variants, variant)
            width = unit * (ratio or 0.0)
            said = "no run of bf16" if ratio is None else f"{ratio:.2f}"
            bars.append(
                f'<text x="56" y="{top + 12}" text-anchor="end">{escape(variant)}</text>'
                f'<rect x="62" y="{top}" width="{width:.1f}" height="15" '
                f'fill="{COLOURS.get(variant, "#444444")}"/>'
                f'<text x="{68 + width:.1f}" y="{top + 12}">{said}</text>'
            )
            top += 18
        top += 8
    lines = "".join(
        f'<line x1="{62 + unit * i:.1f}" y1="48" x2="{62 + unit * i:.1f}" y2="{top}" '
        f'stroke="{"#888888" if i == 1 else "#dddddd"}"/>'
        f'<text x="{62 + unit * i:.1f}" y="42" text-anchor="middle" fill="#666666">{i}</text>'
        for i in range(1, int(most) + 1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="680" height="{top + 8}" '
        'font-family="sans-serif" font-size="12">\n'
        "<style>text {paint-order: stroke; stroke: white; stroke-width: 3px}</style>\n"
        f'<rect width="680" height="{top + 8}" fill="white"/>\n'
        '<text x="8" y="20">Output tokens a second of the whole job, against bf16 in the same '
        f"bytes</text>\n{lines}\n" + "\n".join(bars) + "\n</svg>\n"
    )


def held(row: Row) -> float:
    """Cached tokens per byte at the step that held most."""
    return float(row["peak_tokens"] / (row["peak_blocks"] * row["pool_bytes"] / row["blocks"]))


def scheduler_table(rows: Sequence[Row]) -> str:
    """What vLLM's scheduler did with every job, without a model."""
    plain = {row["job"]: row for row in rows if row["variant"] == "bf16"}
    lines = [
        "| job | cache | running at most | preemptions | computed twice | prefixes reused "
        "| tokens per byte, x bf16 |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = (
            row["job"],
            row["variant"],
            f"{row['max_running']:,}",
            f"{row['preemptions']:,}",
            f"{row['recomputed_tokens']:,}",
            f"{row['reused_tokens']:,}",
            f"{held(row) / held(plain[row['job']]):.2f}" if row["job"] in plain else "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


NOT_RUN = (
    "**Not run yet**: no serving result is in `benchmarks/results`, and no claim of speed is made."
)


def _scheduled(folder: Path) -> str:
    path = newest(folder, "scheduler")
    if path is None:
        return NOT_RUN
    data = json.loads(path.read_text(encoding="utf-8"))
    version = data["environment"]["packages"]["vllm"]
    source = f"vllm {version}, on a CPU; from `benchmarks/results/{path.name}`."
    return f"{source}\n\n{scheduler_table(data['rows'])}"


def answers_table(rows: Sequence[Row]) -> str:
    """How far vLLM's answers are from those of transformers; runs that agree share a row."""
    lines = [
        "| run | case | requests | tokens | other greedy tokens | by at most | rms | allowed "
        "| worst | allowed |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    runs_of: dict[tuple[str, ...], list[str]] = {}
    for row in sorted(rows, key=lambda row: str(row["run"])):
        counts = (f"{row[name]:,}" for name in ("requests", "tokens", "other_tokens"))
        in_nats = ("largest_lead", "rms", "rms_allowed", "worst", "worst_allowed")
        cells = (row["case"], *counts, *(f"{row[name]:.3f}" for name in in_nats))
        runs_of.setdefault((row["run"].split(",")[0], *cells), []).append(row["run"])
    for (fmt, *cells), runs in runs_of.items():
        names = " and ".join(run.removeprefix(f"{fmt}, ") for run in runs)
        lines.append(f"| {fmt}, {names} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _answers(folder: Path) -> str:
    path = newest(folder, "answers")
    if path is None:
        return NOT_RUN
    data = json.loads(path.read_text(encoding="utf-8"))
    where = data["environment"]
    source = (
        f"Served on {where['gpu']} by vllm {where['packages']['vllm']}, in nats; from "
        f"`benchmarks/results/{path.name}`."
    )
    return f"{source}\n\n{answers_table(data['rows'])}"


def families_table(rows: Sequence[Row]) -> str:
    """Which families started and decoded, and what was allocated for them."""
    lines = [
        "| family | packed layers | bytes a token and layer | compiled |",
        "|---|---:|---:|---|",
    ]
    for row in rows:
        assert row["finite"], f"{row['family']} gave numbers that are none"
        sizes = ", ".join(map(str, row["bytes_per_token"]))
        compiled = "yes" if row["compiled"] else "no"
        lines.append(f"| {row['family']} | {row['packed_layers']} | {sizes} | {compiled} |")
    return "\n".join(lines)


NO_FAMILIES = "No result file of `benchmarks/serve_families.py` is in `benchmarks/results`."


def _families(folder: Path) -> str:
    path = newest(folder, "families")
    if path is None:
        return NO_FAMILIES
    data = json.loads(path.read_text(encoding="utf-8"))
    where, formats = data["environment"], sorted({row["format"] for row in data["rows"]})
    source = (
        f"Started and decoding on {where['gpu']} in {', '.join(formats)}, few layers and no "
        f"weights; from `benchmarks/results/{path.name}`."
    )
    return f"{source}\n\n{families_table(data['rows'])}"


def _source(path: Path, data: Mapping[str, Any]) -> str:
    where, versions = data["environment"], data["environment"]["packages"]
    used = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return (
        f"- `benchmarks/results/{path.name}`: of {where['time'][:16]}, {where['gpu']}, "
        f"driver {where['driver']}, QuantMLA {where['quantmla']}, {used}"
    )


def render(folder: Path = RESULTS, page: Path = PAGE) -> tuple[str, str | None]:
    """The page as it should be, and the plot if there is something to plot."""
    parts = {"serving": NOT_RUN, "gains": NOT_RUN}
    parts |= {"scheduler": _scheduled(folder), "answers": _answers(folder)}
    parts["families"] = _families(folder)
    drawing, first = None, newest(folder, "serve")
    if first is not None:
        paths = sorted(folder.glob(f"{first.stem}*.json"))
        found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        rows = [row for data in found for row in data["rows"]]
        sources = "\n".join(map(_source, paths, found))
        picture = f"![Output tokens a second against bf16]({PLOT.name})"
        parts["serving"] = "\n\n".join((sources, picture, *tables(rows)))
        parts["gains"], drawing = gains_table(rows), plot(rows)
    text = page.read_text(encoding="utf-8")
    for name, body in parts.items():
        text = replace_in(text, name, body, str(page))
    return text, drawing


if __name__ == "__main__":
    text, drawn = render()
    PAGE.write_text(text, encoding="utf-8")
    if drawn is not None:
        PLOT.write_text(drawn, encoding="utf-8")
