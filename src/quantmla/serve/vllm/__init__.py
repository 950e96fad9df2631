"""QuantMLA inside vLLM: a plugin that vLLM finds by its entry point `vllm.general_plugins`."""

import logging


def register() -> None:
    """Makes `--attention-backend CUSTOM` mean the packed cache; vLLM calls it in every process.

    Never raises: a fault of ours must not stop vLLM for other models. It is logged in one line,
    and then CUSTOM is refused by vLLM itself.
    """
    try:
        from quantmla.serve.vllm.plugin import install

        install()
    except Exception as error:
        logging.getLogger("vllm.quantmla").warning(
            "QuantMLA is not available here: %s: %s", type(error).__name__, error
        )
