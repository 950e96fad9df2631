"""The softmax scale as transformers >= 5.15 computes it."""

import math
from collections.abc import Mapping
from typing import Any

from quantmla.checkpoint.config import is_positive, shown
from quantmla.errors import UnsupportedModel, require


def rope_parameters(text_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rope settings of new configs (`rope_parameters`) and of old ones (`rope_scaling`)."""
    return text_config.get("rope_scaling") or text_config.get("rope_parameters") or {}


def softmax_scale(head_dim: int, rope: Mapping[str, Any]) -> float:
    """head_dim ** -0.5, times YaRN's mscale squared where the config gives mscale_all_dim."""
    scale = head_dim**-0.5
    kind = rope.get("rope_type", rope.get("type", "default"))
    all_dim = rope.get("mscale_all_dim", 0)
    if kind == "default" or not all_dim:
        return scale
    factor = rope.get("factor")
    require(
        all(is_positive(x) for x in (factor, all_dim)),
        f"config.json gives rope scaling {kind!r} with factor {shown(factor)} and mscale_all_dim "
        f"{shown(all_dim)}; both must be positive numbers",
        UnsupportedModel,
    )
    assert factor is not None
    mscale = 0.1 * float(all_dim) * math.log(factor) + 1.0 if factor > 1 else 1.0
    require(
        math.isfinite(mscale * mscale),
        f"config.json gives mscale_all_dim {all_dim!r}, which makes the softmax scale infinite: "
        "published ones are about 1",
        UnsupportedModel,
    )
    return scale * mscale * mscale
