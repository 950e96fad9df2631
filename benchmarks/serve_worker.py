"""An engine in a process of its own: it says when it is ready, then runs the jobs it is told to.

What the driver asks comes as lines of JSON on stdin, [job, repeat]; what it is told begins with
MARK, because vLLM writes to stdout too.
"""

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_jobs import GROUPS, LAYERS, Group, Job, smaller, warm_ups
from serve_play import Ledger, play, row

MARK = "@serve "
Run = Callable[[Job, int], dict[str, Any]]


PREDICTED = ("scheduled_tokens", "peak_tokens", "peak_blocks")  # by serve_scheduler.py, as well


def say(message: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(message, default=float)}", flush=True)  # numpy has its own


def on_a_gpu(variant: str, group: Group, shrink: int) -> Run:
    """Starts vLLM and compiles what the first steps would compile."""
    from serve_engine import VllmEngine

    engine = VllmEngine(variant, group)
    rehearsed: set[str] = set()

    def run(job: Job, repeat: int) -> dict[str, Any]:
        for _ in range(job.rehearsals if job.name not in rehearsed else 0):
            engine.limit(job)
            engine.ledger = Ledger()
            play(job, repeat, engine)
        rehearsed.add(job.name)
        pool = engine.limit(job)
        engine.ledger = Ledger()
        found = row(job, play(job, repeat, engine), engine.ledger)
        return pool | {name: value for name, value in found.items() if name not in PREDICTED}

    for job in warm_ups(group):
        engine.limit(None)
        engine.ledger = Ledger()
        play(smaller(job, shrink), 0, engine)
    return run


def scheduler_alone(variant: str, group: Group, shrink: int) -> Run:
    """No model and no GPU: seconds are those of a guess."""
    from serve_scheduler import SchedulerAlone

    def run(job: Job, repeat: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            engine = SchedulerAlone(variant, group.layers, job, Path(folder))
            found = row(job, play(job, repeat, engine, engine.clock), engine.ledger)
        return engine.pool | found

    return run


def serve(group: Group, variant: str, run: Run, shrink: int) -> None:
    """A job that fails is reported, and the next one is waited for."""
    jobs = {job.name: job for job in group.jobs}
    for line in sys.stdin:
        name, repeat = json.loads(line)
        head = {"job": name, "variant": variant, "repeat": repeat, "layers": group.layers}
        head |= {"prefix_caching": jobs[name].prefix_caching}
        try:
            say({"row": head | run(smaller(jobs[name], shrink), repeat)})
        except Exception as error:
            traceback.print_exc()
            say({"failed": f"{type(error).__name__}: {error}"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("group")
    parser.add_argument("variant")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--cpus", type=int, nargs="+", help="those that may be used")
    options = parser.parse_args()
    if options.cpus:
        os.sched_setaffinity(0, options.cpus)
    (found,) = (group for group in GROUPS if group.name == options.group)
    group = replace(found, layers=options.layers)
    start = scheduler_alone if options.rehearse else on_a_gpu
    run = start(options.variant, group, options.shrink)
    say({"ready": True})
    serve(group, options.variant, run, options.shrink)


if __name__ == "__main__":
    main()
