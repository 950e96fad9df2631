"""Writes the table of choices in docs/maths.md: `python docs/make_maths.py`.

The numbers are those of the newest benchmarks/results/choices_nano_<yyyymmdd>.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markers import replace_part

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "maths.md"
RESULTS = ROOT / "benchmarks" / "results"
SETTINGS = ("protected", "unprotected")
Rows = Mapping[tuple[str, str], Mapping[str, Any]]


def newest(folder: Path) -> Path:
    """The result file with the latest date in its name."""
    return max(folder.glob("choices_nano_*.json"), key=lambda path: path.name)


def table(rows: Rows) -> str:
    """One line for each choice; formats side by side."""
    formats = list(dict.fromkeys(name for name, _ in rows))
    heads = [f"{name.upper()}, {setting}" for name in formats for setting in SETTINGS]
    lines = [f"| choice | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for choice in dict.fromkeys(choice for _, choice in rows):
        cells = [_cell(rows, name, choice, s) for name in formats for s in SETTINGS]
        lines.append(f"| {choice} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(rows: Rows, name: str, choice: str, setting: str) -> str:
    if (name, choice) not in rows:
        return "-"
    found = rows[name, choice][setting]
    if found["more"] == 0:  # the method as it is
        return f"{found['kl_mean']:.5f}"
    return f"{100 * found['more']:+.1f} ± {100 * found['more_error']:.1f} %"


def render(folder: Path = RESULTS, page: Path = PAGE) -> str:
    """The page as it should be."""
    path = newest(folder)
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = {(row["format"], row["choice"]): row for row in data["rows"]}
    header = data["header"]
    where = f"torch {header['versions']['torch']}, {', '.join(header['gpus']) or 'CPU'}"
    source = (
        f"`nano`, {header['windows']} windows of calibration text, {where}; from "
        f"`benchmarks/results/{path.name}`. First line: mean KL; others: what they "
        "have more (+) or less."
    )
    return replace_part(page, "choices", f"{source}\n\n{table(rows)}")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
