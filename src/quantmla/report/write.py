"""The four files of a report, written together: page, numbers, summary, card."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantmla.arguments import holds
from quantmla.errors import UsageError, require
from quantmla.report.build import build
from quantmla.report.collect import SCHEMA, collect
from quantmla.report.page import page
from quantmla.report.summary import model_card, summary
from quantmla.workdir import check_file, write_whole

SUMMARY, CARD = "summary.md", "model_card.md"
USUAL = "report"  # a page of that name leaves the others theirs


def write_report(runs: Sequence[str], output: str, *, overwrite: bool) -> Mapping[str, Any]:
    """Collects, builds and writes; returns what was written and the sections that are in it.

    UsageError before anything is read for an output that cannot be meant or would replace files.
    """
    paths = _paths(Path(output), overwrite, with_card=len(runs) == 1)
    report = build([collect(run) for run in runs])
    texts = {
        "numbers": json.dumps(report, indent=1, ensure_ascii=False) + "\n",
        "summary": summary(report),
        "page": page(report),
    }
    if len(runs) == 1 and _has_checkpoint(report["runs"][0]):
        texts["card"] = model_card(report["runs"][0])
    for name, text in texts.items():
        # a file's name, or a text in a result, may hold what UTF-8 cannot
        write_whole(paths[name], text.encode(errors="backslashreplace"))
    found = {key for run in report["runs"] for key in run["sections"]}
    written = [str(paths[name]) for name in texts]
    return {"written": written, "runs": len(runs), "sections": sorted(found)}


def _has_checkpoint(run: Mapping[str, Any]) -> bool:
    """Whether there is a model that a card can be of: studies and tasks alone have none."""
    return any(file["kind"] == "checkpoint" for file in run["files"])


def _paths(output: Path, overwrite: bool, *, with_card: bool) -> dict[str, Path]:
    """Where each file goes; those of an earlier report may be replaced, others not unasked."""
    require(
        output.suffix == ".html",
        f"output {output} must be a file that ends in .html, such as report.html",
        UsageError,
    )
    require(output.parent.is_dir(), f"the folder of {output} does not exist", UsageError)
    # the page's own name in all others: a folder may hold several reports
    prefix = "" if output.stem == USUAL else f"{output.stem}_"
    names = {"page": output.name, "numbers": f"{output.stem}.json", "summary": prefix + SUMMARY}
    if with_card:
        names["card"] = prefix + CARD
    paths = {key: output.parent / name for key, name in names.items()}
    for path in paths.values():
        check_file(path)
    ours = _written_with(paths["numbers"])
    taken = [path for key, path in paths.items() if path.exists() and key not in ours]
    require(
        overwrite or not taken,
        f"{', '.join(map(str, taken))} would be replaced: choose another folder, or --overwrite",
        UsageError,
    )
    return paths


def _written_with(numbers: Path) -> set[str]:
    """The files of the earlier report that has these numbers; none where they are no report's."""
    if not holds(numbers, lambda data: data["schema"] == SCHEMA):
        return set()
    single = holds(numbers, lambda data: len(data["runs"]) == 1 and _has_checkpoint(*data["runs"]))
    return {"page", "numbers", "summary"} | ({"card"} if single else set())
