"""`quantmla eval`: its flags, and what they ask of the two evaluations."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from quantmla.arguments import DEVICE_HELP, MODEL_HELP, count, is_free, names, path, positive
from quantmla.errors import UsageError, require
from quantmla.workdir import check_file

if TYPE_CHECKING:
    from quantmla.recipe import EvaluationRequest

TEXT_ONLY = ("text", "context", "json")
TASKS_ONLY = ("data", "output", "max_new_tokens", "engine", "resume", "run_code")
SHOWN = ("task", "variant", "metric", "score", "stderr", "recovery", "items")


def evaluation_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of both evaluations, then those of one of them."""
    add = parser.add_argument
    add("model", metavar="MODEL_OR_OUT", help=f"{MODEL_HELP}, or what quantize wrote")
    add("--baseline", metavar="MODEL", help="the unquantized reference (default: as recorded)")
    add("--methods", type=names, metavar="A,B", help="fit and compare these, such as rtn,quarot")
    add("--format", metavar="F", help="such as c4r4 (default: as recorded, else c4r4)")
    add(
        "--sinks",
        type=count,
        metavar="N",
        help="first tokens kept in bf16 (default: 4, or as OUT says)",
    )
    add(
        "--recent",
        type=count,
        metavar="N",
        help="last tokens kept in bf16 (default: 128, or as OUT says)",
    )
    add("--unprotected", action="store_true", help="every token is read in its quantized form")
    add("--limit", type=positive, metavar="N", help="sequences (default: 4), or items of each task")
    add("--device", metavar="D", default="auto", help=DEVICE_HELP)
    text = parser.add_argument_group("without --tasks: perplexity, divergence and recall")
    text.add_argument("--text", metavar="FILE", help="held-out text (default: packaged)")
    text.add_argument(
        "--context", type=positive, metavar="N", help="tokens per sequence (default: up to 2048)"
    )
    text.add_argument("--json", type=path, metavar="FILE", help="write the rows, with versions")
    tasks = parser.add_argument_group("with --tasks: benchmarks, through lm-eval")
    _task_flags(tasks)


def _task_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tasks", type=names, metavar="A,B", help="such as paper-general or gsm8k,niah@4096")
    add("--data", metavar="DIR", help="folder with the tasks' data files (default: the hub)")
    add("-o", "--output", metavar="RUN", help="folder to write")
    add("--max-new-tokens", type=positive, metavar="N", help="less than a task allows")
    add("--engine", choices=("transformers", "vllm"), help="default: transformers")
    add("--resume", action="store_true", help="go on after the last finished task")
    add("--run-code", action="store_true", help="agree to run what the model writes")


def evaluation_command(args: argparse.Namespace) -> int:
    """Refuses flags that do not belong together, then evaluates."""
    _check(args)
    from quantmla.recipe import EvaluationRequest

    request = EvaluationRequest(
        model=args.model,
        baseline=args.baseline,
        methods=args.methods or (),
        format=args.format,
        sinks=args.sinks,
        recent=args.recent,
        unprotected=args.unprotected,
        text=args.text,
        context=args.context,
        limit=args.limit,
        device=args.device,
    )
    return _text(args, request) if args.tasks is None else _tasks(args, request)


def _check(args: argparse.Namespace) -> None:
    protected = args.sinks is not None or args.recent is not None
    require(
        not (args.unprotected and protected),
        "--unprotected keeps no token in bf16: drop it, or drop --sinks and --recent",
        UsageError,
    )
    others = TASKS_ONLY if args.tasks is None else TEXT_ONLY
    given = [name for name in others if getattr(args, name) not in (None, False)]
    wrong = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    when = "without --tasks" if args.tasks is None else "with --tasks"
    verb, them = ("mean", "them") if len(given) > 1 else ("means", "it")
    require(not given, f"{wrong} {verb} nothing {when}: drop {them}", UsageError)
    require(
        args.tasks is None or bool(args.output),
        "name the folder to write: -o RUN",
        UsageError,
    )
    if args.json is not None:
        _check_rows_file(args.json)


def _check_rows_file(file: Path) -> None:
    """Refuses a place that cannot be written to, or whose file is no earlier one of ours."""
    from quantmla import present

    require(
        os.access(file.parent, os.W_OK | os.X_OK) and not file.is_dir(),
        f"cannot write rows to {file}: it must be a file in a folder that may be written to",
        UsageError,
    )
    check_file(file)
    require(
        is_free(file, present.are_rows),
        f"{file} exists and holds no rows of an earlier eval: name another file",
        UsageError,
    )


def _text(args: argparse.Namespace, request: "EvaluationRequest") -> int:
    from quantmla import present
    from quantmla.evaluation import evaluate

    rows = evaluate(request, progress=True)
    fault: BaseException | None = None
    # they took long: neither a full disk nor a reader that left may cost what the other keeps
    try:
        if args.json is not None:
            present.write_rows(args.json, rows)
    except BaseException as error:  # told last
        fault = error
    try:
        present.show_rows(rows)
    finally:
        if fault is not None:
            raise fault
    return 0


def _tasks(args: argparse.Namespace, request: "EvaluationRequest") -> int:
    from quantmla import present
    from quantmla.recipe import TaskRequest
    from quantmla.tasks.run import evaluate_tasks

    document = evaluate_tasks(
        TaskRequest(
            evaluation=request,
            tasks=args.tasks,
            output=args.output,
            data=args.data,
            engine="transformers" if args.engine is None else args.engine,
            resume=args.resume,
            max_new_tokens=args.max_new_tokens,
            run_code=args.run_code,
        ),
        progress=True,
    )
    present.show_rows([{key: row[key] for key in SHOWN} for row in document["results"]])
    for part in ("averages", "comparisons"):
        if document[part]:
            print()
            present.show_rows(document[part])
    return 0
