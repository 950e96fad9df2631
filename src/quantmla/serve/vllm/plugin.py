"""Registers everything with vLLM; once in each process, however often it is called."""

from functools import cache

from quantmla.errors import QuantMLAError, require
from quantmla.serve.vllm import layer, specs
from quantmla.serve.vllm.engine import (
    RELEASES,
    AttentionBackendEnum,
    MLAPrefillBackendEnum,
    PluggableLayer,
    __version__,
    register_backend,
    register_mla_prefill_backend,
)


@cache
def install() -> None:
    """QuantMLAError where this is another release of vLLM than the plugin was written for."""
    require(
        __version__.startswith(RELEASES),
        f"vllm {__version__} is installed, and the plugin is written for {', '.join(RELEASES)}",
        QuantMLAError,
    )
    register_backend(AttentionBackendEnum.CUSTOM, layer.BACKEND_PATH)
    register_mla_prefill_backend(
        MLAPrefillBackendEnum.CUSTOM, "quantmla.serve.vllm.prefill.PaddedPrefill"
    )
    specs.install()
    PluggableLayer.register_oot(name="MultiHeadLatentAttentionWrapper")(layer.QuantMLAWrapper)
