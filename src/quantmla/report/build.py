"""From the files of runs to report.json: every number that the page, summary and card show."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantmla import __version__
from quantmla.errors import QuantMLAError
from quantmla.manifest import CONFIG_KEY
from quantmla.report.collect import SCHEMA, RunFiles
from quantmla.report.learned import format_name
from quantmla.report.markup import plain
from quantmla.report.provenance import machine, versions
from quantmla.report.sections import SECTIONS, section

VERSION = 1  # of report.json
DIGITS = 6  # that numbers keep
DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)
Report = dict[str, Any]


def build(runs: Sequence[RunFiles]) -> Report:
    """The report of one run, or of several beside one another; the first is the reference.

    Raises QuantMLAError for a result file that lacks what a section needs.
    """
    names = _distinct([run.name for run in runs])
    parts = [_run(run, name) for run, name in zip(runs, names, strict=True)]
    report = {"schema": SCHEMA, "version": VERSION, "quantmla": __version__, "runs": parts}
    report["comparison"] = comparison(parts) if len(parts) > 1 else []
    return dict(rounded(report))


def _distinct(names: Sequence[str]) -> list[str]:
    """Folders of one name are told apart by their number."""
    return [
        f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def _run(run: RunFiles, name: str) -> Report:
    found = {key: _gather(run, key) for key in SECTIONS}
    kept = {key: data for key, data in found.items() if data is not None}
    used = {kind for key in kept for kind in section(key).READS}
    return {
        "name": name,
        "facts": _facts(run),
        "sections": kept,
        "headlines": [
            {"section": key} | headline._asdict()
            for key, data in kept.items()
            for headline in section(key).headlines(data)
        ],
        "files": [_file(record, record.kind in used) for record in run.records],
    }


def _gather(run: RunFiles, key: str) -> Report | None:
    part = section(key)
    try:
        data = part.gather(run)
        if data is not None:
            data = dict(rounded(data))
            for line in part.headlines(data):
                plain(line.value, line.spec)
            part.render(data)  # what cannot be shown is damaged, too
        return data
    except DAMAGE as error:
        files = [record.name for kind in part.READS for record in run.of(kind)]
        which = ", ".join(files) if len(files) == 1 else f"one of {', '.join(files)}"
        raise QuantMLAError(
            f"run {run.name}: {which} is damaged, so that the section {part.TITLE!r} cannot be "
            f"made: {_words(error)}"
        ) from error


def _words(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args:
        return f"an entry {error.args[0]!r} is missing"
    return "an entry has a value of the wrong kind"


def _file(record: Any, used: bool) -> Report:
    data = record.data if isinstance(record.data, Mapping) else {}
    header = data.get("header") or data.get("environment") or {}
    return {
        "name": record.name,
        "kind": record.kind,
        "used": used,
        "machine": machine(header),
        "versions": versions(header),
    }


def _facts(run: RunFiles) -> Report:
    """What was run, as far as the files say."""
    facts: dict[str, Any] = dict.fromkeys(("model", "base_sha256", "method", "format"))
    for record in run.records:
        for name, value in _facts_of(record).items():
            if facts[name] is None and isinstance(value, str):
                facts[name] = value
    return facts


def _facts_of(record: Any) -> Report:
    data = record.data
    if record.kind == "checkpoint":
        found = data[CONFIG_KEY]
        facts = {"model": found["base_model"], "base_sha256": found["base_sha256"]}
        return facts | {"method": found["method"], "format": format_name(record)}
    if record.kind == "analysis":
        return {"model": data.get("model"), "base_sha256": data.get("model_sha256")}
    if record.kind == "tasks":
        model = data.get("model")
        return {"model": model.get("base") or model.get("id")} if isinstance(model, dict) else {}
    if record.kind == "eval":
        return {"model": data["header"].get("model")}
    return {}


def comparison(parts: Sequence[Report]) -> list[Report]:
    """Headlines of all runs by label, each with its change from the first run's."""
    found: dict[tuple[str, str], Report] = {}
    for index, part in enumerate(parts):
        for line in part["headlines"]:
            key = line["section"], line["label"]
            empty = {k: line[k] for k in ("section", "label", "spec", "better")}
            row = found.setdefault(key, empty | {"values": [None] * len(parts)})
            row["values"][index] = line["value"]
    return [row | _changes(row["values"], row["better"], row["spec"]) for row in found.values()]


def _changes(values: Sequence[float | None], better: str, spec: str) -> Report:
    first = values[0]
    verdicts = [_verdict(first, v, better, spec) for v in values[1:]]
    changes = [
        None if v is None or not first else 0.0 if verdict == "same" else v / first - 1
        for v, verdict in zip(values[1:], verdicts, strict=True)
    ]
    return {"changes": changes, "verdicts": verdicts}


def _verdict(first: float | None, value: float | None, better: str, spec: str) -> str:
    """Which of two values is better; `alone` where there is only one, `same` if shown alike."""
    if first is None or value is None:
        return "alone"
    if plain(first, spec) == plain(value, spec):
        return "same"
    if not better:
        return "differs"
    return "better" if (value < first) == (better == "lower") else "worse"


def rounded(value: Any) -> Any:
    """Floats with DIGITS significant digits; JSON has no NaN or infinity: those become null."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return value
