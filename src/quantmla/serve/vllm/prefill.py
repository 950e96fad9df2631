"""FlashAttention for the chunk itself at head sizes that vLLM does not list: values are padded."""

from typing import Any

from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend

from quantmla.serve.vllm.engine import MLADimensions, MLAPrefillBackendEnum, VllmConfig

LARGEST_HEAD = 256


class PaddedPrefill(FlashAttnPrefillBackend):
    """Values get zeros up to the keys' size; the layer cuts them off again."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: MLADimensions) -> bool:
        keys = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        return mla_dimensions.v_head_dim <= keys <= LARGEST_HEAD and keys % 8 == 0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.requires_v_padding = True


def choose_prefill(config: VllmConfig) -> None:
    """Where vLLM's FlashAttention does not list the model's head sizes, ours pads the values."""
    text = config.model_config.hf_text_config
    sizes = MLADimensions(
        qk_nope_head_dim=text.qk_nope_head_dim,
        qk_rope_head_dim=text.qk_rope_head_dim,
        v_head_dim=text.v_head_dim,
    )
    if config.attention_config.mla_prefill_backend is None and not (
        FlashAttnPrefillBackend.supports_mla_dimensions(sizes)
    ):
        config.attention_config.mla_prefill_backend = MLAPrefillBackendEnum.CUSTOM
