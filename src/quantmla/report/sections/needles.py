"""Needle tests: what is recalled from how far, greedy decoding through the cache."""

from collections.abc import Mapping
from typing import Any

from quantmla.report.charts import Cell, heat
from quantmla.report.collect import Record, RunFiles
from quantmla.report.markup import Markup, figure, figures, join, number, numbers, plain, table
from quantmla.report.provenance import answered, how, measured
from quantmla.report.sections import Data
from quantmla.report.sections.tasks import NEEDLES, headlines

__all__ = ["COMMAND", "READS", "TITLE", "gather", "headlines", "render"]

TITLE = "Needles"
COMMAND = "quantmla eval OUT --tasks niah@2048 -o RUN"
READS = ("tasks",)


def gather(run: RunFiles) -> Data | None:
    found = [part for part in map(_gather, run.of("tasks")) if part["results"]]
    return {"parts": found} if found else None


def _gather(record: Record) -> Data:
    rows = [
        {
            "kind": row["task"].partition("@")[0].removeprefix("niah_"),
            "length": int(row["task"].partition("@")[2] or 0),
            "task": row["task"],
            **{key: row[key] for key in ("variant", "score", "stderr", "items")},
        }
        for row in record.data["results"]
        if row["task"].startswith(NEEDLES)
    ]
    needles = (t for t in record.data["tasks"] if t["name"].startswith(NEEDLES))
    kind = answered(record.data["settings"], needles)
    return {"results": rows, "measured": measured(record, kind, repeats=1)}


def render(data: Mapping[str, Any]) -> Markup:
    return join(_part(part) for part in data["parts"])


def _part(part: Mapping[str, Any]) -> Markup:
    rows = part["results"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    found = {(row["task"], row["variant"]): row for row in rows}
    body, cells = [], []
    for task in tasks:
        first = next(row for row in rows if row["task"] == task)
        line: list[object] = [first["kind"], number(first["length"], ",d")]
        line.append(number(first["items"], "d"))
        for name in variants:
            row = found.get((task, name))
            pair = (None, None) if row is None else (row["score"], row["stderr"])
            line.append(numbers((pair[0], ".1%"), (pair[1], ".1%")))
        body.append(line)
        label = f"{first['kind']}, {first['length']:,}"
        cells.append((label, [_cell(found.get((task, name)), name) for name in variants]))
    words = "share recalled; rows: kind of needle, tokens"
    drawing = heat(cells, variants, words, "Needles", share=True)
    head = ("needle", "tokens", "items", *variants)
    return join(
        [
            figures(figure("Recall", drawing, how=how(part["measured"]))),
            table(head, body, caption="Recall, ± standard error"),
            how(part["measured"]),
        ]
    )


def _cell(row: Mapping[str, Any] | None, name: str) -> Cell:
    if row is None:
        return Cell(value=None, text="", tip=f"{name}: not measured")
    shown = plain(row["score"], ".0%")
    return Cell(value=row["score"], text=shown, tip=f"{name}, {row['task']}: {shown}")
