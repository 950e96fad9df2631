"""report.json as Markdown: a summary to paste, and a model card with its evaluation."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quantmla.report.markup import plain
from quantmla.report.sections import SECTIONS, section
from quantmla.report.sections.quality import protection

Run = Mapping[str, Any]
QUALITY = ("perplexity", "KL mean", "KL p99", "top-1", "recall")


def summary(report: Mapping[str, Any]) -> str:
    """Headlines of every run, quality tables, and which command makes what is missing."""
    runs = report["runs"]
    parts = ["# QuantMLA: " + ", ".join(run["name"] for run in runs)]
    parts.append(_headlines(report))
    for run in runs:
        parts += _quality(run, run["name"] if len(runs) > 1 else "")
    missing = [key for key in SECTIONS if not any(key in run["sections"] for run in runs)]
    if missing:
        lines = [f"- {section(key).TITLE}: `{section(key).COMMAND}`" for key in missing]
        parts.append("\n".join(["Not measured:", "", *lines]))
    return "\n\n".join(parts) + "\n"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    escaped = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in escaped)])


def _headlines(report: Mapping[str, Any]) -> str:
    runs = report["runs"]
    if len(runs) == 1:
        body = [[h["label"], plain(h["value"], h["spec"])] for h in runs[0]["headlines"]]
        return markdown_table(["figure", runs[0]["name"]], body)
    body = []
    for row in report["comparison"]:
        cells = [plain(row["values"][0], row["spec"])]
        for value, change in zip(row["values"][1:], row["changes"], strict=True):
            words = "" if change is None else f" ({change:+.1%})"
            cells.append(plain(value, row["spec"]) + words)
        body.append([row["label"], *cells])
    return markdown_table(["figure", *(run["name"] for run in runs)], body)


def _quality(run: Run, name: str) -> list[str]:
    parts = []
    for group in run["sections"].get("quality", {"groups": []})["groups"]:
        body = [
            [
                row["method"],
                plain(row["bytes_per_token"], ",.4g"),
                plain(row["perplexity"], ".3f"),
                plain(row["kl_mean"], ".5f"),
                plain(row["kl_p99"], ".4f"),
                plain(row["top1"], ".1%"),
                plain(row["recall"], ".1%"),
            ]
            for row in group["rows"]
        ]
        title = f"**{name + ', ' if name else ''}{group['format'].upper()}, {protection(group)}**"
        shown = markdown_table(("method", "bytes / token / layer", *QUALITY), body)
        parts.append(f"{title}\n\n{shown}")
    return parts


def model_card(run: Run) -> str:
    """A card for the run's checkpoint: what it is, how to serve and make it, what it scores."""
    facts = run["facts"]
    base = facts["model"] or "an unnamed model"
    fmt = (facts["format"] or "low-bit").upper()
    files = [file["name"] for file in run["files"] if file["used"]]
    parts = [
        _front_matter(run, base),
        f"# {base} for a {fmt} cache\n\n## Overview\n\n"
        f"`{base}`, fused by QuantMLA ({facts['method'] or 'method not recorded'}) for a {fmt} "
        "key-value cache. Tensors, names, shapes and dtypes are the original's; any engine runs it "
        "as before.",
        "## Optimizations\n\n"
        "The cached latents and rope keys are stored in few bits. A change of basis that makes "
        "them easier to quantise is folded into the weights: nothing runs at decode for it.",
        "## Deployment\n\nIn transformers with `QuantMLACache`; in vLLM with `quantmla serve`, for "
        "the families that it names; in any engine with an unquantised cache.",
        "## Creation\n\nWith the `recipe.yaml` of the checkpoint's folder:\n\n"
        "    quantmla quantize --recipe recipe.yaml -o OUT",
        "## Evaluation\n\n" + "\n\n".join(_evaluation(run) or ["Not evaluated."]),
        "Figures come from " + ", ".join(f"`{name}`" for name in files) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(run: Run, base: str) -> str:
    lines = [
        f"base_model: {json.dumps(base, ensure_ascii=False)}",
        "base_model_relation: quantized",
        "library_name: transformers",
        "tags: [quantmla, kv-cache, mla]",
    ]
    results = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": row["task"], "type": row["task"]},
            "metrics": [{"type": row["metric"], "value": row["score"]}],
        }
        for part in run["sections"].get("tasks", {"parts": []})["parts"]
        for row in part["results"]
        if row["variant"] != "bf16"
    ]
    if results:
        index = [{"name": run["name"], "results": results}]
        lines.append(f"model-index: {json.dumps(index, ensure_ascii=False)}")
    return "\n".join(["---", *lines, "---"])


def _evaluation(run: Run) -> list[str]:
    parts = _quality(run, "")
    for part in run["sections"].get("tasks", {"parts": []})["parts"]:
        body = [
            [
                row["task"],
                row["variant"],
                plain(row["score"], ".1%"),
                plain(row["stderr"], ".1%"),
                plain(row["recovery"], ".1%"),
                plain(row["items"], ",d"),
            ]
            for row in part["results"]
        ]
        head = ("task", "variant", "score", "standard error", "recovery", "items")
        parts.append(markdown_table(head, body))
    return parts
