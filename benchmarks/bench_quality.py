"""The quality table of nano: every method, both formats, protected and not, on one machine.

    python benchmarks/bench_quality.py --work DIR [--out FILE] [--device auto] [--windows 24]

Quantizes nano with our method, fits the others on the base model with their own amounts of
calibration text, and keeps the fits that take long in `src/quantmla/assets/fits`, so that
`quantmla eval` need not learn them again. The jobs run side by side.
"""

import argparse
import json
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import torch

from quantmla import pipeline
from quantmla.arch import adapter_for
from quantmla.arguments import count, new_or_old_file, positive, run_script
from quantmla.checkpoint.source import open_source
from quantmla.device import resolve_device
from quantmla.doctor import gpus, versions
from quantmla.evaluation import Needles, evaluate, fit, published
from quantmla.fits import fit_name
from quantmla.quant.format import parse_format
from quantmla.recipe import EvaluationRequest, recipe_from
from quantmla.transform.store import transforms_to_bytes
from quantmla.workdir import check_makeable, write_whole

ROOT = Path(__file__).parents[1]
FITS = ROOT / "src/quantmla/assets/fits"
KEPT = ("smoothquant", "paper")
FORMATS = ("c4r4", "c2r4")


def keep_fit(job: tuple[str, str, str, Path]) -> None:
    """Learns one method in one format and keeps its transforms."""
    name, method, device, folder = job
    source = open_source("nano")
    path = folder / fit_name(source.digest(), method, name)
    if path.is_file():
        return
    began = time.perf_counter()
    fmt = published(parse_format(name))
    transforms = fit(source, adapter_for(source.config), method, fmt, device, False)
    path.write_bytes(transforms_to_bytes(transforms, torch.float32))
    print(f"{path.name}: {time.perf_counter() - began:.1f} s", flush=True)


def quantize(job: tuple[str, str, Path]) -> None:
    name, device, out = job
    if (out / "config.json").is_file():  # of an earlier, interrupted run
        return
    data = {
        "format": {"name": name},
        "output": {"folder": str(out)},
        "calibration": {"device": device},
    }
    began = time.perf_counter()
    pipeline.quantize(
        recipe_from(data), resume=False, dry_run=False, overwrite=True, progress=False
    )
    print(f"quantize {name}: {time.perf_counter() - began:.1f} s", flush=True)


def measure(job: tuple[EvaluationRequest, Needles]) -> list[dict]:
    request, needles = job
    return [dict(row) for row in evaluate(request, progress=False, needles=needles)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=new_or_old_file)
    parser.add_argument("--fits", type=Path, default=FITS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--windows", type=positive, default=24)
    parser.add_argument("--needles", type=count, default=32)
    parser.add_argument("--needle-context", type=positive, default=4096)
    parser.add_argument("--jobs", type=positive, default=2, help="processes at a time")
    run_script(parser, run)


def run(args: argparse.Namespace) -> None:
    args.device = resolve_device(args.device)
    for folder in (args.work, args.fits):
        check_makeable(folder, folder)
    needles = Needles(args.needles, args.needle_context)
    args.fits.mkdir(parents=True, exist_ok=True)
    outs = {name: args.work / f"nano-{name}" for name in FORMATS}
    requests = [
        EvaluationRequest(
            model=str(outs[name]),
            limit=args.windows,
            device=args.device,
            unprotected=unprotected,
        )
        for name in FORMATS
        for unprotected in (True, False)
    ]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        fits = [(f, m, args.device, args.fits) for f in FORMATS for m in KEPT]
        waiting = [pool.submit(keep_fit, job) for job in fits]
        waiting += [pool.submit(quantize, (n, args.device, outs[n])) for n in FORMATS]
        for done in waiting:
            done.result()
        rows = [
            row
            for part in pool.map(measure, [(request, needles) for request in requests])
            for row in part
        ]
        rows = rows[:1] + [row for row in rows if row["format"] != "bf16"]
    for row in rows:
        print(row, flush=True)
    gpu_names = [gpu["name"] for gpu in gpus()] if args.device != "cpu" else []
    header = {
        "versions": versions(),
        "gpus": gpu_names,
        "processor": platform.machine(),
        "model": "nano",
        "sha256": open_source("nano").digest(),
        "windows": args.windows,
        "needles_of_each_kind": args.needles,
        "needle_context": args.needle_context,
    }
    path = args.out or ROOT / f"benchmarks/results/quality_nano_{date.today():%Y%m%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, result(header, rows).encode())


def result(header: dict, rows: list[dict]) -> str:
    """A line for each row; figures by context are bench_context.py's."""
    lines = [{key: row[key] for key in row if key != "by_context"} for row in rows]
    body = ",\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
    head = json.dumps(header, separators=(",", ":"))
    return f'{{\n"header": {head},\n"rows": [\n{body}\n]}}\n'


if __name__ == "__main__":
    main()
