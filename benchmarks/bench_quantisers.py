"""What the transforms of nano gain over one another in one quantiser, ours, window by window.

    python benchmarks/bench_quantisers.py --work DIR [--output FILE] [--windows 16] [--jobs 2]

README's table compares methods in the quantiser that each was published with. Here all have ours:
no transform (`identity`), what smoothquant and the published method learned (which the package
holds; learned for the published quantiser), and ours, fused. DIR holds nano-c4r4 and nano-c2r4 as
bench_quality.py makes them; they are made if they are missing. Differences of KL are paired: the
standard error is that of their mean over windows. --output is by default
benchmarks/results/quantisers_nano_<yyyymmdd>.json.
"""

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from bench_quality import FORMATS, ROOT, quantize
from torch import Tensor

from quantmla.arguments import new_or_old_file, positive, run_script
from quantmla.capture.tokens import load_tokenizer
from quantmla.doctor import versions
from quantmla.errors import UsageError, require
from quantmla.evaluate.divergence import compare_logits, error_of_mean, summarize
from quantmla.evaluate.perplexity import default_text, token_windows
from quantmla.evaluate.variant import Variant, logits
from quantmla.evaluation import (
    DEFAULT_CONTEXT,
    fitted_variant,
    format_asked,
    loaded_model,
    open_subject,
)
from quantmla.recipe import EvaluationRequest
from quantmla.workdir import check_makeable, write_whole

OTHERS = ("identity", "smoothquant", "paper")
OURS = "quantmla"
Row = dict[str, Any]


def measure(job: tuple[Path, bool, int]) -> list[Row]:
    """Rows of one format and protection."""
    folder, unprotected, windows = job
    request = EvaluationRequest(model=str(folder), device="cpu", unprotected=unprotected)
    subject = open_subject(request)
    assert subject.fused is not None
    fmt = format_asked(request, subject)
    base = loaded_model(subject.base.path, "cpu")
    fitted = (fitted_variant(subject, name, fmt, "cpu", False) for name in OTHERS)
    variants = [replace(variant, fmt=fmt) for variant in fitted]
    variants.append(Variant(name=OURS, model=loaded_model(subject.fused.path, "cpu"), fmt=fmt))
    texts = token_windows(
        load_tokenizer(subject.base.path), default_text(), DEFAULT_CONTEXT, windows
    )
    found: Mapping[str, list[Any]] = {variant.name: [] for variant in variants}
    for ids in texts:
        plain = logits(base, Variant(name="bf16"), ids)[0, :-1]
        for variant in variants:
            read = logits(base, variant, ids)[0, :-1]
            found[variant.name].append(compare_logits(plain, read, ids[0, 1:]))
    kls = {name: [m.kl_S.double() for m in measures] for name, measures in found.items()}
    return [
        {
            "transform": name,
            "format": folder.name.removeprefix("nano-"),
            "protected": not unprotected,
            "windows": len(texts),
            "perplexity": summarize(measures).perplexity,
            "kl_mean": float(torch.cat(kls[name]).mean()),
            **paired(kls[name], kls[OURS]),
        }
        for name, measures in found.items()
    ]


def paired(kls: Sequence[Tensor], ours: Sequence[Tensor]) -> Row:
    """How much more KL than ours has; a tensor of tokens for each window."""
    more = [one - other for one, other in zip(kls, ours, strict=True)]
    return {
        "kl_more_than_ours": float(torch.cat(more).mean()),
        "standard_error": error_of_mean(more),
        "windows_below_ours": sum(float(window.mean()) < 0 for window in more),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=new_or_old_file)
    parser.add_argument("--windows", type=positive, default=16)
    parser.add_argument("--jobs", type=positive, default=2, help="processes at a time")
    run_script(parser, run)


def run(args: argparse.Namespace) -> None:
    check_makeable(args.work, args.work)
    words = f"--windows {args.windows}: paired errors need at least 2"
    require(args.windows >= 2, words, UsageError)
    outs = {name: args.work / f"nano-{name}" for name in FORMATS}
    jobs = [
        (outs[name], unprotected, args.windows) for name in FORMATS for unprotected in (True, False)
    ]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(quantize, [(name, "cpu", out) for name, out in outs.items()]))
        rows = [row for part in pool.map(measure, jobs) for row in part]
    header = {"versions": versions(), "gpus": [], "processor": platform.machine(), "model": "nano"}
    path = args.output or ROOT / f"benchmarks/results/quantisers_nano_{date.today():%Y%m%d}.json"
    write_whole(path, (json.dumps({"header": header, "rows": rows}, indent=2) + "\n").encode())
    for row in rows:
        print(row, flush=True)


if __name__ == "__main__":
    main()
