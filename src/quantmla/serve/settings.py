"""What a fused checkpoint's config.json says to the engines that serve it, and what vLLM serves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantmla.errors import UsageError, require
from quantmla.quant.mixed import ModelFormat, format_from_json, uniform_format

CONFIG_KEY = "quantmla_config"
CONFIG_VERSION = 1
# model types of vLLM's latent attentions that the plugin was written for
SERVED_FAMILIES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "longcat_flash")
SERVED_FORMATS = ("c4r4", "c2r4")
CACHE_DTYPES = ("auto", "bfloat16")  # vLLM's name of the cache's type; the format says what it is
DRAFTERS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")  # without a latent cache
MAX_DRAFTS = 15  # tokens of a request that one step may take back
TIED_HEAD = (
    "ties its head to its embeddings (tie_word_embeddings in config.json), and vLLM's classes of "
    "these models do not load that, with or without quantmla"
)
NOT_COMPILED = ("longcat_flash",)  # by vllm 0.26.0, whatever the cache: its zero experts


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """How the caches of a checkpoint are stored."""

    fmt: ModelFormat
    ignored_layers: tuple[int, ...]  # indices of the caches that stay in bf16


def why_not_served(config: Mapping[str, Any], family: str, fmt: ModelFormat) -> str | None:
    """Why vLLM does not serve a model of this config.json with a cache in `fmt`, or None.

    The rest of a sentence that begins with the model's name.
    """
    one, ignored = uniform_format(fmt), list(_ignored(config.get(CONFIG_KEY) or {}))
    if family not in SERVED_FAMILIES:
        return f"is a {family}, and the plugin serves {', '.join(SERVED_FAMILIES)}"
    if ignored:
        return f"keeps layers {ignored} in bf16, which the plugin does not handle"
    if one is None:
        return "gives layers formats of their own, which vLLM's one pool of pages cannot hold"
    if one.name not in SERVED_FORMATS:
        kernels = " and ".join(SERVED_FORMATS)
        return f"has a cache in {one.name}, and the GPU kernels read {kernels}"
    if config.get("tie_word_embeddings") is True:
        return TIED_HEAD
    return None


def cache_settings(config: Any) -> CacheSettings:
    """Settings under `quantmla_config` of a transformers config.

    UsageError where there are none, or of another version.
    """
    data = getattr(config, CONFIG_KEY, None)
    require(
        isinstance(data, Mapping),
        f"config.json has no {CONFIG_KEY}: the model is not fused",
        UsageError,
    )
    assert isinstance(data, Mapping)
    require(
        data.get("version") == CONFIG_VERSION,
        f"{CONFIG_KEY} version {data.get('version')!r} is not {CONFIG_VERSION}, "
        "the one this release reads",
        UsageError,
    )
    return CacheSettings(fmt=format_from_json(data.get("format")), ignored_layers=_ignored(data))


def _ignored(data: Mapping[str, Any]) -> tuple[int, ...]:
    found = data.get("ignored_layers", ())
    require(
        isinstance(found, list | tuple) and all(type(index) is int for index in found),
        f"ignored_layers of {CONFIG_KEY} are {found!r}, not indices of layers",
        UsageError,
    )
    return tuple(found)
