"""What cannot be evaluated is refused before any model is loaded."""

from collections.abc import Sequence
from pathlib import Path

from quantmla.errors import UsageError, require
from quantmla.recipe import TaskRequest
from quantmla.serving.command import check_checkpoint, check_machine
from quantmla.tasks.build import find_source
from quantmla.tasks.registry import Asked


def check_tasks(asked: Sequence[Asked], request: TaskRequest, longest: int) -> None:
    """Data that are not there, consent that was not given, lengths beyond the model."""
    data = None if request.data is None else Path(request.data)
    require(
        data is None or data.is_dir(), f"--data {data} is not a folder with data files", UsageError
    )
    for task in asked:
        spec = task.spec
        require(
            request.run_code or not spec.runs_code,
            f"task {spec.name} runs programs that the model writes, on this machine: add "
            "--run-code to agree, best inside a container",
            UsageError,
        )
        require(
            task.length is None or task.length <= longest,
            f"task {task.label} is longer than the model's {longest} positions",
            UsageError,
        )
        if data is not None and task.length is None:
            find_source(spec, data)


def check_engine(asked: Sequence[Asked], request: TaskRequest, *, fused: bool) -> None:
    """What vLLM cannot evaluate, and where it cannot run."""
    if request.engine != "vllm":
        return
    require(
        fused and not request.evaluation.methods,
        "--engine vllm evaluates what quantize wrote: name such a folder, and no --methods",
        UsageError,
    )
    given = request.evaluation
    changed = given.unprotected or any(
        x is not None for x in (given.format, given.sinks, given.recent)
    )
    require(
        not changed,
        "--engine vllm serves the folder's own format: drop --format, --sinks, --recent and "
        "--unprotected",
        UsageError,
    )
    scored = [task.label for task in asked if task.spec.kind == "likelihood"]
    require(
        not scored,
        f"--engine vllm scores texts before they are quantised, which says nothing about "
        f"{', '.join(scored)}: leave --engine out for these tasks",
        UsageError,
    )
    require(
        given.device == "auto",
        f"--engine vllm takes the first GPU that it sees: drop --device {given.device}",
        UsageError,
    )
    check_checkpoint(given.model)
    check_machine()
