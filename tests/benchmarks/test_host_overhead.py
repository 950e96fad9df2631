"""The host's time is measured without a GPU; in a process of its own, where launches are stubs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "host_overhead.py"


def test_every_operation_is_measured(tmp_path):
    path = tmp_path / "host.json"
    command = [sys.executable, SCRIPT, "--layers", "3", "--steps", "2", "--output", path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(path.read_text())["rows"]
    assert [row["operation"] for row in rows] == ["append", "decode", "gather"]
    assert all(row["first_us"] > 0 and row["other_us"] > 0 for row in rows)
