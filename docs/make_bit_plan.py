"""Writes the tables of docs/bit_plan.md: `python docs/make_bit_plan.py`.

The numbers are those of the newest benchmarks/results/bit_plan_nano_<yyyymmdd>.json.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markers import replace_part

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "bit_plan.md"
RESULTS = ROOT / "benchmarks" / "results"
WIDTHS = (2, 3, 4)
Row = Mapping[str, Any]


def newest(folder: Path) -> Path:
    """The result file with the latest date in its name."""
    return max(folder.glob("bit_plan_nano_*.json"), key=lambda path: path.name)


def comparison(rows: Sequence[Row]) -> str:
    """One line for each format, by bytes and then by divergence without protection."""
    lines = [
        "| format | bytes per token | predicted | KL, nothing protected | KL, 4 + 128 protected |",
        "|---|---:|---:|---:|---:|",
    ]
    bare = [row for row in rows if not row["protected"]]
    kept = {row["name"]: row for row in rows if row["protected"]}
    for row in sorted(bare, key=lambda r: (-r["bytes_per_token"], r["kl_mean"])):
        cells = [
            row["name"],
            f"{row['bytes_per_token']:.1f}",
            f"{row['predicted_kl']:.5f}",
            _with_error(row),
            _with_error(kept[row["name"]]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_error(row: Row) -> str:
    return f"{row['kl_mean']:.5f} ± {row['kl_error']:.5f}"


def costs(rows: Sequence[Row], plan: Mapping[str, str]) -> str:
    """Measured costs in 1e-4 nats per token, and what the plan chose."""
    head = [f"{path} {bits}" for path in ("content", "rope") for bits in WIDTHS]
    lines = [f"| layer | {' | '.join(head)} | plan |", f"|---|{'---:|' * len(head)}---|"]
    by_cell = {(row["layer"], row["path"], row["bits"]): row["cost"] for row in rows}
    for layer in sorted({row["layer"] for row in rows}):
        cells = [
            f"{1e4 * by_cell[layer, path, bits]:.2f}"
            for path in ("content", "rope")
            for bits in WIDTHS
        ]
        lines.append(f"| {layer} | {' | '.join(cells)} | {plan[str(layer)]} |")
    return "\n".join(lines)


def source(header: Mapping[str, Any], name: str) -> str:
    """What was measured, where, and how to do it again."""
    transforms = {"full": "the transforms that `quantize` learns", "few": "the study's transforms"}
    where = ", ".join(header["gpus"]) or f"a CPU ({header['processor']}, {header['cores']} cores)"
    learning = header["learning"]
    return (
        f"On {where} with torch {header['versions']['torch']}: {header['windows']} windows of "
        f"{header['context']} tokens of the packaged held-out text, {transforms[learning]}, "
        f"± the standard error over windows. From `benchmarks/results/{name}`, which `python "
        f"benchmarks/bench_bit_plan.py --work DIR --learning {learning}` makes."
    )


def render(results: Path = RESULTS) -> str:
    """The whole page as it should be."""
    path = newest(results)
    found = json.loads(path.read_text(encoding="utf-8"))
    parts = (
        comparison(found["rows"]),
        source(found["header"], path.name),
        "Costs at 2, 3 and 4 bits, measured on calibration text, in 1e-4 nats per token:",
        costs(found["costs"], found["plan"]["formats"]),
    )
    return replace_part(PAGE, "results", "\n\n".join(parts))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
