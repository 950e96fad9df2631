"""A command in a process of its own that waits before its second layer, to be stopped there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import quantmla

HOLD = """
import importlib, sys, time
from quantmla.cli import main

module, name = importlib.import_module(sys.argv[1]), sys.argv[2]
whole, begun = getattr(module, name), []

def held(*given):
    if begun:
        time.sleep(600)
    begun.append(name)
    return whole(*given)

setattr(module, name, held)
sys.exit(main(sys.argv[3:]))
"""


def stopped(
    of_layer: tuple[str, str], argv: list[str], work: Path, stop: int
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; `of_layer` is the module and function that a layer calls."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(quantmla.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *of_layer, *argv],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell may have started us with interrupts ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not list(work.glob("layer_*.json")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(stop)
    shown, said = process.communicate()
    return process.returncode, shown, said
