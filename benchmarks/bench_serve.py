"""Serving under memory pressure in vLLM: an unquantised cache and packed ones, in the same bytes.

    python benchmarks/bench_serve.py [--seconds 3600] [--output FILE] [--gpus 2]
        [--engines decode/bf16 decode/c4r4 pressure/bf16 ...] [--jobs NAME ...] [--layers 27]

Needs Hopper GPUs, vllm and nothing else: the model has DeepSeek-V2-Lite's shape and no weights.
Every finished row is saved at once, to benchmarks/results/serve_<gpu>_<yyyymmdd>.json unless
--output says where; a run goes on after the rows that are there, so that it can be cut into as
many pieces as there is time for. An engine is a group of jobs (serve_jobs.py) and a variant of the
cache; a job's pool is made by taking the other blocks out of the engine's pool.

The engines of a group start side by side, then take turns: one job at a time on a GPU. Groups are
dealt over --gpus GPUs, so that all variants of a job run on the same one, and a GPU runs one group
after the other. Its engines keep to their part of the host's CPUs. Where a GPU of 141 GB does not
hold all variants of a group at once, those that are left start when the first have ended.
"""

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from serve_jobs import GROUPS, LAYERS, VARIANTS, Group, rank
from serve_lanes import Engine, Row, Task, Worker, run_lane

from quantmla.arguments import new_or_old_file, positive, run_script, seconds
from quantmla.bench.results import read_rows, result_path, write
from quantmla.errors import UsageError, require

