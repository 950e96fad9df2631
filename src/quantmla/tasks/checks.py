"""What cannot be evaluated is refused before any model is loaded."""

from collections.abc import Sequence
from pathlib import Path

from quantmla.errors import UnsupportedModel, UsageError, require
from quantmla.mla.geometry import MlaGeometry
from quantmla.recipe import TaskRequest
from quantmla.serving.command import check_checkpoint, check_machine
from quantmla.tasks.build import find_source
from quantmla.tasks.registry import Asked

# What vLLM's latent attention and its FlashAttention for prompts take on a Hopper GPU.
LATENT_CHANNELS = (320, 576)
HEAD_SIZES = ((128, 64, 128), (192, 64, 256), (64, 64, 128))


def check_tasks(asked: Sequence[Asked], request: TaskRequest, longest: int) -> None:
    """Data that are not there, consent that was not given, lengths beyond the model."""
    data = None if request.data is None else Path(request.data)
    require(
        data is None or (data.is_dir() and request.data != ""),  # Path("") is the current folder
        f"--data {request.data!r} is not a folder with data files",
        UsageError,
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


def check_engine(
    asked: Sequence[Asked], request: TaskRequest, geometry: MlaGeometry, *, fused: bool
) -> None:
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
    _check_baseline(geometry)
    check_machine()


def _check_baseline(geometry: MlaGeometry) -> None:
    """The plugin serves more sizes than vLLM's own attention, which the baseline is left to."""
    latent = (geometry.kv_lora_rank, geometry.qk_rope_head_dim)
    heads = (geometry.qk_nope_head_dim, geometry.qk_rope_head_dim, geometry.v_head_dim)
    require(
        sum(latent) in LATENT_CHANNELS and heads in HEAD_SIZES,
        f"--engine vllm also runs the unquantised model, and vLLM's own attention does not take "
        f"latents of {latent[0]} + {latent[1]} channels with heads of {heads[0]} + {heads[1]} and "
        f"values of {heads[2]}: leave --engine out",
        UnsupportedModel,
    )
