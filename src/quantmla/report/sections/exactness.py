"""Proof that fusing changed nothing: what `verify` found with the cache unquantised."""

from collections.abc import Mapping
from typing import Any

from quantmla.report.collect import RunFiles
from quantmla.report.markup import Markup, el, join, number, table
from quantmla.report.provenance import how, measured
from quantmla.report.sections import Data, Headline

TITLE = "Exactness of the fused weights"
COMMAND = "quantmla verify OUT --json > OUT/verify.json"
READS = ("verify",)
FIGURES = {
    "largest_fold_error": ("fold error, float64", ".1e"),
    "largest_stored_error": ("stored weights", ".1e"),
    "logits_relative_error": ("logits", ".1e"),
    "nll_before": ("NLL, nats", ".4f"),
    "nll_drift": ("NLL drift, nats", "+.1e"),
}


def gather(run: RunFiles) -> Data | None:
    found = [
        {
            "name": record.name,
            "figures": {name: record.data[name] for name in FIGURES},
            "layers": len(record.data["layers"]),
            "measured": measured(
                record, "cache unquantised", n=record.data.get("tokens"), of="tokens"
            ),
        }
        for record in run.of("verify")
    ]
    return {"checks": found} if found else None


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    worst = max(check["figures"]["largest_fold_error"] for check in data["checks"])
    return [Headline("fold error, float64", worst, ".1e", "lower")]


def render(data: Mapping[str, Any]) -> Markup:
    words = el(
        "p",
        "With the cache not quantised a fused checkpoint computes what the original does: the "
        "fold is exact up to rounding in float64, the rest is rounding to the weights' dtype. "
        "Errors are relative, of the layers the largest; NLL is per token.",
    )
    head = ("file", "layers", *(name for name, _ in FIGURES.values()))
    body = [
        [
            check["name"],
            number(check["layers"], "d"),
            *(number(check["figures"][key], spec) for key, (_, spec) in FIGURES.items()),
        ]
        for check in data["checks"]
    ]
    caption = "Original against fused"
    return join(
        [words, table(head, body, caption=caption), how(*(c["measured"] for c in data["checks"]))]
    )
