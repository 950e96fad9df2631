"""What the plugin refuses, each in one sentence that names the flag."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quantmla.errors import UnsupportedModel, UsageError, require
from quantmla.quant.format import CacheFormat
from quantmla.quant.mixed import describe, uniform_format
from quantmla.serve.settings import (
    CACHE_DTYPES,
    CONFIG_KEY,
    DRAFTERS,
    MAX_DRAFTS,
    NOT_COMPILED,
    SERVED_FAMILIES,
    TIED_HEAD,
    cache_settings,
)
from quantmla.serve.vllm.engine import (
    AttentionBackendEnum,
    VllmConfig,
    current_platform,
    is_breakable_cudagraph_enabled,
)
from quantmla.serve.vllm.pool import PoolLayout, pool_layout

LATENT_KIND = "mla_attention"  # vLLM's name in --attention-config, backend_per_kind


class Refusal(NamedTuple):
    """A setting that cannot be served."""

    applies: Callable[[VllmConfig], object]
    sentence: str  # formatted with the value that `applies` returned


def latent_backend(config: VllmConfig) -> Any:
    """That vLLM takes for latent attention: one for this kind of cache comes first."""
    attention = config.attention_config
    return attention.backend_per_kind.get(LATENT_KIND, attention.backend)


def _other_backend(config: VllmConfig) -> str | None:
    backend = latent_backend(config)
    return None if backend in (None, AttentionBackendEnum.CUSTOM) else str(backend.name)


def _drafter(config: VllmConfig) -> str | None:
    spec = config.speculative_config
    return None if spec is None or spec.method in DRAFTERS else str(spec.method)


def _too_many_drafts(config: VllmConfig) -> int | None:
    spec = config.speculative_config
    drafts = 0 if spec is None else spec.num_speculative_tokens or 0
    return drafts if drafts > MAX_DRAFTS else None


def _piecewise_update(config: VllmConfig) -> bool:
    """The cache update would be captured in a graph that knows no sequences.

    vLLM makes FULL_AND_PIECEWISE of FULL where attention is split off, as our backend declares full
    graphs for decode alone.
    """
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    in_pieces = mode.has_piecewise_cudagraphs() or (
        mode.mixed_mode().name == "FULL" and compilation.splitting_ops_contain_attention()
    )
    return bool(in_pieces and not compilation.splitting_ops_contain_kv_cache_update())


def _not_compiled(config: VllmConfig) -> str | None:
    family = str(config.model_config.hf_text_config.model_type)
    return family if family in NOT_COMPILED and not config.model_config.enforce_eager else None


def _other_gpu() -> str | None:
    """Compute capability of a CUDA GPU that is no Hopper; other platforms refuse CUSTOM."""
    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return None if found is None or found.to_int() == 90 else str(found.as_version_str())


def _other_than(allowed: tuple[Any, ...], value: Any) -> Any:
    return None if value in allowed else value


REFUSALS = (
    Refusal(
        _other_backend,
        f"--attention-config has backend {{}} for {LATENT_KIND}, and it reads no packed pages: "
        "use CUSTOM",
    ),
    Refusal(
        lambda c: _other_than(CACHE_DTYPES, c.cache_config.cache_dtype),
        "--kv-cache-dtype {!r} cannot be combined with a packed cache, whose format the "
        "checkpoint decides: leave it at 'auto'",
    ),
    Refusal(
        lambda c: _other_than((torch.bfloat16,), c.model_config.dtype),
        "--dtype {} is not torch.bfloat16, which the recent window holds",
    ),
    Refusal(
        lambda c: c.cache_config.kv_cache_dtype_skip_layers,
        "--kv-cache-dtype-skip-layers {} is not supported: every layer's cache is packed",
    ),
    Refusal(
        lambda c: c.cache_config.calculate_kv_scales,
        "--calculate-kv-scales is for fp8 caches and cannot be combined with a packed cache",
    ),
    Refusal(
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1
            and c.parallel_config.decode_context_parallel_size
        ),
        "--decode-context-parallel-size {} is not supported: use 1",
    ),
    Refusal(
        lambda c: (
            c.parallel_config.prefill_context_parallel_size > 1
            and c.parallel_config.prefill_context_parallel_size
        ),
        "--prefill-context-parallel-size {} is not supported: use 1",
    ),
    Refusal(
        lambda c: (
            c.parallel_config.pipeline_parallel_size > 1
            and c.parallel_config.pipeline_parallel_size
        ),
        "--pipeline-parallel-size {} was never tried with a packed cache: use "
        "--tensor-parallel-size",
    ),
    Refusal(
        lambda c: c.parallel_config.use_ubatching,
        "--enable-dbo and --ubatch-size split a batch and are not supported",
    ),
    Refusal(
        lambda c: c.model_config.enable_sleep_mode,
        "--enable-sleep-mode is not supported: what steps read beside the pages would be lost",
    ),
    Refusal(
        lambda c: c.scheduler_config.policy == "priority" and c.cache_config.enable_prefix_caching,
        "--scheduling-policy priority cannot be combined with prefix caching: vllm 0.26.0 reuses "
        "pages of a request that it preempted before they were computed; add "
        "--no-enable-prefix-caching",
    ),
    Refusal(
        lambda c: c.kv_transfer_config is not None,
        "--kv-transfer-config (a KV connector) and KV offloading are not supported",
    ),
    Refusal(
        lambda c: c.scheduler_config.disable_hybrid_kv_cache_manager,
        "--disable-hybrid-kv-cache-manager cannot be combined with a packed cache, whose bf16 "
        "window is a second group of the pool",
    ),
    Refusal(
        _drafter,
        "--speculative-config method {!r} keeps a cache of its own and is not supported: use one "
        f"of {DRAFTERS}",
    ),
    Refusal(
        _too_many_drafts,
        f"--speculative-config num_speculative_tokens {{}} is more than {MAX_DRAFTS}",
    ),
    Refusal(
        lambda c: c.compilation_config.pass_config.fuse_rope_kvcache_cat_mla,
        "--compilation-config pass_config.fuse_rope_kvcache_cat_mla would write bf16 rows into "
        "packed pages: set it to false",
    ),
    Refusal(
        _piecewise_update,
        "--compilation-config (splitting_ops, use_inductor_graph_partition) puts the cache's "
        "update into a piecewise CUDA graph: leave both out, or use cudagraph_mode "
        "FULL_DECODE_ONLY",
    ),
    Refusal(
        lambda c: is_breakable_cudagraph_enabled(),
        "breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH) are not supported",
    ),
    Refusal(
        lambda c: hasattr(c.model_config.hf_text_config, "index_topk"),
        "the model selects keys by an indexer (index_topk in config.json): sparse attention is "
        "not supported",
    ),
    Refusal(
        lambda c: c.model_config.is_hybrid,
        "the model has layers with a recurrent state beside latent attention, which is not "
        "supported",
    ),
    Refusal(
        lambda c: _other_than(SERVED_FAMILIES, c.model_config.hf_text_config.model_type),
        f"model_type {{!r}} in config.json is none of {', '.join(SERVED_FAMILIES)}",
    ),
    Refusal(
        _not_compiled,
        "vllm 0.26.0 cannot compile a {}, whatever its cache: add --enforce-eager",
    ),
    Refusal(
        lambda c: c.model_config.hf_config.tie_word_embeddings,
        f"the model {TIED_HEAD}",
    ),
    Refusal(
        lambda c: _other_gpu(),
        "the GPU has compute capability {}, and serving needs 9.0 (H100, H200)",
    ),
)


def why_not(config: VllmConfig) -> str | None:
    """The first setting in the way, as a sentence, or None."""
    for refusal in REFUSALS:
        value = refusal.applies(config)
        if value:
            return refusal.sentence.format(value)
    return None


def _require_window_of_drafts(fmt: CacheFormat, config: VllmConfig) -> None:
    """Drafts and the token before them are one query: kernels.problem."""
    spec = config.speculative_config
    drafts = 0 if spec is None else spec.num_speculative_tokens or 0
    require(
        fmt.recent_window is None or drafts <= fmt.recent_window,
        f"--speculative-config num_speculative_tokens {drafts} is more than the "
        f"{fmt.recent_window} tokens of {fmt.name}'s recent window",
        UsageError,
    )


def served_layout(config: VllmConfig) -> PoolLayout:
    """The pool layout of the checkpoint that is being started; refuses what cannot be served."""
    model = config.model_config
    require(
        hasattr(model.hf_config, CONFIG_KEY),
        f"--attention-backend CUSTOM (QuantMLA) needs a checkpoint that quantmla quantize wrote: "
        f"config.json of {model.model} has no {CONFIG_KEY}",
        UsageError,
    )
    reason = why_not(config)
    require(reason is None, f"QuantMLA in vLLM: {reason}", UsageError)
    settings = cache_settings(model.hf_config)
    require(
        not settings.ignored_layers,
        f"{CONFIG_KEY} leaves the caches of layers {list(settings.ignored_layers)} in bf16, "
        "which is not supported in vLLM: quantise every layer",
        UnsupportedModel,
    )
    fmt = uniform_format(settings.fmt)
    require(
        fmt is not None,
        f"{CONFIG_KEY} has a cache format for each layer, {describe(settings.fmt)}, "
        "which is not supported in vLLM: quantise with one format for all layers",
        UnsupportedModel,
    )
    assert fmt is not None
    _require_window_of_drafts(fmt, config)
    text, block_size = model.hf_text_config, config.cache_config.block_size
    layout = pool_layout(fmt, text.kv_lora_rank, text.qk_rope_head_dim)
    require(
        not config.cache_config.user_specified_block_size or block_size == fmt.page_size,
        f"--block-size {block_size} is not {fmt.page_size}, the tokens of a packed page: "
        "leave it out",
        UsageError,
    )
    return layout


def require_interleaved(rotary: Any) -> None:
    """Kernels take rope channels in pairs; a model that rotates halves would be misread."""
    require(
        rotary is not None and not rotary.is_neox_style,
        "the model's rotary embedding is not of interleaved pairs, which is not supported in vLLM",
        UnsupportedModel,
    )
