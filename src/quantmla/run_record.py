"""By which run, on which machine, with which versions, a checkpoint was made: a file beside it."""

import json
import platform
from collections.abc import Mapping
from typing import Any

import torch

from quantmla.doctor import gpus, versions
from quantmla.workdir import THREADS

FILE_NAME = "quantmla_run.json"
SCHEMA, VERSION = "quantmla-quantize", 1


def run_record(run: Mapping[str, Any]) -> str:
    """That file, which reports read, and by which a run knows its own output: `run` decides it."""
    header = {
        "versions": versions(),
        "gpus": [gpu["name"] for gpu in gpus()],
        "processor": platform.machine(),
        THREADS: torch.get_num_threads(),
    }
    record = {"schema": SCHEMA, "version": VERSION, "header": header, "run": run}
    return json.dumps(record, indent=1) + "\n"
