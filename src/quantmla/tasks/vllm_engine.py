"""lm-eval's own model of vLLM, told which cache to use.

vLLM scores a given text while it reads it as a prompt, before anything of it has been quantised:
only tasks whose answers are written are evaluated so.
"""

from pathlib import Path
from typing import Any

from quantmla.errors import UsageError, require
from quantmla.quant.mixed import ModelFormat, uniform_format

MEMORY_SHARE = 0.9  # of the GPU, for all engines of a run together


def vllm_arguments(
    folder: Path, fmt: ModelFormat | None, *, positions: int, engines: int
) -> dict[str, Any]:
    """Arguments of lm-eval's VLLM for a checkpoint whose cache is packed in `fmt`, or is bf16."""
    one = None if fmt is None else uniform_format(fmt)
    require(
        fmt is None or one is not None,
        "--engine vllm takes one format for all layers, and those of this folder differ",
        UsageError,
    )
    return {
        "pretrained": str(folder),
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto" if one is None else f"quantmla_{one.name}",
        "max_model_len": positions,
        "batch_size": "auto",
        "seed": 0,
        "gpu_memory_utilization": MEMORY_SHARE / engines,
    }


def vllm_model(arguments: dict[str, Any]) -> Any:
    """Starts the engine."""
    from lm_eval.models.vllm_causallms import VLLM

    return VLLM(**arguments)
