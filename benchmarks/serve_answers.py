"""Are vLLM's answers those of transformers with the same packed cache?

    python benchmarks/serve_answers.py all WORK [--engines c4r4-v1 ...] [--output RESULTS]
    python benchmarks/serve_answers.py collect CHECKPOINT FILE [--drafts 3] [--tensor-parallel 2]
    python benchmarks/serve_answers.py compare CHECKPOINT FILE [--output RESULTS]

`collect` needs a GPU and vllm: it serves chats, shared prefixes, chunks of several sizes, ragged
batches and preempted requests, and writes what came out together with the steps in which every
request was computed. `compare` needs neither: it computes the same tokens in the same steps with
transformers and QuantMLACache, in float32 and in bfloat16. `all` does both for nano in several
formats and engines (`answers_engines.py`), as many at once as CPUs can start.

Tolerance: the two precisions of transformers differ by rounding alone, so they say how much the
rounding of a bfloat16 engine can do. vLLM's log-probabilities must be as near to the float32
ones: within 2 times in the mean (rms) of a case, within 4 times at its worst token. A greedy token
may be another one only where the float32 model prefers its own by less than the latter.

RESULTS, such as benchmarks/results/answers_<gpu>_<yyyymmdd>.json, gains the lines of this run;
those of an earlier one with the same format, runner and drafts are replaced.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from answers_engines import ENGINES, chosen, run_engines
from answers_reference import compare
from bench_serve import require_gpus

from quantmla.arguments import count, new_or_old_file, path, positive, run_script
from quantmla.capture.tokens import load_tokenizer, read_text
from quantmla.checkpoint.locate import locate
from quantmla.errors import UsageError, require
from quantmla.workdir import write_whole

ANSWERS = ("environment", "format", "runner", "drafts", "tensor_parallel", "requests")


def texts(checkpoint: str) -> list[int]:
    """Token ids of the packaged held-out text."""
    held_out = locate("nano").parent / "text" / "heldout.txt"
    tokenizer = load_tokenizer(locate(checkpoint))
    return tokenizer.encode(read_text(held_out)[:120_000], add_special_tokens=False)


def run_name(found: Mapping[str, Any]) -> str:
    drafts = f", {found['drafts']} drafts" if found["drafts"] else ""
    parallel = f", {found['tensor_parallel']} GPUs" if found["tensor_parallel"] > 1 else ""
    return f"{found['format']}, {found['runner']} runner{drafts}{parallel}"


def read_answers(path: Path, keys: Sequence[str]) -> Any:
    """A JSON file with these keys; UsageError for any other."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}") from None
    whole = isinstance(found, dict) and all(key in found for key in keys)
    require(whole, f"{path} is not a file with {', '.join(keys)}", UsageError)
    return found


def keep(path: Path, found: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
    """Adds the lines to a result file; its environment is that of the machine that served."""
    old = read_answers(path, ["rows"])["rows"] if path.exists() else []
    run, served = run_name(found), found["environment"].get("time")
    rows = [row for row in old if row.get("run") != run]
    rows += [{"run": run, "served": served, **line} for line in lines]
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    head = json.dumps(found["environment"], indent=1)
    write_whole(path, f'{{"environment": {head},\n"rows": [\n{body}\n]}}\n'.encode())


def run_all(options: argparse.Namespace) -> bool:
    """Whether every engine's answers are right; WORK/ENGINE has its answers, lines and log."""
    right = True
    for name, lines in run_engines(options.work, chosen(options.engines)):
        path = options.work / name
        if lines is None:
            print(f"{name}: no answers, see {path / 'log.txt'}", flush=True)
            right = False
            continue
        faults = {line["case"]: line["fault"] for line in lines if line["fault"]}
        right = right and not faults
        print(f"{name}: {len(lines)} cases, faults: {faults or 'none'}", flush=True)
        if options.output is not None:
            keep(options.output, json.loads((path / "answers.json").read_text()), lines)
    return right


def run_collect(options: argparse.Namespace) -> bool:
    require_gpus(options.tensor_parallel)
    from answers_collect import collect

    text = texts(options.checkpoint)
    part = options.file.with_name(options.file.name + ".part")
    for found in collect(options.checkpoint, text, options.drafts, options.tensor_parallel):
        # `compare` takes it, if the engine ends before the rest
        write_whole(part, json.dumps(found).encode())
    part.replace(options.file)
    print(f"{options.file}: {len(found['requests'])} requests")
    return True


def run_compare(options: argparse.Namespace) -> bool:
    """Whether all answers are right."""
    found, lines = read_answers(options.file, ANSWERS), []
    for line in compare(options.checkpoint, found):
        print(json.dumps(line), flush=True)
        lines.append(line)
    if options.output is not None:
        keep(options.output, found, lines)
    return not any(line["fault"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    run = {"all": run_all, "collect": run_collect, "compare": run_compare}
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("all")
    sub.add_argument("work", type=Path, help="folder for what engines leave")
    sub.add_argument("--engines", nargs="+", choices=list(ENGINES), metavar="ENGINE")
    sub.add_argument("--output", type=new_or_old_file, help="result file that gains the lines")
    for name in ("collect", "compare"):
        sub = commands.add_parser(name)
        sub.add_argument("checkpoint")
        sub.add_argument("file", type=new_or_old_file if name == "collect" else path)
        if name == "collect":
            sub.add_argument("--drafts", type=count, default=0, help="n-gram drafts of a step")
            sub.add_argument("--tensor-parallel", type=positive, default=1)
        else:
            sub.add_argument(
                "--output", type=new_or_old_file, help="result file that gains the lines"
            )

    def chosen_command(options: argparse.Namespace) -> None:
        if getattr(options, "output", None) is not None and options.output.exists():
            read_answers(options.output, ["rows"])  # before work
        raise SystemExit(not run[options.command](options))

    run_script(parser, chosen_command)


if __name__ == "__main__":
    main()
