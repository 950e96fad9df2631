"""Times the goals of decode and append, and schedules of the Triton kernel against each other.

python benchmarks/decode_variants.py OUT [--libraries SO ...] [--backends NAME ...]
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from quantmla.arguments import run_script
from quantmla.bench.append import bench_append
from quantmla.bench.decode import GOALS, Shape, bench_decode
from quantmla.bench.inputs import synthetic_cache, synthetic_query
from quantmla.bench.results import result_path, write
from quantmla.bench.timing import interleaved_us
from quantmla.device import resolve_device
from quantmla.kernels.triton.launches import decode_launches
from quantmla.kernels.triton.schedule import MIN_PAGES, Schedule
from quantmla.quant.format import parse_format
from quantmla.workdir import check_makeable

# (rows, warps, pages a step)
TILES = {
    16: [(16, 4, 1), (16, 8, 2), (16, 8, 1)],
    32: [(32, 8, 2), (32, 8, 1), (16, 4, 1)],
    64: [(64, 8, 2), (32, 8, 2)],
}
FILL = {4: (2, 4, 8), 8: (1, 2, 4)}  # programs per multiprocessor to aim at, by warps


def _plans(shape: Shape) -> dict[str, Schedule]:
    plans = {}
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for rows, warps, step in TILES[min(64, shape.heads)]:
        for fill in FILL[warps]:
            programs = shape.batch * -(-shape.heads // rows)
            pages = shape.context // 64
            splits = max(1, min(round(fill * multiprocessors / programs), pages // MIN_PAGES))
            windows = max(1, min(7, fill * multiprocessors // programs // 2))
            plan = Schedule(rows, warps, step, splits, windows, MIN_PAGES)
            name = f"r{rows}w{warps}s{step}f{fill}_{splits}+{windows}"
            plans[name] = plan
            if fill == 2:
                plans["no_prefetch_" + name] = plan._replace(prefetch=False)
                plans["two_stages_" + name] = plan._replace(stages=2)
    return plans


def _run(launches: list) -> None:
    for launch in launches:
        launch.run()


def variants(shape: Shape) -> dict[str, float]:
    """Microseconds of every plan, and of some plans' split kernel alone."""
    view = synthetic_cache(shape.context, shape.batch, parse_format(shape.format))
    query = synthetic_query(shape.batch, shape.query_len, shape.heads)
    calls = {}
    for name, plan in _plans(shape).items():
        launches, _ = decode_launches(query, view, plan, (True, True))
        calls[name] = partial(_run, launches)
        if "f2" in name:
            calls["split_only_" + name] = partial(_run, launches[:1])
    return interleaved_us(calls, 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--libraries", type=Path, nargs="*", default=[])
    parser.add_argument("--backends", nargs="*")
    run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    resolve_device("cuda")
    check_makeable(options.out, options.out)
    rows, libraries = [], options.libraries
    for shape in GOALS:
        try:
            new = bench_decode([shape], libraries, options.backends, repetitions=20)
        except (RuntimeError, AttributeError) as error:
            if not libraries:
                raise
            print(f"without vLLM's kernels from here on: {error}", flush=True)
            libraries = []
            new = bench_decode([shape], libraries, options.backends, repetitions=20)
        rows += new
        write(result_path(options.out, "decode"), rows)  # what is there, should time run out
        tokens = shape.context * shape.batch
        for row in new:
            print({**row, "ps_per_token": round(row["us"] * 1e6 / tokens, 1)}, flush=True)
    append_rows = bench_append(backends=options.backends)
    write(result_path(options.out, "append"), append_rows)
    for row in append_rows:
        print(row, flush=True)
    tried = {}
    for shape in (
        Shape(16, 1, 32768, 32),
        Shape(16, 1, 131072, 1),
        Shape(64, 1, 32768, 32),
        Shape(32, 1, 32768, 32),
        Shape(16, 1, 32768, 32, "c2r4"),
    ):
        times = dict(sorted(variants(shape).items(), key=lambda item: item[1]))
        tried[str(tuple(shape))] = times
        print(shape, {name: round(us, 1) for name, us in times.items()}, flush=True)
        (options.out / "variants.json").write_text(json.dumps(tried, indent=1))


if __name__ == "__main__":
    main()
