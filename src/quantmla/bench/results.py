"""Result files: rows and the environment that they came from."""

import json
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import quantmla

PACKAGES = ("torch", "triton", "vllm", "numpy")


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


def environment() -> dict[str, Any]:
    return {
        "quantmla": quantmla.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def result_path(folder: Path, what: str) -> Path:
    """folder/<what>_<gpu>_<yyyymmdd>.json"""
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    gpu = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    return folder / f"{what}_{gpu}_{datetime.now(UTC):%Y%m%d}.json"


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    lines = ",\n".join("  " + json.dumps(dict(row)) for row in rows)
    head = json.dumps(environment(), indent=1)
    draft.write_text(f'{{"environment": {head},\n"rows": [\n{lines}\n]}}\n')
    draft.replace(path)