TOPOLOGY = Path("/sys/devices/system/cpu")
PLACES = ("physical_package_id", "core_id")
RESULTS = Path(__file__).with_name("results")
PLAIN = {  # what vLLM needs to run in one process on a machine without a network
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def environment() -> dict[str, str]:
    """The process's own, and what a single-process engine needs."""
    plain = dict(PLAIN)
    if find_spec("flashinfer") is None:
        plain["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return os.environ | plain


def missing(engines: Sequence[Engine], rows: Sequence[Row]) -> list[Task]:
    """Jobs and repeats without a row, most important first, variants side by side."""
    done = {(row["job"], row["layers"], row["variant"], row["repeat"]) for row in rows}
    tasks = [
        Task(engine, job, repeat)
        for engine in engines
        for job in engine.group.jobs
        for repeat in range(job.repeats)
        if (job.name, engine.group.layers, engine.variant, repeat) not in done
    ]
    return sorted(tasks, key=lambda task: rank(task.job, task.engine.variant, task.repeat))


def only(group: Group, names: Sequence[str], layers: int = LAYERS) -> Group:
    """The group with those of its jobs that are named, in a model of so many layers."""
    jobs = tuple(job for job in group.jobs if job.name in names)
    return replace(group, jobs=jobs, layers=layers)


def lots(engines: Sequence[Engine], end: float) -> Iterator[tuple[Sequence[Engine], float]]:
    """Those of a group that run side by side, and when they are to end: all get equal times.

    None is begun after `end`.
    """
    left = list(engines)
    while left and (now := time.time()) < end:
        size = left[0].group.side_by_side
        yield left[:size], now + (end - now) * min(1.0, size / len(left))
        left = left[size:]


def require_gpus(wanted: int) -> None:
    seen = torch.cuda.device_count()
    require(seen >= wanted, f"needs {wanted} GPU(s), and torch sees {seen}", UsageError)


class Results:
    """Rows of all lanes, saved one by one."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.rows = read_rows(path)

    def keep(self, row: Row) -> None:
        with self.lock:
            self.rows.append(row)
            write(self.path, self.rows)
            print(row, flush=True)


def by_core(cpus: Iterable[int], topology: Path = TOPOLOGY) -> list[int]:
    """CPUs by their socket and core: two threads of a core are neighbours."""

    def place(cpu: int) -> tuple[int, ...]:
        files = (topology / f"cpu{cpu}/topology" / name for name in PLACES)
        try:
            return (*(int(file.read_text()) for file in files), cpu)
        except (OSError, ValueError):
            return 0, cpu, cpu

    return sorted(cpus, key=place)


def visible(gpu: int) -> str:
    """What CUDA_VISIBLE_DEVICES calls one of the GPUs that torch sees here."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(gpu) if names is None else names.split(",")[gpu].strip()


def share(cpus: Sequence[int], part: int, parts: int) -> Sequence[int]:
    """Neighbouring CPUs, which are likely of one socket."""
    return cpus[part * len(cpus) // parts : (part + 1) * len(cpus) // parts] or cpus


def start(engine: Engine, gpu: int, options: argparse.Namespace, caches: Path) -> Worker:
    """Engines have caches of compiled code of their own: they write them at the same time."""
    flags = ["--shrink", str(options.shrink), "--layers", str(engine.group.layers)]
    flags += ["--rehearse"] * options.rehearse
    flags += ["--cpus", *map(str, share(by_core(os.sched_getaffinity(0)), gpu, options.gpus))]
    own = {"VLLM_CACHE_ROOT": str(caches / f"{engine.group.name}-{engine.variant}")}
    if options.gpus > 1:
        own["CUDA_VISIBLE_DEVICES"] = visible(gpu)
    return Worker(engine, flags, environment() | own)


def drive(options: argparse.Namespace, caches: Path) -> None:
    """Every GPU runs its groups in their order; those that have nothing to do are left out."""
    end = time.time() + options.seconds
    results = Results(options.output or result_path(RESULTS, "serve"))
    engines = [
        Engine(only(group, options.jobs, options.layers), variant)
        for group in GROUPS
        for variant in VARIANTS
        if f"{group.name}/{variant}" in options.engines
    ]
    wanted = [engine for engine in engines if missing([engine], results.rows)]
    names = list(dict.fromkeys(engine.group.name for engine in wanted))

    def run(gpu: int) -> None:
        for name in names[gpu :: options.gpus]:
            here = [engine for engine in wanted if engine.group.name == name]
            for lot, until in lots(here, end):
                workers = {engine: start(engine, gpu, options, caches) for engine in lot}
                tasks = missing(lot, results.rows)
                run_lane(workers, tasks, until, lambda: results.rows, results.keep)

    with ThreadPoolExecutor(options.gpus) as threads:
        lanes = [threads.submit(run, gpu) for gpu in range(options.gpus)]
    for lane in lanes:
        lane.result()  # what ended it, where it did not end by itself
    left = len(missing(engines, results.rows))
    print(f"{results.path}: {len(results.rows)} rows, {left} to go", flush=True)


def main() -> None:
    every = [f"{group.name}/{variant}" for group in GROUPS for variant in VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=seconds, default=3600, help="time for everything")
    parser.add_argument(
        "--output", type=new_or_old_file, help="result file to begin or to go on with"
    )
    parser.add_argument("--engines", nargs="+", choices=every, default=every, metavar="ENGINE")
    names = [job.name for group in GROUPS for job in group.jobs]
    parser.add_argument("--jobs", nargs="+", choices=names, default=names, metavar="JOB")
    parser.add_argument("--layers", type=positive, default=LAYERS, help="of the model")
    parser.add_argument("--gpus", type=positive, default=1)
    parser.add_argument("--caches", type=Path, help="compiled code of earlier runs")
    parser.add_argument("--shrink", type=positive, default=1, help="jobs so many times smaller")
    parser.add_argument(
        "--rehearse", action="store_true", help="vLLM's scheduler alone: no GPU, no results"
    )
    run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    if options.rehearse:
        words = "--rehearse makes no results: say with --output where its rows go"
        require(options.output is not None, words, UsageError)
    else:
        require_gpus(options.gpus)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        drive(options, options.caches or Path(folder))


if __name__ == "__main__":
    main()
