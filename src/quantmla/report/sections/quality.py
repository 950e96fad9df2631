"""What a cache costs on held-out text: perplexity, divergence and recall."""

from collections.abc import Mapping
from typing import Any

from quantmla.report.charts import Axis, Dot, dots
from quantmla.report.collect import Record, RunFiles
from quantmla.report.markup import Markup, el, figure, figures, join, number, plain, table
from quantmla.report.provenance import SIMULATED, how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Quality"
COMMAND = "quantmla eval OUT --unprotected --json OUT/eval.json"
READS = ("eval",)
COLOURS = ("bf16", "quantmla", "paper", "quarot", "smoothquant", "rtn", "identity")
HEAD = (
    *("method", "bytes / token / layer", "perplexity", "KL mean", "KL p99", "KL max", "top-1"),
    *("recall", "tokens"),
)


def colour(method: str) -> str:
    """The colour class of a method, the same in every drawing."""
    return method if method in COLOURS else "other"


def gather(run: RunFiles) -> Data | None:
    groups: dict[tuple[str, int, int | None], Data] = {}
    for record in run.of("eval"):
        if record.data["header"].get("grid"):
            continue  # the grid over bits is a section of its own
        rows = record.data["rows"]
        bare = next((row for row in rows if row["format"] == "bf16"), None)
        for row in rows:
            if row["format"] != "bf16":
                key = row["format"], row["sinks"], row["recent"]
                names = ("format", "sinks", "recent")
                empty = dict(zip(names, key, strict=True)) | {"rows": []}
                _take(groups.setdefault(key, empty), row, bare, record)
    return {"groups": list(groups.values())} if groups else None


def _take(group: Data, row: Data, bare: Data | None, record: Record) -> None:
    """Of two measurements of one method the one on more tokens stays, or else the later."""
    earlier = next((r for r in group["rows"] if r["method"] == row["method"]), None)
    if earlier is not None and earlier["tokens"] > row["tokens"]:
        return
    kept = [r for r in group["rows"] if r["method"] not in (row["method"], "bf16")]
    first = [_row(bare)] if bare is not None else group["rows"][: len(group["rows"]) - len(kept)]
    group["rows"] = [*first, *kept, _row(row)]
    group["measured"] = measured(record, SIMULATED, n=row["tokens"], of="tokens", repeats=1)


def _row(row: Mapping[str, Any]) -> Data:
    names = ("method", "bytes_per_token", "perplexity", "kl_mean", "kl_p99", "top1", "tokens")
    optional = ("recall", "kl_max")
    return {name: row[name] for name in names} | {name: row.get(name) for name in optional}


def protection(group: Mapping[str, Any]) -> str:
    """In words; also what a cache is called in a table."""
    if group["recent"] is None and not group["sinks"]:
        return "unprotected"
    return f"{group['sinks']} + {group['recent']} tokens in bf16"


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    found = []
    for group in data["groups"]:
        where = f"{group['format']}, {protection(group)}"
        for row in group["rows"]:
            if row["method"] == "quantmla":
                found.append(Headline(f"KL mean ({where})", row["kl_mean"], ".5f", "lower"))
                found.append(Headline(f"perplexity ({where})", row["perplexity"], ".3f", "lower"))
                found.append(Headline(f"top-1 ({where})", row["top1"], ".1%", "higher"))
    return found


def render(data: Mapping[str, Any]) -> Markup:
    groups = data["groups"]
    intro = el(
        "p",
        "KL is the divergence from the unquantised model in nats per token; recall the share of "
        "planted facts that are answered right. Compare methods at equal protection only: "
        "“unprotected” reads every token in its quantised form and shows the damage that a bf16 "
        "window hides.",
    )
    drawings = [_divergences(group) for group in groups]
    return join([intro, figures(*drawings), *map(_table, groups)])


def _table(group: Mapping[str, Any]) -> Markup:
    rows = group["rows"]
    body = [
        [
            row["method"],
            number(row["bytes_per_token"], ",.4g"),
            number(row["perplexity"], ".3f"),
            number(row["kl_mean"], ".5f"),
            number(row["kl_p99"], ".4f"),
            number(row["kl_max"], ".3f"),
            number(row["top1"], ".1%"),
            number(row["recall"], ".1%"),
            number(row["tokens"], ",d"),
        ]
        for row in rows
    ]
    own = [i for i, row in enumerate(rows) if row["method"] == "quantmla"]
    title = f"{group['format'].upper()}, {protection(group)}"
    return join([table(HEAD, body, caption=title, strong=own), how(group["measured"])])


def _divergences(group: Mapping[str, Any]) -> Markup:
    rows = [row for row in group["rows"] if row["kl_mean"] > 0]
    drawn = [
        Dot(
            label=row["method"],
            value=row["kl_mean"],
            text=plain(row["kl_mean"], ".5f"),
            colour=colour(row["method"]),
        )
        for row in sorted(rows, key=lambda row: row["kl_mean"])
    ]
    title = f"Divergence, {group['format'].upper()}, {protection(group)}"
    axis = Axis(label="mean KL from bf16, nats per token (log)", log=True)
    return figure(title, dots(drawn, axis, title), how=how(group["measured"]))
