"""The kernels' arithmetic without a GPU, in a process where the interpreter is chosen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the interpreter is part of triton")


def test_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("interpret.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [line.split()[0] for line in done.stdout.splitlines()]
    wanted = {
        "decode": 5,
        "append": 2,
        "native": 1,
        "plans": 1,
        "gather": 2,
        "locate": 2,
        "starts": 2,
    }
    assert {name: lines.count(name) for name in wanted} == wanted
