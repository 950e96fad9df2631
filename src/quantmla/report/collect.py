"""What a run folder holds: result files of quantize, verify, eval, analyze and bench, by kind.

A run is a folder; its JSON files and those of its immediate subfolders are looked at, and known by
their content, so that files may have any name. Files that are none of ours are left alone; what
cannot be read and does not bear our name is named on stderr.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantmla.errors import UsageError, require
from quantmla.manifest import CONFIG_KEY, read_manifest
from quantmla.progress import say

SCHEMA = "quantmla-report"
OURS = "quantmla"  # in the names or headers of our files, whatever happened to them
NOT_RESULTS = {  # of a checkpoint; may be large
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "added_tokens.json",
}
VERSIONS = {"analysis": 1, "tasks": 1, "quantize": 1}  # that this release reads


@dataclass(frozen=True, slots=True)
class Record:
    """One result file: its name within the run, what it is, what it holds."""

    name: str
    kind: str
    data: Any


@dataclass(frozen=True, slots=True)
class RunFiles:
    """All result files of one run, in the order of their names."""

    name: str
    records: tuple[Record, ...]

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record.kind == kind]

    def newest(self, kind: str) -> Record | None:
        """The latest by the date in its name; of one date that with most rows, else the last."""
        return max(self.of(kind), key=_date_and_size, default=None)

    def of_date(self, found: Record) -> list[Record]:
        """All of its kind that have its date in their names, in the order of these."""
        date = _date_and_size(found)[0]
        return [record for record in self.of(found.kind) if _date_and_size(record)[0] == date]


def _date_and_size(record: Record) -> tuple[str, int, str]:
    """Another file of the same date is of some jobs, measured again."""
    date = re.search(r"\d{8}", record.name)
    rows = record.data.get("rows", ()) if isinstance(record.data, Mapping) else ()
    return date[0] if date else "", len(rows), record.name


def _rows(data: Any, *keys: str) -> bool:
    rows = data.get("rows") if isinstance(data, Mapping) else None
    return (
        isinstance(rows, list)
        and bool(rows)
        and any(isinstance(row, Mapping) and set(keys) <= set(row) for row in rows)
    )


def _has(data: Any, *keys: str) -> bool:
    return isinstance(data, Mapping) and set(keys) <= set(data)


KINDS: dict[str, Callable[[Any], bool]] = {
    "checkpoint": lambda d: _has(d, CONFIG_KEY),
    "log": lambda d: (
        isinstance(d, list) and bool(d) and _has(d[0], "prefix", "before", "after", "history")
    ),
    "quantize": lambda d: _has(d, "schema") and d["schema"] == "quantmla-quantize",
    "verify": lambda d: _has(d, "largest_fold_error", "nll_drift", "layers"),
    "analysis": lambda d: _has(d, "studies", "summary", "model_studies", "layers"),
    "tasks": lambda d: _has(d, "schema") and d["schema"] == "quantmla-tasks",
    "bit_plan": lambda d: _has(d, "costs", "plan") and _rows(d, "predicted_kl"),
    "eval": lambda d: _has(d, "header") and _rows(d, "method", "format", "kl_mean"),
    "calibration": lambda d: _rows(d, "shape", "method", "seconds", "peak_gib"),
    "study_times": lambda d: _rows(d, "shape", "study", "seconds", "peak_gib"),
    "decode": lambda d: _rows(d, "backend", "heads", "us", "baseline_us"),
    "append": lambda d: _rows(d, "backend", "job", "gb_per_s"),
    "native": lambda d: _rows(d, "cache", "ms_per_step"),
    "serve": lambda d: _rows(d, "job", "variant", "output_tok_s"),
}


def collect(folder: str) -> RunFiles:
    """The result files of one run folder.

    Raises UsageError where there is no such folder or nothing in it, QuantMLAError for a file that
    is damaged or of another version.
    """
    path = Path(folder)
    require(path.exists(), f"run {folder} does not exist", UsageError)
    require(path.is_dir(), f"run {folder} is not a folder", UsageError)
    records = tuple(_records(path))
    require(
        bool(records),
        f"run {folder} is empty: it holds no results of quantize, verify, eval, analyze or bench",
        UsageError,
    )
    return RunFiles(path.resolve().name, records)


def _records(folder: Path) -> Iterator[Record]:
    for path in sorted({*folder.glob("*.json"), *folder.glob("*/*.json")}):
        if path.name in NOT_RESULTS or path.name.endswith(".index.json") or not path.is_file():
            continue
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            require(not _is_ours(path), f"{path} is damaged: it is not JSON, or cannot be read")
            say(f"{path} is left out: it is not JSON, or cannot be read", True)
            continue
        kind = next((kind for kind, fits in KINDS.items() if fits(data)), None)
        if kind is None and not (isinstance(data, Mapping) and isinstance(data.get("rows"), list)):
            continue  # a config of a plain checkpoint, an earlier report, another program's file
        if kind is None and not _has_header(data):
            say(f"{path} is left out: it has rows, but no header of ours", True)
            continue
        _check(path, kind, data)
        yield Record(str(path.relative_to(folder)), kind or "unknown", data)


def _has_header(data: Mapping[str, Any]) -> bool:
    """Whether a header, if there is one, has the entries that it has of the right kinds."""
    for name in ("header", "environment"):
        header = data.get(name, {})
        if not isinstance(header, Mapping):
            return False
        kinds: dict[str, type] = {"versions": dict, "packages": dict, "gpus": list}
        if not all(isinstance(header.get(key, kind()), kind) for key, kind in kinds.items()):
            return False
    return True


def _is_ours(path: Path) -> bool:
    """By what is left of a file that is not whole."""
    try:
        return OURS in path.name or OURS.encode() in path.read_bytes()
    except OSError:
        return False


def _check(path: Path, kind: str | None, data: Any) -> None:
    """Refuses results of another version, without a result, or with a header that is none."""
    if isinstance(data, Mapping):
        require(_has_header(data), f"{path} is damaged: its header does not say where it was made")
    if kind == "checkpoint":
        read_manifest(data, str(path.parent))
    if kind in VERSIONS:
        found = data.get("version")
        require(
            found == VERSIONS[kind],
            f"{path} has version {found!r}, not {VERSIONS[kind]}, the one this release reads",
        )
    if kind == "tasks":
        require(bool(data.get("results")), f"{path} is an empty run: no task is finished in it")
