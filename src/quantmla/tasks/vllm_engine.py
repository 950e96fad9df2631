"""lm-eval's own model of vLLM, told which cache to use.

vLLM scores a given text while it reads it as a prompt, before anything of it has been quantised:
only tasks whose answers are written are evaluated so.
"""

from pathlib import Path
from typing import Any

from quantmla.errors import QuantMLAError

MEMORY_SHARE = 0.9  # of the GPU, for all engines of a run together


def vllm_arguments(
    folder: Path, *, packed: bool, compiled: bool, positions: int, engines: int
) -> dict[str, Any]:
    """Arguments of lm-eval's VLLM; a packed cache is that of the folder's own config.

    Without prefix caching: a prompt whose beginning is taken from another item's pages would be
    read quantised, and an answer would depend on which items came before.
    """
    cache = {"attention_backend": "CUSTOM"} if packed else {}
    return cache | {
        "pretrained": str(folder),
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": False,
        "enforce_eager": not compiled,
        "max_model_len": positions,
        "batch_size": "auto",
        "seed": 0,
        "gpu_memory_utilization": MEMORY_SHARE / engines,
    }


def vllm_model(arguments: dict[str, Any]) -> Any:
    """Starts the engine; QuantMLAError where it does not start, whose cause vLLM has logged."""
    from lm_eval.models.vllm_causallms import VLLM

    try:
        return VLLM(**arguments)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise QuantMLAError(
            f"vLLM did not start with {arguments['pretrained']}: {reason}"
        ) from error
