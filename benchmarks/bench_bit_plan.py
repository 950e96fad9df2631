"""Bits by layer on nano: what each layer, path and width costs, and plans against uniform formats.

    python benchmarks/bench_bit_plan.py --work DIR [--out FILE] [--budget 94] [--windows 8]

Costs are those of `quantmla analyze nano --studies sensitivity`, on calibration text. Every format
is then measured on held-out text with the transforms that `quantize` learns for each width of each
path. DIR keeps the finished parts, so an interrupted run goes on.
"""

import argparse
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from quantmla.analysis.bit_plan import (
    costs_by_layer,
    layer_choices,
    plan_bits,
    recipe_format,
    uniform_plan,
)
from quantmla.analysis.protocol import PRESETS
from quantmla.analysis.sensitivity import (
    HELD_OUT_WINDOWS,
    LEARNED,
    Fits,
    above,
    layer_divergences,
    measure,
    planned_format,
    rounding_floor,
    sensitivity_windows,
    variant,
)
from quantmla.analysis.subject import ModelSubject
from quantmla.arch import adapter_for
from quantmla.capture.tokens import load_tokenizer, packaged_texts
from quantmla.checkpoint.source import open_source
from quantmla.device import resolve_device
from quantmla.doctor import gpus, versions
from quantmla.evaluate.perplexity import default_text, measure_text, token_windows
from quantmla.evaluation import fit
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.quant.mixed import each_layer
from quantmla.transform.layer import LayerTransform, identity
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


def plain_costs(model: ModelSubject, base: Any, folder: Path) -> list[dict[str, Any]]:
    """The same costs without any transform."""
    folder.mkdir(exist_ok=True)
    tokens = sensitivity_windows(model.source, model.texts[0][1], PRESETS["default"])
    windows = [row[None] for row in tokens.held_out_BS[HELD_OUT_WINDOWS:]]
    as_it_is = {index: _as_it_is(model, prefix) for prefix, index in indices(model).items()}
    fits = dict.fromkeys(LEARNED, as_it_is)
    floor = rounding_floor(base, fits, windows)
    every = [layer_divergences(base, fits, windows, i, folder) for i in as_it_is]
    return [row for rows in every for row in above(floor, rows)]


def _as_it_is(model: ModelSubject, prefix: str) -> LayerTransform:
    g = model.adapter.geometry(model.source.config)
    norm = model.source.float_tensor(f"{prefix}.kv_a_layernorm.weight", torch.float64)
    return identity(norm, g.qk_rope_head_dim // 2)


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
    costs: Mapping[str, list[dict[str, Any]]], geometry: Any, budget: float
) -> dict[str, Any]:
    """Name to (formats, predicted cost, mean bytes), uniform formats first."""
    choices = {
        name: {i: layer_choices(c, geometry) for i, c in costs_by_layer(rows).items()}
        for name, rows in costs.items()
    }
    kernels = {
        i: [c for c in layer if c.format in KERNEL_FORMATS]
        for i, layer in choices["learned"].items()
    }
    uniform = {name: uniform_plan(choices["learned"], name) for name in UNIFORM}
    as_large = {
        f"plan, bytes of {name}": plan_bits(choices["learned"], uniform[name].bytes_per_token)
        for name in ("c4r4", "c2r4")
    }
    return {**uniform, **as_large} | {
        "plan": plan_bits(choices["learned"], budget),
        "plan, costs without transforms": plan_bits(choices["plain"], budget),
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
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget", type=float, default=94.0, help="bytes per token; 94 is c3r4's")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    args.device = resolve_device(args.device)
    args.work.mkdir(parents=True, exist_ok=True)
    model = nano(args)
    sensitivity = measure(model, PRESETS["default"])
    base = load_model(model.source.path, torch.float32).to(args.device)
    costs = {
        "learned": sensitivity["costs"],
        "plain": plain_costs(model, base, args.work / "plain"),
    }
    fits = full_fits(model, args.work / "fits")
    found = plans(costs, model.adapter.geometry(model.source.config), args.budget)
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
        "windows": args.windows,
        "context": args.context,
    }
    for row in rows:
        print(row, flush=True)
    path = args.out or ROOT / f"benchmarks/results/bit_plan_nano_{date.today():%Y%m%d}.json"
    result = {"header": header, "rows": rows, "costs": costs, "plan": sensitivity["plan"]}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
