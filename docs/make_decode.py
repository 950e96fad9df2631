"""Writes the decode tables of docs/kernels.md: `python docs/make_decode.py`.

The numbers are those of the newest benchmarks/results/decode_<gpu>_<yyyymmdd>.json, which
`quantmla bench decode --cases all --backend cuda` wrote.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markers import replace_in

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "kernels.md"
RESULTS = ROOT / "benchmarks" / "results"
Row = Mapping[str, Any]


class Goal(NamedTuple):
    """A ratio to the faster BF16 kernel."""

    heads: int
    context: int
    batch: int
    format: str
    must: float
    aim: float


GOALS = (
    Goal(16, 32768, 32, "c4r4", 1.8, 2.6),
    Goal(16, 131072, 8, "c4r4", 1.8, 2.6),
    Goal(16, 8192, 32, "c4r4", 1.6, 2.2),
    Goal(16, 131072, 1, "c4r4", 1.3, 1.7),
    Goal(16, 32768, 1, "c4r4", 1.0, 1.2),
    Goal(32, 32768, 32, "c4r4", 1.5, 2.2),
    Goal(64, 32768, 32, "c4r4", 1.0, 1.25),
    Goal(128, 32768, 32, "c4r4", 0.75, 0.95),
    Goal(16, 32768, 32, "c2r4", 1.8, 2.8),
)
HEAD = (
    "| heads | query | context x batch | format | us | faster BF16 kernel, us | ratio "
    "| unpack, attend: us |"
)


def newest(folder: Path) -> Path:
    """The result file with the latest date in its name."""
    return max(folder.glob("decode_*.json"), key=lambda path: path.name)


def size(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens < 2**20 else f"{tokens // 2**20}M"


def find(rows: Sequence[Row], goal: Goal) -> Row:
    """The row of a goal, one query token."""
    wanted = {**goal._asdict(), "query_len": 1}
    keys = ("heads", "context", "batch", "format", "query_len")
    (row,) = (r for r in rows if all(r[key] == wanted[key] for key in keys))
    return row


def ratio(row: Row) -> float:
    """Times as fast as the faster BF16 kernel; the file's own ratio is rounded."""
    return float(row["baseline_us"] / row["us"])


def cells(row: Row) -> list[str]:
    shape = f"{size(row['context'])} x {row['batch']}"
    name = row["format"].upper()
    other = f"{row['baseline_us']:.1f} ({row['baseline']})"
    both = f"{row['dequantize_then_attend_us']:.0f}"
    first = [str(row["heads"]), str(row["query_len"]), shape, name, f"{row['us']:.1f}"]
    return [*first, other, f"{ratio(row):.2f}", both]


def line(parts: Sequence[str]) -> str:
    return f"| {' | '.join(parts)} |"


def goals(rows: Sequence[Row]) -> str:
    """A line for each goal; a ratio that misses its must is marked."""
    lines = [f"{HEAD} must | aim |", "|---:|---:|---|---|---:|---:|---:|---:|---:|---:|"]
    for goal in GOALS:
        row = find(rows, goal)
        missed = " (missed)" if ratio(row) < goal.must else ""
        lines.append(line([*cells(row), f"{goal.must}{missed}", str(goal.aim)]))
    return "\n".join(lines)


def others(rows: Sequence[Row], queries: bool) -> str:
    """Several query tokens, or one at sizes from 1K to 1M."""
    lines = [HEAD, "|---:|---:|---|---|---:|---:|---:|---:|"]
    goal_sizes = {(g.context, g.batch) for g in GOALS if g.heads == 16}
    for row in sorted(rows, key=lambda r: (r["query_len"], r["batch"], r["context"])):
        sweep = row["heads"] == 16 and row["format"] == "c4r4" and row["query_len"] == 1
        sweep = sweep and ((row["context"], row["batch"]) not in goal_sizes or row["batch"] > 1)
        if row["query_len"] > 1 if queries else sweep:
            lines.append(line(cells(row)))
    return "\n".join(dict.fromkeys(lines))


def machine(environment: Mapping[str, Any]) -> str:
    packages = environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton", "vllm"))
    return (
        f"One {environment['gpu']}, driver {environment['driver']}, CUDA {environment['cuda']}, "
        f"{versions}; `{newest(RESULTS).name}`."
    )


def render() -> str:
    """The page with its tables."""
    found = json.loads(newest(RESULTS).read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    text = replace_in(text, "machine of the decode tables", machine(found["environment"]))
    text = replace_in(text, "decode goals", goals(found["rows"]))
    text = replace_in(text, "decode of several queries", others(found["rows"], True))
    return replace_in(text, "decode from 1K to 1M", others(found["rows"], False))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
