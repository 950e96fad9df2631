"""Result files: rows and the environment that they came from."""

import json
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import quantmla
from quantmla.errors import UsageError, require

PACKAGES = ("torch", "triton", "cuda-bindings", "vllm", "numpy")
KEYS = {
    "backend",
    "format",
    "heads",
    "query_len",
    "context",
    "batch",
    "job",
}  # say what a row is of


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def environment(more: Sequence[str] = ()) -> dict[str, Any]:
    """The GPU and versions, also of `more` packages than every benchmark uses."""
    return {
        "quantmla": quantmla.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in (*PACKAGES, *more)},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def result_path(folder: Path, what: str) -> Path:
    """folder/<what>_<gpu>_<yyyymmdd>.json"""
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    gpu = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    return folder / f"{what}_{gpu}_{datetime.now(UTC):%Y%m%d}.json"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows that are there already; they must come from the same GPU, driver and versions."""
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text())
        found, rows = dict(data["environment"]), [dict(row) for row in data["rows"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{path} is not a result file: move it away") from None
    now = environment()
    changed = [key for key in now if key != "time" and found.get(key) != now[key]]
    require(
        not changed,
        f"{path} was measured with other versions ({', '.join(changed)}): move it away",
        UsageError,
    )
    return rows


def merged(
    old: Iterable[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> list[Mapping[str, Any]]:
    """Old rows that were not measured again, then the new ones; `keys` tell rows apart."""

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in keys)

    again = {key(row) for row in new}
    return [row for row in old if key(row) not in again] + list(new)


class Table:
    """Prints rows as they come, in columns of fixed width.

    A column is a heading, what a row shows there, and its width; below 0 to begin on the left.
    The columns of a row's own keys tell rows apart.
    """

    def __init__(self, columns: Sequence[tuple[str, str, int]]):
        self.columns = columns
        self.begun = False

    @property
    def keys(self) -> list[str]:
        return [key for _, key, _ in self.columns if key in KEYS]

    def show(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not self.begun:
            print(self._line([heading for heading, _, _ in self.columns]))
            self.begun = True
        for row in rows:
            values = [row.get(key) for _, key, _ in self.columns]
            print(self._line(["" if value is None else str(value) for value in values]), flush=True)

    def _line(self, values: Sequence[str]) -> str:
        sizes = (width for _, _, width in self.columns)
        cells = (f"{v:<{-w}}" if w < 0 else f"{v:>{w}}" for v, w in zip(values, sizes, strict=True))
        return "  ".join(cells).rstrip()


def write(path: Path, rows: Sequence[Mapping[str, Any]], packages: Sequence[str] = ()) -> None:
    """Whole or not at all; `packages` are those whose versions the file tells, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    lines = ",\n".join(json.dumps(dict(row), separators=(",", ":")) for row in rows)
    head = json.dumps(environment(packages), indent=1)
    try:
        draft.write_text(f'{{"environment": {head},\n"rows": [\n{lines}\n]}}\n')
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
