"""Every name that the plugin takes from vLLM: what another release changes is changed here.

Written for the releases in RELEASES. From 0.33 on a backend can size its pages itself
(`customize_spec`) and name its own cache dtype (`register_kv_cache_dtype`): then the class of
`mla_attn` need not be replaced (layer.py) and CUSTOM need not stand for one backend. One name more
is taken in prefill.py, whose module in vLLM needs a GPU to be imported.
"""

from vllm import __version__
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.registry import (
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

RELEASES = ("0.26",)

__all__ = [
    "RELEASES",
    "AttentionBackend",
    "AttentionBackendEnum",
    "AttentionCGSupport",
    "AttentionLayerBase",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "KVCacheSpecRegistry",
    "MLAAttention",
    "MLAAttentionSpec",
    "MLACommonBackend",
    "MLACommonImpl",
    "MLACommonMetadata",
    "MLACommonMetadataBuilder",
    "MLADimensions",
    "MLAPrefillBackendEnum",
    "MultiHeadLatentAttentionWrapper",
    "MultipleOf",
    "PluggableLayer",
    "QueryLenSupport",
    "SlidingWindowMLASpec",
    "SlidingWindowManager",
    "VllmConfig",
    "__version__",
    "current_platform",
    "get_current_vllm_config",
    "get_forward_context",
    "init_logger",
    "is_breakable_cudagraph_enabled",
    "merge_attn_states",
    "register_backend",
    "register_mla_prefill_backend",
    "resolve_block_hashes",
]
