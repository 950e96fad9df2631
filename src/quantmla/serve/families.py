"""In which order each family of transformers hands its rope keys to the cache."""

from typing import Any

from quantmla.errors import UnsupportedModel, require
from quantmla.mla.rope import RopeOrder

# deepseek_v2 rotates complex pairs in place; the others de-interleave (or never interleave) first
CACHED_ROPE_ORDER: dict[str, RopeOrder] = {
    "deepseek_v2": "interleaved",
    "deepseek_v3": "half",
    "kimi_k2": "half",  # deepseek_v3's classes; vLLM names those so once it has met one
    "glm4_moe_lite": "half",
    "longcat_flash": "half",
    "minicpm3": "half",
    "youtu": "half",
    "mistral4": "half",
    "axk1": "half",
    "kimi_linear": "interleaved",  # not rotated: pairs are as the weights have them
}


def cached_rope_order(config: Any) -> RopeOrder:
    """Order of the rope channels that a model with this transformers config caches."""
    model_type = getattr(config, "model_type", None)
    require(
        model_type in CACHED_ROPE_ORDER,
        f"model_type {model_type!r}: the order of its cached rope channels is unknown; "
        f"pass rope_order, or use one of {sorted(CACHED_ROPE_ORDER)}",
        UnsupportedModel,
    )
    return CACHED_ROPE_ORDER[str(model_type)]
