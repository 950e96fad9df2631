"""lm-eval's own model of vLLM, told which cache to use.

vLLM scores a given text while it reads it as a prompt, before anything of it has been quantised:
only tasks whose answers are written are evaluated so.
"""

from pathlib import Path
from typing import Any

from quantmla.errors import QuantMLAError, one_line

MEMORY_SHARE = 0.9  # of the GPU, for all engines of a run together
WHOLE_PROMPTS = 16_384  # positions up to which a step holds any prompt, as it does by default


def vllm_arguments(
    folder: Path, *, packed: bool, compiled: bool, positions: int, engines: int
) -> dict[str, Any]:
    """Arguments of lm-eval's VLLM; a packed cache is that of the folder's own config.

    Without prefix caching: a prompt whose beginning is taken from another item's pages would be
    read quantised, and an answer would depend on which items came before. For the same reason a
    prompt that does not fit into what a step has left waits for the next one, instead of being cut
    there; only where the model has more positions than a step should hold are prompts cut.
    """
    cache = {"attention_backend": "CUSTOM"} if packed else {}
    return cache | {
        "pretrained": str(folder),
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": False,
        "enable_chunked_prefill": positions > WHOLE_PROMPTS,
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
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        raise QuantMLAError(
            f"vLLM did not start with {arguments['pretrained']}: {one_line(error)}"
        ) from error


class Engines:
    """The engines of a run by name, each started when it is first needed; `stop` ends them all.

    Without it, an engine keeps its process and its share of the GPU until Python ends.
    """

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}

    def get(self, name: str, arguments: dict[str, Any]) -> Any:
        if name not in self.started:
            self.started[name] = vllm_model(arguments)
        return self.started[name]

    def stop(self) -> None:
        while self.started:
            _, lm = self.started.popitem()
            lm.model.llm_engine.engine_core.shutdown()
