"""Results as text for people, or as JSON for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from quantmla.doctor import gpus, versions
from quantmla.workdir import write_whole

ROW = {"method", "format", "kl_mean"}  # among what `eval` says of a cache
ANY_WIDTH = 10_000  # a narrow terminal breaks lines, a pipe has no width: neither may cost digits
Row = Mapping[str, Any]


def show(report: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints a report to stdout."""
    if as_json:
        print(json.dumps(_finite(report), indent=2))
        return
    lines = list(_lines(report, ""))
    width = max((len(name) for name, value in lines if value is not None), default=0)
    for name, value in lines:
        print(name if value is None else f"{name:<{width}}  {value}".rstrip())


def show_rows(rows: Sequence[Row]) -> None:
    """Prints result rows as a table; columns in the order of the first row, never cut short.

    What is a table of its own in a row, such as figures by context, is for JSON only.
    """
    table = Table(box=None, pad_edge=False)
    nested = {name for name, value in (rows[0] if rows else {}).items() if _is_table(value)}
    for name in rows[0] if rows else ():
        if name in nested:
            continue
        side: Literal["left", "right"] = "left" if isinstance(rows[0][name], str) else "right"
        table.add_column(name, justify=side, no_wrap=True)
    for row in rows:
        table.add_row(*(_text(value) for name, value in row.items() if name not in nested))
    Console(width=ANY_WIDTH).print(table)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes {"header": versions and GPUs, "rows": rows} as JSON, whole or not at all."""
    header = {"versions": versions(), "gpus": [gpu["name"] for gpu in gpus()]}
    text = json.dumps(_finite({"header": header, "rows": list(rows)}), indent=2) + "\n"
    write_whole(path, text.encode())


def are_rows(data: Any) -> bool:
    """Whether this is what `write_rows` wrote for `eval`; its header tells other tables apart."""
    plain = set(data) == {"header", "rows"} and set(data["header"]) == {"versions", "gpus"}
    return plain and bool(data["rows"]) and all(set(row) >= ROW for row in data["rows"])


def _is_table(value: Any) -> bool:
    several = isinstance(value, list | tuple) and bool(value)
    return several and isinstance(value[0], Mapping)


def _aligned(rows: Sequence[Row]) -> list[str]:
    """A table's lines: a heading, then numbers to the right and words to the left."""
    heads = list(rows[0])
    cells = [[head.replace("_", " ") for head in heads]]
    cells += [[_text(row.get(head)) for head in heads] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = ["<" if isinstance(rows[0][head], str) else ">" for head in heads]
    return [
        "  ".join(f"{c:{side}{w}}" for c, side, w in zip(line, sides, widths, strict=True)).rstrip()
        for line in cells
    ]


def _lines(report: Mapping[str, Any], indent: str) -> list[tuple[str, str | None]]:
    """Names with values; a name with None is a whole line."""
    found: list[tuple[str, str | None]] = []
    for key, value in report.items():
        name = indent + str(key).replace("_", " ")
        if isinstance(value, Mapping):
            found += [(name, ""), *_lines(value, indent + "  ")]
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            found.append((name, ""))
            found += [(indent + "  " + line, None) for line in _aligned(value)]
        elif value is not None:
            found.append((name, _text(value) + _in_units(str(key), value)))
    return found


def _in_units(key: str, value: Any) -> str:
    """Large sizes in GiB or MiB beside the bytes."""
    if not (key.endswith("bytes") or key == "budget") or value < 2**20:
        return ""
    return f" ({value / 2**30:,.2f} GiB)" if value >= 2**30 else f" ({value / 2**20:,.1f} MiB)"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) >= 1
        return f"{value:,.0f}" if whole else f"{value:{',.1f' if abs(value) >= 1000 else '.4g'}}"
    if isinstance(value, list | tuple):
        return ", ".join(_text(entry) for entry in value) or "none"
    return "-" if value is None else str(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: those become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
