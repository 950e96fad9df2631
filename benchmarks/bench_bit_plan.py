"""Bits by layer on nano: what each layer, path and width costs, and plans against uniform formats.

    python benchmarks/bench_bit_plan.py --work DIR [--out FILE] [--budget 94] [--windows 8]

Costs are those of `quantmla analyze nano --studies sensitivity`, on calibration text. Every format
is then measured on held-out text with the transforms that `quantize` learns for each width of each
path, or with `--learning few` with those that the costs were measured with. DIR keeps the finished
parts, so an interrupted run goes on.
"""

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from quantmla.analysis.bit_plan import (
    BitPlan,
    costs_by_layer,
    layer_choices,
    plan_bits,
    recipe_format,
    uniform_plan,
)
from quantmla.analysis.protocol import PRESETS
from quantmla.analysis.sensitivity import (
    LEARNED,
    Fits,
    measure,
    planned_format,
    variant,
)
from quantmla.analysis.subject import ModelSubject
from quantmla.arch import adapter_for
from quantmla.arguments import new_or_old_file
from quantmla.capture.tokens import load_tokenizer, packaged_texts
from quantmla.checkpoint.source import open_source
from quantmla.device import resolve_device
from quantmla.doctor import gpus, versions
from quantmla.evaluate.perplexity import default_text, measure_text, token_windows
from quantmla.evaluation import fit
from quantmla.mla.geometry import MlaGeometry
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.quant.mixed import each_layer
from quantmla.transform.layer import LayerTransform
from quantmla.transform.store import transforms_from_file, transforms_to_bytes
from quantmla.verify import load_model

ROOT = Path(__file__).parents[1]
UNIFORM = ("c4r4", "c3r4", "c4r2", "c3r3", "c2r4")
KERNEL_FORMATS = ("c2r4", "c4r4")  # what the GPU kernels decode


def nano(args: argparse.Namespace) -> ModelSubject:
    source = open_source("nano")
    return ModelSubject(
        source=source,
        adapter=adapter_for(source.config),
        device=args.device,
        texts=packaged_texts(),
        layers=[],
        budget=args.budget,
        workdir=args.work,
        report=lambda stage, done, total: print(stage, done, "of", total, flush=True),
    )


def indices(model: ModelSubject) -> dict[str, int]:
    sites = model.adapter.sites(model.source.config, model.source.names)
    return {site.prefix: site.cache_index for site in sites}


def few_steps(model: ModelSubject) -> Fits:
    """The transforms that the costs were measured with."""
    where = indices(model)
    fits = {}
    for bits in LEARNED:
        found = transforms_from_file(model.workdir / f"sensitivity_c{bits}r{bits}.safetensors")
        fits[bits] = {where[prefix]: found[prefix] for prefix in where}
    return fits


def full_fits(model: ModelSubject, folder: Path) -> Fits:
    """For each width of each path what `quantize` learns for it, the other path in bf16."""
    folder.mkdir(exist_ok=True)
    where = indices(model)
    fits: dict[int, dict[int, LayerTransform]] = {}
    for bits in LEARNED:
        parts = []
        for name in (f"c{bits}r16", f"c16r{bits}"):
            path = folder / f"{name}.safetensors"
            if not path.is_file():
                fmt = parse_format(name)
                learned = fit(model.source, model.adapter, "quantmla", fmt, model.device, False)
                path.write_bytes(transforms_to_bytes(learned))
                print("learned", name, flush=True)
            parts.append(transforms_from_file(path))
        content, rope = parts
        fits[bits] = {where[p]: LayerTransform(content[p].content, rope[p].rope) for p in where}
    return fits


def plans(
    costs: Sequence[Mapping[str, Any]], geometry: MlaGeometry, budget: float
) -> dict[str, BitPlan]:
    """By name, uniform formats first."""
    choices = {i: layer_choices(c, geometry) for i, c in costs_by_layer(costs).items()}
    kernels = {i: [c for c in layer if c.format in KERNEL_FORMATS] for i, layer in choices.items()}
    uniform = {name: uniform_plan(choices, name) for name in UNIFORM}
    as_large = {
        f"plan, bytes of {name}": plan_bits(choices, uniform[name].bytes_per_token)
        for name in ("c4r4", "c2r4")
    }
    return {**uniform, **as_large} | {
        "plan": plan_bits(choices, budget),
        "plan, kernels' formats only": plan_bits(kernels, budget),
    }


def evaluate(
    base: Any, fits: Fits, found: Mapping[str, Any], windows: list[torch.Tensor], bare: bool
) -> list[dict[str, Any]]:
    """Rows of the table, all with the same protection."""
    formats = [planned_format(plan.formats) for plan in found.values()]
    if bare:
        formats = [each_layer(fmt, CacheFormat.unprotected) for fmt in formats]
    variants = [
        replace(variant(name, fits, fmt), name=name)
        for name, fmt in zip(found, formats, strict=True)
    ]
    results = measure_text(
        base, variants, windows, lambda stage, done, total: print(stage, done, total, flush=True)
    )
    return [
        {
            "name": name,
            "protected": not bare,
            "bytes_per_token": plan.bytes_per_token,
            "predicted_kl": plan.cost,
            "kl_mean": result.overall.kl_mean,
            "kl_error": result.overall.kl_error,
            "kl_p99": result.overall.kl_p99,
            "top1": result.overall.top1,
            "perplexity": result.overall.perplexity,
            "format": recipe_format(plan.formats),
        }
        for (name, plan), result in zip(found.items(), results, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=new_or_old_file)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget", type=float, default=94.0, help="bytes per token; 94 is c3r4's")
    parser.add_argument("--learning", choices=("few", "full"), default="full")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    args.device = resolve_device(args.device)
    args.work.mkdir(parents=True, exist_ok=True)
    model = nano(args)
    sensitivity = measure(model, PRESETS["default"])
    base = load_model(model.source.path, torch.float32).to(args.device)
    fits = few_steps(model) if args.learning == "few" else full_fits(model, args.work / "fits")
    found = plans(sensitivity["costs"], model.adapter.geometry(model.source.config), args.budget)
    tokenizer = load_tokenizer(model.source.path)
    windows = token_windows(tokenizer, default_text(), args.context, args.windows)
    rows = [row for bare in (True, False) for row in evaluate(base, fits, found, windows, bare)]
    header = {
        "versions": versions(),
        "gpus": [gpu["name"] for gpu in gpus()] if args.device != "cpu" else [],
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "model": "nano",
        "sha256": model.source.digest(),
        "budget": args.budget,
        "protocol": asdict(PRESETS["default"]),
        "learning": args.learning,
        "windows": args.windows,
        "context": args.context,
    }
    for row in rows:
        print(row, flush=True)
    path = args.out or ROOT / f"benchmarks/results/bit_plan_nano_{date.today():%Y%m%d}.json"
    result = {
        "header": header,
        "rows": rows,
        "costs": sensitivity["costs"],
        "plan": sensitivity["plan"],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
