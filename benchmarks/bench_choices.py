"""What our method's choices are worth on nano, and that they are not chosen on held-out text.

    python benchmarks/bench_choices.py [--output FILE] [--windows 24] [--jobs 2] [--device cpu]

Everything is of the packaged *calibration* text: each choice is changed alone, transforms are
learned from the method's own amount of text, and measured on windows which are neither learned from
nor used to choose a step. `H of all tokens` learns as if nothing were protected. Differences of KL
from the method as it is are paired; the standard error is that of their mean over windows. --output
is by default benchmarks/results/choices_nano_<yyyymmdd>.json; rows that it has are not measured
again.
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_quality import FORMATS, ROOT
from bench_quantisers import OURS, Row, paired
from torch import Tensor

from quantmla.arch import adapter_for
from quantmla.arguments import new_or_old_file, positive, run_script
from quantmla.capture.tokens import CalibrationTokens, calibration_tokens, load_tokenizer, read_text
from quantmla.checkpoint.source import open_source
from quantmla.device import resolve_device
from quantmla.doctor import gpus, versions
from quantmla.errors import UsageError, require
from quantmla.evaluate.divergence import compare_logits
from quantmla.evaluate.variant import Variant, logits
from quantmla.learn import LearnSettings, learn_checkpoint
from quantmla.method import load_method, options_for
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.transform.layer import LayerTransform
from quantmla.verify import load_model
from quantmla.workdir import write_whole

AS_IT_IS = "as it is"
ALL_TOKENS = "H of all tokens"

CONTENT = {
    "rotation_rate": (5e-3, 2e-2),
    "scale_rate": (1e-2, 4e-2),
    "polish_steps": (0,),
}
ROPE = {"angle_rate": (3e-2, 1.2e-1), "gain_rate": (1e-2, 4e-2)}  # both formats have 4 bits there
OPTIONS = CONTENT | ROPE
CLIPS = {"c4r4": (0.95,), "c2r4": (0.8, 0.9)}


class Job(NamedTuple):
    """One choice in one format; `change` is an option's name and value, or none."""

    format: str
    choice: str
    change: tuple[str, float] | None
    windows: int
    device: str


def jobs_of(windows: int, device: str) -> list[Job]:
    """The method as it is comes first, then what says most."""
    found = [
        Job(f, choice, None, windows, device) for choice in (AS_IT_IS, ALL_TOKENS) for f in FORMATS
    ]
    changes = [(f, "content_clip", value) for f in FORMATS for value in CLIPS[f]]
    changes += [(f, o, value) for o, values in CONTENT.items() for value in values for f in FORMATS]
    changes += [(FORMATS[0], o, value) for o, values in ROPE.items() for value in values]
    return found + [
        Job(f, f"{option} {value:g}", (option, value), windows, device)
        for f, option, value in changes
    ]


@cache
def texts(windows: int) -> tuple[CalibrationTokens, Tensor]:
    """What is learned from and chosen by, and other windows of the same text to measure on."""
    amounts = load_method(OURS).CALIBRATION
    held_out = amounts["held_out_sequences"]
    tokens = calibration_tokens(
        load_tokenizer(open_source("nano").path),
        read_text(),
        num_sequences=amounts["num_sequences"],
        held_out=held_out + windows,
        sequence_length=amounts["sequence_length"],
        seed=0,
    )
    chosen_by, rest = tokens.held_out_BS.split((held_out, windows))
    return CalibrationTokens(tokens.train_BS, chosen_by), rest


@cache
def base(device: str) -> Any:
    return load_model(open_source("nano").path, torch.float32).to(device)


@cache
def plain(windows: int, device: str) -> list[Tensor]:
    """Logits of the unquantised model, window after window."""
    variant = Variant(name="bf16")
    return [logits(base(device), variant, ids[None])[0, :-1].cpu() for ids in texts(windows)[1]]


