"""Rows of the comparison: as a dataclass, as JSON, as a table on the terminal."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True)
class ContextRow:
    """The same over predictions made with `first` <= tokens seen < `end`."""

    first: int
    end: int
    tokens: int
    perplexity: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float


@dataclass(frozen=True, slots=True)
class Row:
    """One method at one format and protection; the keys of the JSON rows are these names."""

    method: str
    format: str
    sinks: int
    recent: int | None  # None: unprotected, every token is read in its quantised form
    perplexity: float
    kl_mean: float  # nats per token
    kl_p99: float
    kl_max: float
    top1: float  # share of tokens where the most likely token is the baseline's
    recall: float | None  # share of needles recalled; None when no needle was asked for
    tokens: int
    bytes_per_token: float  # of one layer's packed page
    by_context: tuple[ContextRow, ...] = ()


def to_json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2) + "\n"


def to_table(rows: Sequence[Row], title: str | None = None) -> Table:
    """A rich table; print it with a rich Console."""
    table = Table(title=title)
    table.add_column("method")
    table.add_column("format")
    for name in (
        "protected",
        "perplexity",
        "KL mean",
        "KL p99",
        "KL max",
        "top-1",
        "recall",
        "bytes/token",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        protected = "none" if row.recent is None else f"{row.sinks} + {row.recent}"
        table.add_row(
            row.method,
            row.format,
            "all" if row.format == "bf16" else protected,
            f"{row.perplexity:.3f}",
            f"{row.kl_mean:.5f}",
            f"{row.kl_p99:.4f}",
            f"{row.kl_max:.3f}",
            f"{100 * row.top1:.2f} %",
            "-" if row.recall is None else f"{100 * row.recall:.1f} %",
            f"{row.bytes_per_token:.0f}",
        )
    return table
