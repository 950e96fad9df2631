"""Times the studies of one attention of DeepSeek-V2-Lite's shape, random weights and activations.

    python benchmarks/bench_analysis.py [--out FILE] [--device cuda] [--preset paper] [--shape S]

Rows: shape, preset, study, sequences, tokens, seconds, peak_gib, and for the gain study by how much
of itself a probes' estimate was off at most. Amounts are the preset's own, for two texts; time does
not depend on what the numbers are. The activations start on the CPU, as after a real capture, and
are moved first (study "move").
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from bench_calibration import SHAPES, make_layer

from quantmla.analysis import LAYER_STUDIES
from quantmla.analysis.protocol import PRESETS, Protocol
from quantmla.analysis.subject import StudyLayer
from quantmla.arguments import new_or_old_file
from quantmla.doctor import gpus, versions
from quantmla.method.layer import Sample

TEXTS = 2
ALL_SHAPES = SHAPES | {"nano": (320, 6, 128, 64, 64, 64)}


def timed(
    work: Callable[[], dict[str, Any]], device: str
) -> tuple[dict[str, Any], float, float | None]:
    """What it returns, seconds, and peak GiB of device memory on a GPU."""
    gpu = device.startswith("cuda")
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    found = work()
    if gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return found, seconds, torch.cuda.max_memory_allocated() / 2**30 if gpu else None


def _probes(found: dict[str, Any]) -> dict[str, float]:
    """How far the probes' estimates were off at most, where there were any."""
    values = [point[path] for point in found.get("points", []) for path in ("content", "rope")]
    keys = ("trace_error", "allocated_error")
    return {key: max(abs(v[key]) for v in values) for key in keys if values and key in values[0]}


def study_layer(shape: str, protocol: Protocol, device: str) -> StudyLayer:
    """All cells of one random attention, the activations on the CPU."""
    count = TEXTS * protocol.draws * protocol.sequences
    made = make_layer(ALL_SHAPES[shape], count, protocol.length, device)
    return StudyLayer(
        prefix=shape,
        weights=made.weights,
        softmax_scale=made.softmax_scale,
        sample=made.train,
        sequences=protocol.sequences,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=new_or_old_file)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="paper", choices=list(PRESETS))
    parser.add_argument("--shape", default="DeepSeek-V2-Lite", choices=list(ALL_SHAPES))
    args = parser.parse_args()
    protocol = PRESETS[args.preset]
    machine = gpus()[0]["name"].split()[-1].lower() if args.device != "cpu" else "cpu"
    out = args.out or Path(__file__).parent / "results" / (
        f"analysis_{machine}_{date.today():%Y%m%d}.json"
    )
    layer = study_layer(args.shape, protocol, args.device)
    rows = []

    def row(study: str, work: Callable[[], dict[str, Any]]) -> None:
        found, seconds, peak = timed(work, args.device)
        rows.append(
            {
                "shape": args.shape,
                "preset": args.preset,
                "study": study,
                "sequences": len(layer.sample),
                "tokens": len(layer.sample) * protocol.length,
                "seconds": round(seconds, 3),
                "peak_gib": None if peak is None else round(peak, 2),
            }
            | _probes(found)
        )
        print(rows[-1], flush=True)
        header = {"versions": versions(), "gpus": [g["name"] for g in gpus()]}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"header": header, "rows": rows}, indent=2) + "\n")

    moved: list[Sample] = []

    def move() -> dict[str, Any]:
        moved.append(Sample(*(x.to(args.device) for x in layer.sample)))
        return {}

    row("move", move)
    layer = replace(layer, sample=moved[0])
    for name, module in LAYER_STUDIES.items():
        draw = torch.Generator(args.device).manual_seed(0)
        study = importlib.import_module(module)
        row(name, lambda s=study, g=draw: s.measure(layer, protocol, g))


if __name__ == "__main__":
    main()
