"""From a config.json to the adapter of its family."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantmla.arch.adapter import Adapter
from quantmla.arch.families import FAMILIES, REFUSED, WRAPPERS
from quantmla.errors import UnsupportedModel, require


def adapter_for(config: Mapping[str, Any]) -> Adapter:
    """The adapter of a config.json; raises UnsupportedModel with the reason when there is none."""
    outer = config.get("model_type")
    text = config.get("text_config") if outer in WRAPPERS else config
    require(
        isinstance(text, Mapping),
        f"config.json has model_type {outer!r} but no text_config",
        UnsupportedModel,
    )
    assert isinstance(text, Mapping)
    kind = text.get("model_type")
    for name in (outer, kind):
        require(
            name not in REFUSED,
            f"{name} is not supported: {REFUSED.get(str(name))}",
            UnsupportedModel,
        )
    latent = f"{kind} has no latent attention (config.json has no kv_lora_rank)"
    require(kind in FAMILIES or bool(text.get("kv_lora_rank")), latent, UnsupportedModel)
    require(
        kind in FAMILIES,
        f"model_type {kind!r} is not known; supported: {', '.join(sorted((*FAMILIES, *WRAPPERS)))}",
        UnsupportedModel,
    )
    adapter = FAMILIES[str(kind)]
    if adapter.follows_rope_interleave and text.get("rope_interleave", True) is False:
        return replace(adapter, weight_rope_order="half")
    return adapter
