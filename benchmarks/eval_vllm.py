"""The same written tasks by `eval --engine vllm` and by transformers, on one Hopper GPU.

    python benchmarks/eval_vllm.py --data DIR --work DIR [--limit 64] [--max-new-tokens 48]
        [--output benchmarks/results/tasks_vllm_<gpu>_<yyyymmdd>.json]

Makes nano in DeepSeek's latent width (wide_nano.py), quantizes it with fewer steps and less text
than the default, and runs the command with vLLM's two engines in processes of their own, as it does
for anyone. Meanwhile transformers answers the same items in this process, whose memory on the GPU
only grows: vLLM stops where others free memory while it measures. About two minutes; what is
finished in --work is not made again.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_serve import PLAIN, environment
from wide_nano import write_wide_nano

from quantmla import pipeline
from quantmla.arguments import new_or_old_file, positive, run_script
from quantmla.bench.results import result_path, write
from quantmla.checkpoint.locate import read_config
from quantmla.device import resolve_device
from quantmla.recipe import EvaluationRequest, TaskRequest, recipe_from
from quantmla.serving.command import check_machine
from quantmla.tasks.checks import check_tasks
from quantmla.tasks.registry import asked_tasks
from quantmla.tasks.results import item_path, read_run
from quantmla.tasks.run import evaluate_tasks
from quantmla.workdir import check_makeable

RESULTS = Path(__file__).with_name("results")
TASKS = ("niah_single_2@1024", "niah_single_3@2048", "gsm8k")
STEPS = {"steps": 40, "polish_steps": 5, "rope_steps": 20}
CALIBRATION = {"num_sequences": 16, "held_out_sequences": 4, "sequence_length": 512}
MEMORY = 0.04  # of the GPU, for transformers: vLLM's engines leave a tenth
ENGINES = ("transformers", "vllm")
PACKAGES = ("transformers", "lm_eval", "datasets")
Row = dict[str, Any]


def make_model(work: Path, device: str) -> tuple[Path, Path]:
    """The wide model and what quantize makes of it, each unless it is there."""
    base, out = work / "wide-nano", work / "wide-nano-c4r4"
    if not base.is_dir():
        write_wide_nano(base)
    if not (out / "config.json").is_file():
        recipe = {
            "model": {"id": str(base)},
            "transform": {"options": STEPS},
            "calibration": CALIBRATION | {"device": device},
            "output": {"folder": str(out)},
        }
        pipeline.quantize(
            recipe_from(recipe), resume=False, dry_run=False, overwrite=True, progress=True
        )
    return base, out


def vllm_command(base: Path, out: Path, run: Path, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "quantmla", "eval", str(out), "--baseline", str(base)]
    command += ["--engine", "vllm", "--tasks", ",".join(options.tasks), "--data", str(options.data)]
    command += ["--limit", str(options.limit), "--max-new-tokens", str(options.max_new_tokens)]
    return [*command, "-o", str(run), "--resume"]


def task_request(
    base: Path, out: Path, run: Path, options: argparse.Namespace, **changes: str
) -> TaskRequest:
    """The same request in this process."""
    return TaskRequest(
        evaluation=EvaluationRequest(
            model=str(out), baseline=str(base), limit=options.limit, device=options.device
        ),
        tasks=tuple(options.tasks),
        output=str(run),
        data=str(options.data),
        resume=True,
        max_new_tokens=options.max_new_tokens,
        **changes,
    )


def run_both(base: Path, out: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Run folders by engine. CalledProcessError where vLLM's run failed."""
    runs = {engine: options.work / engine for engine in ENGINES}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(MEMORY)
    plain = environment()
    if not options.one_process:
        del plain["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with subprocess.Popen(vllm_command(base, out, runs["vllm"], options), env=plain) as process:
        try:
            evaluate_tasks(task_request(base, out, runs["transformers"], options), progress=False)
            print(f"transformers: done at {time.strftime('%X')}", flush=True)
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
    if code != 0:
        raise subprocess.CalledProcessError(code, process.args)
    return runs


def answers(run: Path, variant: str, task: str) -> list[tuple[float, str]]:
    """Score and text of every item."""
    found = json.loads(item_path(run, variant, task).read_text())
    return [(item["score"], item["answer"][0]) for item in found["items"]]


def agreement(one: Sequence[tuple[float, str]], two: Sequence[tuple[float, str]]) -> Row:
    """On how many items two engines score the same, and write the same, ends stripped."""
    pairs = list(zip(one, two, strict=True))
    return {
        "same_score": sum(a[0] == b[0] for a, b in pairs),
        "same_answer": sum(a[1].strip() == b[1].strip() for a, b in pairs),
    }


def collected(runs: Mapping[str, Path]) -> list[Row]:
    """One row for each task, variant and engine; vLLM's say how they agree with transformers'."""
    rows = []
    for engine, run in runs.items():
        document = read_run(run)
        tasks = {task["name"]: task for task in document["tasks"]}
        formats = {variant["name"]: variant["format"] for variant in document["variants"]}
        for result in document["results"]:
            name, variant = result["task"], result["variant"]
            row = {"engine": engine, "task": name, "variant": variant, "format": formats[variant]}
            row |= {key: result[key] for key in ("items", "score", "stderr")}
            row["max_new_tokens"] = tasks[name]["max_new_tokens"]
            if engine == "vllm":
                both = [answers(runs[other], variant, name) for other in ENGINES]
                row |= agreement(*both)
            rows.append(row)
    return rows


def check(options: argparse.Namespace) -> None:
    """UsageError, before work, for tasks, data, a folder or a machine that cannot be used."""
    resolve_device(options.device)
    check_makeable(options.work, options.work)
    longest, here = read_config("nano")["max_position_embeddings"], options.work
    request = task_request(here, here, here, options)
    check_tasks(asked_tasks(request.tasks, longest), request, longest)
    check_machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="folder for models and runs")
    parser.add_argument("--output", type=new_or_old_file, help="result file to write")
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--limit", type=positive, default=64, help="items of each task")
    parser.add_argument("--max-new-tokens", type=positive, default=48)
    parser.add_argument("--device", default="auto", help="of all but vLLM")
    parser.add_argument(
        "--one-process",
        action="store_true",
        help=f"vLLM's engines in one process ({next(iter(PLAIN))}=0)",
    )
    run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    check(options)
    base, out = make_model(options.work, options.device)
    print(f"quantized: {time.strftime('%X')}", flush=True)
    rows = collected(run_both(base, out, options))
    path = options.output or result_path(RESULTS, "tasks_vllm")
    write(path, rows, PACKAGES)
    print(*map(json.dumps, rows), path, sep="\n", flush=True)


if __name__ == "__main__":
    main()
