"""On which machine, with which versions, a checkpoint was made: a file beside it."""

import json
import platform

import torch

from quantmla.doctor import gpus, versions
from quantmla.workdir import THREADS

SCHEMA, VERSION = "quantmla-quantize", 1


def run_record() -> str:
    """quantmla_run.json, which reports read."""
    header = {
        "versions": versions(),
        "gpus": [gpu["name"] for gpu in gpus()],
        "processor": platform.machine(),
        THREADS: torch.get_num_threads(),
    }
    return json.dumps({"schema": SCHEMA, "version": VERSION, "header": header}, indent=1) + "\n"
