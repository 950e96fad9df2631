"""What quantize wrote of its layers: logs of one run, each with where it was made."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from quantmla.manifest import CONFIG_KEY
from quantmla.report.collect import Record, RunFiles
from quantmla.report.provenance import measured

ERRORS = ("content_output", "rope_output", "rope_scores")  # in the order of the log's lists


class LearnedLayers(NamedTuple):
    """One log: the cache format it is of, its layers, the file, and the run that wrote it."""

    name: str
    layers: list[dict[str, Any]]
    log: Record
    run: Record | None

    def measured(self, kind: str, **facts: Any) -> dict[str, Any]:
        return measured(self.run or self.log, kind, **facts) | {"file": self.log.name}


def learned_layers(run: RunFiles) -> list[LearnedLayers]:
    """Every log of the run, named by its checkpoint's format where that is there."""
    found = []
    for log in run.of("log"):
        beside = {r.kind: r for r in run.records if PurePath(r.name).parent == _folder(log)}
        checkpoint = beside.get("checkpoint")
        name = format_name(checkpoint) if checkpoint else str(_folder(log))
        found.append(LearnedLayers(name, log.data, log, beside.get("quantize")))
    return found


def _folder(record: Record) -> PurePath:
    return PurePath(record.name).parent


def format_name(checkpoint: Record) -> str:
    """Such as c4r4; `mixed` is added where layers have formats of their own."""
    fmt = checkpoint.data[CONFIG_KEY]["format"]
    name = f"c{fmt['content_bits']}r{fmt['rope_bits']}"
    return f"{name}, mixed" if fmt.get("layers") else name


def short(prefix: str) -> str:
    """The number in an attention's prefix, as layers are called in a drawing."""
    digits = [part for part in prefix.split(".") if part.isdigit()]
    return ".".join(digits) or prefix


def errors(values: Mapping[str, float] | list[float]) -> dict[str, float]:
    """One layer's errors by name."""
    return dict(zip(ERRORS, values, strict=True)) if isinstance(values, list) else dict(values)
