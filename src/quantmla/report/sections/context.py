"""Divergence by context: does a cache hold as more of it is read?"""

from collections.abc import Mapping, Sequence
from typing import Any

from quantmla.report.charts import Axis, Series, lines
from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup, el, figure, figures, join, number, table
from quantmla.report.provenance import SIMULATED, how, measured
from quantmla.report.sections import Data, Headline
from quantmla.report.sections.quality import colour, protection

TITLE = "Quality by context"
COMMAND = "quantmla eval OUT --unprotected --json OUT/eval.json"
READS = ("eval",)
KEYS = ("first", "end", "tokens", "kl_mean", "kl_max", "top1", "perplexity")
NOTE = (
    "While all that was seen is in bf16, what is left is rounding: of the cached rows and, in a "
    "fused checkpoint, of its weights."
)


def gather(run: RunFiles) -> Data | None:
    groups: dict[tuple[str, int, int | None], Data] = {}
    for record in run.of("eval"):
        for row in record.data["rows"]:
            buckets = [b for b in row.get("by_context") or () if (b["kl_mean"] or 0) > 0]
            if row["format"] == "bf16" or len(buckets) < 2 or record.data["header"].get("grid"):
                continue
            key = row["format"], row["sinks"], row["recent"]
            names = ("format", "sinks", "recent")
            group = groups.setdefault(key, dict(zip(names, key, strict=True)) | {"methods": {}})
            group["methods"][row["method"]] = [{k: b[k] for k in KEYS} for b in buckets]
            source = measured(record, SIMULATED, n=row["tokens"], of="tokens", repeats=1)
            group["measured"] = source
    return {"groups": list(groups.values())} if groups else None


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    return []


def render(data: Mapping[str, Any]) -> Markup:
    groups = data["groups"]
    return join([figures(*map(_drawing, groups)), *map(_table, groups)])


def _title(group: Mapping[str, Any]) -> str:
    return f"{group['format'].upper()}, {protection(group)}"


def _drawing(group: Mapping[str, Any]) -> Markup:
    drawn = [
        Series(
            name=method,
            colour=colour(method),
            points=[(b["end"], b["kl_mean"]) for b in buckets],
            tips=[_tip(b) for b in buckets],
        )
        for method, buckets in group["methods"].items()
    ]
    title = f"Divergence by context, {_title(group)}"
    x = Axis(label="tokens seen before, at most (log)", log=True)
    y = Axis(label="mean KL, nats per token (log)", log=True)
    note = NOTE if group["recent"] is not None else None
    return figure(title, lines(drawn, x, y, title), how=how(group["measured"]), note=note)


def _tip(bucket: Mapping[str, Any]) -> str:
    return (
        f"{bucket['first']} to {bucket['end']} tokens seen: KL {bucket['kl_mean']:.5f}, top-1 "
        f"{bucket['top1']:.1%}, {bucket['tokens']:,} tokens"
    )


def _table(group: Mapping[str, Any]) -> Markup:
    methods: Mapping[str, Sequence[Mapping[str, Any]]] = group["methods"]
    body = [
        [
            method,
            number(bucket["first"], ",d"),
            number(bucket["end"], ",d"),
            number(bucket["tokens"], ",d"),
            number(bucket["perplexity"], ".3f"),
            number(bucket["kl_mean"], ".5f"),
            number(bucket["kl_max"], ".3f"),
            number(bucket["top1"], ".1%"),
        ]
        for method, buckets in methods.items()
        for bucket in buckets
    ]
    head = ("method", "from", "to", "tokens", "perplexity", "KL mean", "KL max", "top-1")
    title = f"By tokens seen, {_title(group)}"
    return el("details", el("summary", title), table(head, body, caption=title))
