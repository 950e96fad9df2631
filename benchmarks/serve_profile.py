"""Where the time of an engine's steps goes: wall clock, and GPU time by kernel.

    python benchmarks/serve_profile.py c4r4 [--job "32 x (2K + 512), plenty"] [--runs 5]
        [--steps 2 6]

Needs a Hopper GPU and vllm. Runs the job a few times, then once more with torch's profiler over the
steps that --steps bounds: the first ones are chunks of prompts beside decodes, later ones decodes
alone. The same engine's runs differ where the host has to keep up with the GPU, as in the former.
"""

import argparse
import os
import time

import torch
from bench_serve import environment, require_gpus
from serve_jobs import GROUPS, VARIANTS, Job
from serve_play import Ledger, play, row
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from quantmla.arguments import count, run_script
from quantmla.errors import UsageError, require

ROWS = 30


def profiled(engine, job: Job, first: int, last: int) -> tuple[list[float], object]:
    """Seconds of every step of the job, and what the profiler saw from `first` to before `last`."""
    seconds: list[float] = []
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    step = engine.step

    def timed():
        if len(seconds) in (first, last):
            torch.cuda.synchronize()
            profiler.__enter__() if len(seconds) == first else profiler.__exit__(None, None, None)
        began = time.perf_counter()
        found = step()
        seconds.append(time.perf_counter() - began)
        return found

    engine.step = timed
    engine.limit(job)
    engine.ledger = Ledger()
    play(job, 0, engine)
    engine.step = step
    return seconds, profiler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("variant", choices=VARIANTS)
    jobs = [job.name for group in GROUPS for job in group.jobs]
    parser.add_argument("--job", choices=jobs, default="32 x (2K + 512), plenty", metavar="JOB")
    parser.add_argument("--steps", type=count, nargs=2, default=(2, 6), metavar=("FIRST", "LAST"))
    parser.add_argument("--runs", type=count, default=1, help="that are not profiled")
    run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    first, last = options.steps
    require(first < last, f"--steps {first} {last}: the first is not before the last", UsageError)
    require_gpus(1)
    found = [(group, job) for group in GROUPS for job in group.jobs if job.name == options.job]
    ((group, job),) = found
    os.environ.update(environment())
    from serve_engine import VllmEngine

    engine = VllmEngine(options.variant, group)
    for repeat in range(options.runs):
        engine.limit(job)
        engine.ledger = Ledger()
        times = row(job, play(job, repeat, engine), engine.ledger)
        print({name: times[name] for name in ("output_tok_s", "ttft_p50", "gap_p50")}, flush=True)
    seconds, profiler = profiled(engine, job, *options.steps)
    print("ms of the first steps:", [round(1e3 * x, 1) for x in seconds[:16]])
    kernels = [each for each in profiler.events() if each.device_type == DeviceType.CUDA]
    spent = sum(each.device_time for each in kernels)
    print(f"steps {options.steps}: {spent / 1e3:.2f} ms of GPU time")
    table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=ROWS)
    print("\n".join(line[:60] + line[-110:] for line in table.splitlines()))


if __name__ == "__main__":
    main()
