"""lm-eval's own model of vLLM, told which cache to use.

vLLM scores a given text while it reads it as a prompt, before anything of it has been quantised:
only tasks whose answers are written are evaluated so.
"""

from pathlib import Path
from typing import Any

MEMORY_SHARE = 0.9  # of the GPU, for all engines of a run together


def vllm_arguments(folder: Path, *, packed: bool, positions: int, engines: int) -> dict[str, Any]:
    """Arguments of lm-eval's VLLM; a packed cache is that of the folder's own config."""
    cache = {"attention_backend": "CUSTOM"} if packed else {}
    return cache | {
        "pretrained": str(folder),
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "max_model_len": positions,
        "batch_size": "auto",
        "seed": 0,
        "gpu_memory_utilization": MEMORY_SHARE / engines,
    }


def vllm_model(arguments: dict[str, Any]) -> Any:
    """Starts the engine."""
    from lm_eval.models.vllm_causallms import VLLM

    return VLLM(**arguments)
