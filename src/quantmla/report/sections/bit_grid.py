"""Divergence over bits of the latent and bits of the rope key, one method at one protection."""

from collections.abc import Mapping
from typing import Any

from quantmla.report.charts import Cell, heat
from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup, el, figure, figures, join, number, plain, table
from quantmla.report.provenance import SIMULATED, how, measured
from quantmla.report.sections import Data, Headline
from quantmla.report.sections.quality import protection

TITLE = "Bits of content and rope"
COMMAND = (
    "for F in c2r4 c3r4 c4r3 c4r4; do "
    "quantmla eval OUT --format $F --unprotected --json OUT/$F.json; done"
)
READS = ("eval",)
LEAST = 4  # cells that make a grid


def gather(run: RunFiles) -> Data | None:
    """A file that was made as a grid stands alone; other files' formats go together."""
    grids: dict[tuple[str | None, str, int, int | None], Data] = {}
    for record in run.of("eval"):
        alone = record.name if record.data["header"].get("grid") else None
        for row in record.data["rows"]:
            if row["format"] == "bf16" or not row["format"].startswith("c"):
                continue
            content, rope = (int(bits) for bits in row["format"][1:].split("r"))
            facts = {key: row[key] for key in ("method", "sinks", "recent")}
            key = (alone, row["method"], row["sinks"], row["recent"])
            grid = grids.setdefault(key, {**facts, "cells": {}})
            grid["measured"] = measured(record, SIMULATED, n=row["tokens"], of="tokens", repeats=1)
            grid["note"] = record.data["header"].get("note")
            cell = {"content": content, "rope": rope, "bytes": row["bytes_per_token"]}
            grid["cells"][row["format"]] = cell | {"kl": row["kl_mean"], "top1": row["top1"]}
    whole = [
        grid | {"cells": list(grid["cells"].values())}
        for grid in grids.values()
        if len(grid["cells"]) >= LEAST
    ]
    return {"grids": whole} if whole else None


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    return []


def render(data: Mapping[str, Any]) -> Markup:
    parts = []
    for grid in data["grids"]:
        title = f"{grid['method']}, {protection(grid)}"
        body = [
            [
                f"C{cell['content']}R{cell['rope']}",
                number(cell["bytes"], ",.4g"),
                number(cell["kl"], ".5f"),
                number(cell["top1"], ".1%"),
            ]
            for cell in sorted(grid["cells"], key=lambda c: (-c["bytes"], c["kl"]))
        ]
        head = ("cache", "bytes / token / layer", "KL mean", "top-1")
        shown = el("details", el("summary", title), table(head, body, caption=title))
        parts += [figures(_map(grid, title)), shown]
    return join(parts)


def _map(grid: Mapping[str, Any], title: str) -> Markup:
    found = {(cell["content"], cell["rope"]): cell for cell in grid["cells"]}
    content = sorted({c for c, _ in found})
    rope = sorted({r for _, r in found})
    rows = [(f"R{r}", [_cell(found.get((c, r)), f"C{c}R{r}") for c in content]) for r in rope]
    words = "mean KL, nats per token; content across, rope down"
    drawing = heat(rows, [f"C{c}" for c in content], words, f"Divergence by bits: {title}")
    name = f"Divergence by bits, {title}"
    return figure(name, drawing, how=how(grid["measured"]), note=grid["note"])


def _cell(found: Mapping[str, Any] | None, name: str) -> Cell:
    if found is None:
        return Cell(value=None, text="", tip=f"{name}: not measured")
    shown = plain(found["kl"], ".4f" if found["kl"] >= 0.001 else ".1e")
    return Cell(
        value=found["kl"],
        text=shown,
        tip=f"{name}: KL {found['kl']:.5f}, top-1 {found['top1']:.1%}, {found['bytes']:g} bytes",
    )