def learned(job: Job, fmt: CacheFormat) -> Mapping[int, LayerTransform]:
    """By cache index."""
    source = open_source("nano")
    adapter = adapter_for(source.config)
    is_option = job.change is not None and job.change[0] in OPTIONS
    settings = LearnSettings(
        method=OURS,
        options=options_for(OURS, dict([job.change]) if is_option and job.change else {}),
        fmt=fmt.unprotected() if job.choice == ALL_TOKENS else fmt,
        device=job.device,
    )
    with tempfile.TemporaryDirectory() as work:
        found = learn_checkpoint(source, adapter, texts(job.windows)[0], settings, Path(work) / "w")
    sites = adapter.sites(source.config, source.names)
    return {site.cache_index: found.transforms[site.prefix] for site in sites}


def measure(job: Job) -> Row:
    """KL of every window, protected and not."""
    torch.set_num_threads(1)
    fmt = parse_format(job.format)
    if job.change is not None and job.change[0] == "content_clip":
        fmt = replace(fmt, content_clip=job.change[1])
    transforms = learned(job, fmt)
    row: Row = {"format": job.format, "choice": job.choice}
    for name, used in (("protected", fmt), ("unprotected", fmt.unprotected())):
        variant = Variant(name=OURS, fmt=used, transforms=transforms)
        kls = []
        for ids, expected in zip(
            texts(job.windows)[1], plain(job.windows, job.device), strict=True
        ):
            read = logits(base(job.device), variant, ids[None])[0, :-1].cpu()
            kls.append(float(compare_logits(expected, read, ids[1:]).kl_S.double().mean()))
        row[name] = {"kl_mean": sum(kls) / len(kls), "kl_of_windows": kls}
    print(job.format, job.choice, *(row[n]["kl_mean"] for n in ("protected", "unprotected")))
    return row


def compared(rows: list[Row]) -> list[Row]:
    """With each row's share of KL more than the method as it is, and that share's error."""
    of = {row["format"]: row for row in rows if row["choice"] == AS_IT_IS}
    for row in rows:
        for name in ("protected", "unprotected"):
            ours = of[row["format"]][name]
            found = paired(*(_windows(part) for part in (row[name], ours)))
            row[name]["more"] = found["kl_more_than_ours"] / ours["kl_mean"]
            row[name]["more_error"] = found["standard_error"] / ours["kl_mean"]
    return rows


def _windows(part: Row) -> list[Tensor]:
    return [torch.tensor([kl], dtype=torch.float64) for kl in part["kl_of_windows"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=new_or_old_file)
    parser.add_argument("--windows", type=positive, default=24)
    parser.add_argument("--jobs", type=positive, default=2, help="processes at a time")
    parser.add_argument("--device", default="cpu")
    run_script(parser, run)


def run(args: argparse.Namespace) -> None:
    words = f"--windows {args.windows}: paired errors need at least 2"
    require(args.windows >= 2, words, UsageError)
    device = resolve_device(args.device)
    path = args.output or ROOT / f"benchmarks/results/choices_nano_{date.today():%Y%m%d}.json"
    header = {
        "versions": versions(),
        "gpus": [gpu["name"] for gpu in gpus()] if device != "cpu" else [],
        "processor": platform.machine(),
        "model": "nano",
        "sha256": open_source("nano").digest(),
        "windows": args.windows,
    }
    rows = earlier(path, header)
    done = {(row["format"], row["choice"]) for row in rows}
    waiting = [job for job in jobs_of(args.windows, device) if job[:2] not in done]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(measure, waiting):  # in order: as it is before what is compared with it
            rows.append(row)
            found = {"header": header, "rows": compared(rows)}
            write_whole(path, (json.dumps(found, indent=2) + "\n").encode())


def earlier(path: Path, header: Row) -> list[Row]:
    """Rows of an interrupted run of the same code, model and windows."""
    if not path.is_file():
        return []
    found = json.loads(path.read_text())
    require(
        found["header"] == header,
        f"{path} is of another run: remove it, or name another file by --output",
        UsageError,
    )
    return list(found["rows"])


if __name__ == "__main__":
    main()
