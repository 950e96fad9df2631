"""Several vLLM engines, as many at once as CPUs allow, each compared with transformers at its end.

An engine and its comparison are processes of their own, with a folder of their own: `answers.json`
is what `serve_answers.py collect` writes, `lines.json` what `compare` says, `log.txt` what both
printed. Of an engine that ended early, `answers.json.part` has the cases before.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_serve import environment, require_gpus

from quantmla.checkpoint.locate import locate
from quantmla.errors import UsageError, require
from quantmla.quant.format import parse_format
from quantmla.workdir import check_makeable

SCRIPT = Path(__file__).with_name("serve_answers.py")
SECONDS = 540  # after which an engine or a comparison hangs
Lines = list[dict[str, Any]]


class Engine(NamedTuple):
    """How nano is served."""

    fmt: str
    runner: str  # of vLLM's two model runners
    drafts: int = 0
    gpus: int = 1

    @property
    def flags(self) -> list[str]:
        return ["--drafts", str(self.drafts), "--tensor-parallel", str(self.gpus)]


ENGINES = {
    "c4r4-v1": Engine("c4r4", "V1"),
    "c4r4-v2": Engine("c4r4", "V2"),
    "c2r4-v1": Engine("c2r4", "V1"),
    "c2r4-v2": Engine("c2r4", "V2"),
    "c4r4-v1-drafts": Engine("c4r4", "V1", drafts=3),
    "c4r4-v2-2gpus": Engine("c4r4", "V2", gpus=2),
}


def possible(gpus: int) -> list[str]:
    """Engines that so many GPUs can run."""
    return [name for name, engine in ENGINES.items() if engine.gpus <= gpus]


def chosen(names: Sequence[str] | None) -> list[str]:
    """Engines of these names, or all that the machine's GPUs can run; UsageError for too few."""
    found = possible(torch.cuda.device_count()) if names is None else list(dict.fromkeys(names))
    require_gpus(max((ENGINES[name].gpus for name in found), default=1))
    return found


def unfused_nano(folder: Path, name: str) -> Path:
    """nano with the settings of a format alone: quantising costs more, answers must agree."""
    folder.mkdir()
    for path in locate("nano").iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    settings = {"version": 1, "format": parse_format(name).to_json(), "ignored_layers": []}
    (folder / "config.json").write_text(json.dumps(config | {"quantmla_config": settings}))
    return folder


def run_engine(folder: Path, engine: Engine) -> Lines | None:
    """Lines of the comparison; None where the engine or the comparison ended without them."""
    folder.mkdir(parents=True)
    checkpoint = unfused_nano(folder / "checkpoint", engine.fmt)
    answers, runner = folder / "answers.json", {"V1": "0", "V2": "1"}[engine.runner]
    own = {"VLLM_USE_V2_MODEL_RUNNER": runner, "VLLM_CACHE_ROOT": str(folder / "compiled")}
    own |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # this process has looked at its GPUs
    python = [sys.executable, str(SCRIPT)]
    with (folder / "log.txt").open("w") as log:
        collect = [*python, "collect", str(checkpoint), str(answers), *engine.flags]
        _run(collect, log, environment() | own, log)
        if not answers.exists():
            return None
        compare = [*python, "compare", str(checkpoint), str(answers)]
        # thousands of steps of one token in a small model: a GPU that six share is slower at them
        on_cpu = environment() | {"CUDA_VISIBLE_DEVICES": ""}
        printed = _run(compare, log, on_cpu, subprocess.PIPE)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        return None
    (folder / "lines.json").write_text(json.dumps(lines))
    return lines


def _run(command: Sequence[str], log: Any, env: dict[str, str], stdout: Any) -> str:
    """What it printed, where that is piped; the log gets everything."""
    log.write(f"{datetime.now():%H:%M:%S} {command}\n")
    log.flush()
    try:
        done = subprocess.run(
            command, env=env, stdout=stdout, stderr=log, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        log.write(f"{error.stdout or ''}\nno end after {SECONDS} s\n")
        return ""
    printed = done.stdout or ""
    log.write(f"{printed}\n{datetime.now():%H:%M:%S} exit code {done.returncode}\n")
    log.flush()
    return printed


def run_engines(work: Path, names: Sequence[str]) -> Iterator[tuple[str, Lines | None]]:
    """Engines as they end. UsageError where `work` is a file, or has an engine's folder."""
    require(work.is_dir() or not work.exists(), f"{work} is not a folder", UsageError)
    check_makeable(work, work)
    for name in names:
        require(
            not (work / name).exists(),
            f"{work / name} exists: give another folder for the work",
            UsageError,
        )
    # a start keeps a CPU busy for a minute, and its compilation more than one
    at_once = max(1, min(len(names), len(os.sched_getaffinity(0)) // 2))
    with ThreadPoolExecutor(at_once) as threads:
        runs = {threads.submit(run_engine, work / name, ENGINES[name]): name for name in names}
        for run in as_completed(runs):
            yield runs[run], run.result()
