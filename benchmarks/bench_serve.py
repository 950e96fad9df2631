"""Serving under memory pressure in vLLM: an unquantised cache and packed ones, in the same bytes.

    python benchmarks/bench_serve.py [--seconds 540] [--output FILE] [--variants bf16,c4r4,c2r4]

Needs a Hopper GPU, vllm and nothing else: the model has DeepSeek-V2-Lite's shape and no weights.
Every finished row is saved at once, to benchmarks/results/serve_<gpu>_<yyyymmdd>.json unless
--output says where; a run goes on after the rows that are there, so that it can be cut into as
many pieces as there is time for. An engine is started once for each variant and group of jobs
(serve_jobs.py); a job's pool is made by taking the other blocks out of the engine's pool.
--together starts all engines side by side, which takes less time and more memory (two variants
of all groups fit 141 GB); they take turns at running jobs, one at a time.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from serve_jobs import GROUPS, VARIANTS, Group, Job, smaller, warm_up

from quantmla.bench.results import result_path, write

RESULTS = Path(__file__).with_name("results")
PLAIN = {  # what vLLM needs to run in one process on a machine without a network
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
START_SECONDS = 30  # an engine that has less time is not started


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["job"], row["variant"], row["repeat"]


def missing(group: Group, variant: str, rows: Sequence[dict[str, Any]]) -> list[tuple[Job, int]]:
    """Jobs and repeats without a row, first repeats first."""
    done = {key(row) for row in rows}
    most = max(job.repeats for job in group.jobs)
    return [
        (job, repeat)
        for repeat in range(most)
        for job in group.jobs
        if repeat < job.repeats and (job.name, variant, repeat) not in done
    ]


def expected_wall(job: Job, variant: str, rows: Sequence[dict[str, Any]]) -> float:
    """Seconds of a job: those of its last row, of this variant if there is one, 0 if none is."""
    same = [row for row in rows if row["job"] == job.name]
    own = [row for row in same if row["variant"] == variant]
    return float((own or same or [{"wall": 0.0}])[-1]["wall"])


@contextmanager
def turn(path: Path) -> Iterator[None]:
    """No other engine of this benchmark runs a job meanwhile."""
    with path.with_suffix(".turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(0.2)  # whoever waits comes first


def work(group: Group, variant: str, path: Path, until: float, shrink: int) -> None:
    """One engine: every job that is missing and fits the time, each row saved at once."""
    from serve_engine import VllmEngine
    from serve_play import Ledger, play, row

    began = time.monotonic()
    engine = VllmEngine(variant, group)
    started = time.monotonic() - began
    with turn(path):
        for job in group.jobs:
            engine.limit(None)
            engine.ledger = Ledger()
            play(warm_up(smaller(job, shrink)), 0, engine)
    print(f"{variant} {group.name}: ready in {time.monotonic() - began:.0f} s", flush=True)
    for job, repeat in missing(group, variant, read_rows(path)):
        with turn(path):
            rows = read_rows(path)
            if time.time() + expected_wall(job, variant, rows) > until:
                print(f"{variant} {job.name}: no time for repeat {repeat}", flush=True)
                continue
            asked = smaller(job, shrink)
            pool = engine.limit(asked)
            engine.ledger = Ledger()
            found = row(asked, play(asked, repeat, engine), engine.ledger)
            head = {"job": job.name, "variant": variant, "repeat": repeat, "layers": group.layers}
            head |= {"prefix_caching": job.prefix_caching, "engine_start": round(started, 1)}
            result = head | pool | found
            write(path, [*rows, result])
            print(json.dumps(result), flush=True)


def drive(options: argparse.Namespace) -> None:
    """Starts one process for each engine, and gives each its share of the time that is left."""
    end = time.time() + options.seconds
    path = options.output or result_path(RESULTS, "serve")
    groups = [group for group in GROUPS if not options.groups or group.name in options.groups]
    variants = options.variants.split(",")
    wanted = [
        (group, variant)
        for group in groups
        for variant in variants
        if missing(group, variant, read_rows(path))
    ]
    turns = [wanted] if options.together else [[engine] for engine in wanted]
    for i, engines in enumerate(turns):
        left = end - time.time()
        shares = sum(group.share for later in turns[i:] for group, _ in later)
        seconds = left * sum(group.share for group, _ in engines) / max(shares, 1e-9)
        if not engines or seconds < START_SECONDS:
            print(f"not started: {[(g.name, v) for g, v in engines]}", flush=True)
            continue
        run_engines(engines, path, time.time() + seconds, end, options.shrink)
    lacking = sum(len(missing(g, v, read_rows(path))) for g in groups for v in variants)
    print(f"{path}: {len(read_rows(path))} rows, {lacking} to go", flush=True)


def run_engines(
    engines: Sequence[tuple[Group, str]], path: Path, until: float, end: float, shrink: int
) -> None:
    """Side by side; no job is begun that should end after `until`, none is running after `end`."""
    running = []
    for group, variant in engines:
        command = [sys.executable, __file__, "--work", group.name, variant, "--shrink", str(shrink)]
        command += ["--output", str(path), "--until", str(until)]
        running.append((group, variant, subprocess.Popen(command, env=environment())))
    for group, variant, process in running:
        try:
            code = process.wait(max(0.0, end - time.time()))
            print(f"{variant} {group.name}: exit code {code}", flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{variant} {group.name}: out of time", flush=True)


def environment() -> dict[str, str]:
    """The process's own, and what a single-process engine needs."""
    plain = dict(PLAIN)
    if find_spec("flashinfer") is None:
        plain["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return os.environ | plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600, help="time for everything")
    parser.add_argument("--output", type=Path, help="result file to begin or to go on with")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--groups", nargs="*", help=f"of {[group.name for group in GROUPS]}")
    parser.add_argument("--together", action="store_true", help="all engines side by side")
    parser.add_argument("--shrink", type=int, default=1, help="jobs so many times smaller")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is None:
        drive(options)
        return
    name, variant = options.work
    (group,) = (group for group in GROUPS if group.name == name)
    work(group, variant, options.output, options.until, options.shrink)


if __name__ == "__main__":
    main()
