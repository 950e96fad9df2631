"""Downstream tasks of nano, bf16 and C4R4, offline: that all of them run, and what they score.

    python benchmarks/bench_tasks.py --data DIR --work DIR [--out FILE] [--device auto]

Quantizes nano, then runs every task whose data DIR has: scored texts with more items than written
ones, because decoding is slow on a CPU. Interrupted, it goes on when called again.
"""

import argparse
import json
from datetime import date
from pathlib import Path

from quantmla import pipeline
from quantmla.arguments import new_or_old_file
from quantmla.device import resolve_device
from quantmla.errors import UsageError
from quantmla.recipe import EvaluationRequest, TaskRequest, recipe_from
from quantmla.tasks.build import find_source
from quantmla.tasks.registry import BY_NAME, GROUPS
from quantmla.tasks.run import evaluate_tasks

ROOT = Path(__file__).parents[1]


def available(data: Path) -> dict[str, list[str]]:
    """Tasks of the published groups whose data are there, by kind."""
    found: dict[str, list[str]] = {"likelihood": [], "generation": []}
    names = dict.fromkeys((*GROUPS["paper-general"], *GROUPS["paper-reasoning"]))
    for name in names:
        try:
            find_source(BY_NAME[name], data)
        except UsageError as error:
            print(error, flush=True)
            continue
        found[BY_NAME[name].kind].append(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=new_or_old_file)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scored", type=int, default=64, help="items of a task that is scored")
    parser.add_argument("--written", type=int, default=4, help="items of a task that is written")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--needles", default="niah@768")
    args = parser.parse_args()
    device = resolve_device(args.device)
    model, run = args.work / "nano-c4r4", args.work / "run"
    if not (model / "config.json").is_file():
        output = {"output": {"folder": str(model)}, "calibration": {"device": device}}
        pipeline.quantize(
            recipe_from(output), resume=False, dry_run=False, overwrite=True, progress=True
        )
    tasks = available(args.data)
    parts = (
        (tasks["likelihood"], args.scored),
        ([args.needles, *tasks["generation"]], args.written),
    )
    for names, limit in parts:
        request = TaskRequest(
            evaluation=EvaluationRequest(model=str(model), limit=limit, device=device),
            tasks=tuple(names),
            output=str(run),
            data=str(args.data),
            resume=True,
            max_new_tokens=args.max_new_tokens,
            run_code=True,
        )
        document = evaluate_tasks(request, progress=True)
    document = {**document, "model": {**document["model"], "id": "nano, quantized to C4R4"}}
    path = args.out or ROOT / f"benchmarks/results/tasks_nano_{date.today():%Y%m%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
