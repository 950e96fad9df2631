"""Writes README's results table from the newest result file: `python docs/make_readme.py`.

A result file is benchmarks/results/quality_nano_<yyyymmdd>.json, as `quantmla eval --json` writes:
{"header": {"versions": {...}, "gpus": [...]}, "rows": [...]}.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markers import replace_in, replace_part

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
QUANTISERS = re.compile(r"quantisers_nano_(\d{8})\.json")
NAME = re.compile(r"quality_nano_(\d{4})(\d{2})(\d{2})\.json")
COLUMNS = ("bytes per token", "perplexity", "KL mean", "KL p99", "top-1", "recall")
Row = Mapping[str, Any]


def newest(folder: Path, pattern: re.Pattern[str] = NAME) -> Path | None:
    """The result file with the latest date in its name."""
    found = [p for p in folder.glob("*_nano_*.json") if pattern.fullmatch(p.name)]
    return max(found, key=lambda p: p.name, default=None)


def protection(row: Row) -> str:
    if row["recent"] is None and not row["sinks"]:
        return "none"
    return f"{row['sinks']} + {row['recent']}"


def _number(value: float | None, digits: str) -> str:
    return "-" if value is None else format(value, digits)


def _line(row: Row) -> str:
    cells = [
        str(row["method"]),
        _number(row["bytes_per_token"], ",.0f"),
        _number(row["perplexity"], ".3f"),
        _number(row["kl_mean"], ".5f"),
        _number(row["kl_p99"], ".3f"),
        _number(row["top1"], ".1%"),
        _number(row["recall"], ".1%"),
    ]
    return f"| {' | '.join(cells)} |"


def tables(rows: Sequence[Row]) -> list[str]:
    """One table per format and protection; the unquantised model heads each."""
    plain = [row for row in rows if row["format"] == "bf16"][:1]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["format"] != "bf16":
            key = str(row["format"]), protection(row)
            groups.setdefault(key, list(plain)).append(row)
    parts = []
    for (name, kept), members in groups.items():
        words = "unprotected" if kept == "none" else f"protected ({kept} tokens in bf16)"
        tokens = members[0]["tokens"]
        head = f"**{name.upper()}, {words}**, {tokens:,} tokens of held-out text"
        title = f"| method | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}"
        parts.append("\n".join((f"{head}\n", title, *map(_line, members))))
    return parts


def one_quantiser(path: Path) -> str:
    """KL of every transform in our quantiser, and how the published method's compares with ours."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    of: dict[str, dict[str, Row]] = {}
    for row in rows:
        kept = "protected" if row["protected"] else "unprotected"
        of.setdefault(f"{row['format'].upper()}, {kept}", {})[row["transform"]] = row
    names = list(dict.fromkeys(row["transform"] for row in rows))
    heads = [
        "KL mean in our quantiser",
        *names,
        "`paper` less `quantmla`",
        "windows it is lower in",
    ]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for title, found in of.items():
        paper = found["paper"]
        cells = [title, *(f"{found[name]['kl_mean']:.5f}" for name in names)]
        cells += [f"{paper['kl_more_than_ours']:+.5f} ± {paper['standard_error']:.5f}"]
        cells += [f"{paper['windows_below_ours']} of {paper['windows']}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join((f"From `benchmarks/results/{path.name}`.\n", *lines))


def render(folder: Path = RESULTS, readme: Path = README) -> str:
    """README as it should be."""
    path = newest(folder)
    if path is None:
        return replace_part(readme, "results", "No result file yet; `make demo` prints a table.")
    data = json.loads(path.read_text(encoding="utf-8"))
    match = NAME.fullmatch(path.name)
    assert match is not None
    versions, gpus = data["header"]["versions"], data["header"]["gpus"]
    where = f"torch {versions['torch']}, {', '.join(gpus) or 'CPU'}"
    source = (
        f"`nano`, {'-'.join(match.groups())}, QuantMLA {versions['quantmla']}, {where}; "
        f"from `benchmarks/results/{path.name}`."
    )
    text = replace_part(readme, "results", "\n\n".join((source, *tables(data["rows"]))))
    same = newest(folder, QUANTISERS)
    return text if same is None else replace_in(text, "quantisers", one_quantiser(same))


if __name__ == "__main__":
    README.write_text(render(), encoding="utf-8")
