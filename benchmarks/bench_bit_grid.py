"""Divergence over bits of content and of rope on nano, nothing protected.

    python benchmarks/bench_bit_plan.py --work DIR --learning few
    python benchmarks/bench_bit_grid.py --work DIR [--out FILE] [--windows 4]

DIR holds the transforms that bench_bit_plan.py learned with few steps for each width of each path
(8 bits take what 4 learned); here they are put together in all pairs, so figures stand a little
above those of `quantize`. The result has the form of `quantmla eval --json`.
"""

import argparse
import json
import platform
from datetime import date
from itertools import product
from pathlib import Path

import torch
from bench_bit_plan import few_steps, nano

from quantmla.analysis.sensitivity import WIDTHS, variant
from quantmla.arguments import new_or_old_file
from quantmla.capture.tokens import load_tokenizer
from quantmla.device import resolve_device
from quantmla.doctor import gpus, versions
from quantmla.evaluate.perplexity import default_text, measure_text, token_windows
from quantmla.quant.format import parse_format
from quantmla.quant.layout import layout_for
from quantmla.verify import load_model

ROOT = Path(__file__).parents[1]
NOTE = "Transforms learned with few steps for each width of each path."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=new_or_old_file)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    args.device, args.budget = resolve_device(args.device), None
    model = nano(args)
    fits = few_steps(model)
    geometry = model.adapter.geometry(model.source.config)
    names = [f"c{content}r{rope}" for content, rope in product(WIDTHS, WIDTHS)]
    variants = [variant(name, fits, parse_format(name).unprotected()) for name in names]
    base = load_model(model.source.path, torch.float32).to(args.device)
    tokenizer = load_tokenizer(model.source.path)
    windows = token_windows(tokenizer, default_text(), args.context, args.windows)
    results = measure_text(
        base, variants, windows, lambda stage, done, total: print(stage, done, total, flush=True)
    )
    sizes = {name: layout_for(geometry, parse_format(name)).page_bytes / 64 for name in names}
    rows = [
        {
            "method": "quantmla",
            "format": name,
            "sinks": 0,
            "recent": None,
            "bytes_per_token": sizes[name],
            "tokens": result.overall.tokens,
        }
        | {key: getattr(result.overall, key) for key in ("perplexity", "kl_mean", "kl_p99", "top1")}
        for name, result in zip(names, results, strict=True)
    ]
    header = {
        "versions": versions(),
        "gpus": [gpu["name"] for gpu in gpus()] if args.device != "cpu" else [],
        "processor": platform.machine(),
        "model": "nano",
        "sha256": model.source.digest(),
        "grid": True,
        "note": NOTE,
        "windows": args.windows,
        "context": args.context,
    }
    path = args.out or ROOT / f"benchmarks/results/bit_grid_nano_{date.today():%Y%m%d}.json"
    path.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
