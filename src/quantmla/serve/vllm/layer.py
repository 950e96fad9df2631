"""The layers: latent attention with a packed cache, and the bf16 window beside it."""

from typing import Any

import torch
from torch import nn

from quantmla.serve.settings import CONFIG_KEY
from quantmla.serve.vllm.backend import WindowBackend
from quantmla.serve.vllm.engine import (
    AttentionBackendEnum,
    AttentionLayerBase,
    MLAAttention,
    MLAAttentionSpec,
    MultiHeadLatentAttentionWrapper,
    VllmConfig,
    get_current_vllm_config,
    init_logger,
)
from quantmla.serve.vllm.pool import PoolLayout
from quantmla.serve.vllm.specs import WindowSpec
from quantmla.serve.vllm.support import latent_backend, require_interleaved, served_layout

BACKEND_PATH = "quantmla.serve.vllm.backend.QuantMLABackend"

logger = init_logger("vllm.quantmla")


class PackedAttention(MLAAttention):
    """MLAAttention whose pages are bytes; `window` is set where its class is."""

    window: "WindowCache"

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        layout = self.window.layout
        return MLAAttentionSpec(
            block_size=layout.fmt.page_size,
            num_kv_heads=1,
            head_size=layout.bytes_per_token,
            dtype=torch.uint8,
        )


class WindowCache(nn.Module, AttentionLayerBase):
    """Holds the bf16 rows of one latent attention in a group of the pool of its own."""

    def __init__(self, prefix: str, layout: PoolLayout) -> None:
        super().__init__()
        self.prefix, self.layout = prefix, layout
        self.kv_cache = torch.tensor([])
        layers = get_current_vllm_config().compilation_config.static_forward_context
        assert prefix not in layers, f"two layers are called {prefix}"
        layers[prefix] = self

    def get_attn_backend(self) -> type[WindowBackend]:
        return WindowBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> WindowSpec:
        layout, longest = self.layout, vllm_config.model_config.max_model_len
        return WindowSpec(
            block_size=layout.window_page_size,
            num_kv_heads=1,
            head_size=layout.kv_lora_rank + layout.qk_rope_head_dim,
            dtype=torch.bfloat16,
            page_size_padded=layout.page_bytes,
            sliding_window=layout.kept_tokens,
            fmt=layout.fmt,
            refreshed_tokens=layout.refreshed_tokens,
            sink_pages=layout.sink_window_pages,
            max_pages=layout.window_pages(vllm_config.max_concurrent_batches, longest),
        )


def requested_layout(config: VllmConfig) -> PoolLayout | None:
    """The packed cache of the model that is being built, or None where vLLM's own is asked for."""
    custom, asked = AttentionBackendEnum.CUSTOM, config.attention_config.backend
    if custom in (asked, latent_backend(config)) and custom.get_path() == BACKEND_PATH:
        return served_layout(config)
    if hasattr(config.model_config.hf_config, CONFIG_KEY):
        logger.info_once(
            "This checkpoint is made for a packed cache and runs with vLLM's own: "
            "--attention-backend CUSTOM serves it with QuantMLA's."
        )
    return None


def pack_cache(attention: MLAAttention, layout: PoolLayout) -> WindowCache:
    """Gives a latent attention the packed cache; the window's layer is registered beside it."""
    window = WindowCache(f"{attention.layer_name}.window", layout)
    attention.__class__ = PackedAttention  # a second MLAAttention would be a duplicate
    attention.window = window
    attention.impl.bind(attention.layer_name, window)
    return window


class QuantMLAWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's layer; its cache is packed if the engine was started so, else nothing differs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = get_current_vllm_config()
        layout = requested_layout(config)
        if layout is not None:
            from quantmla.serve.vllm.prefill import choose_prefill  # needs a GPU

            choose_prefill(config)
        super().__init__(*args, **kwargs)
        if layout is not None:
            require_interleaved(self.rotary_emb)
            pack_cache(self.mla_attn, layout)
