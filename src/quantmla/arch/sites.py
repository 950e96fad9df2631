"""Which attentions a checkpoint has, held against the layers that its config.json speaks of."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quantmla.checkpoint.config import is_count, shown
from quantmla.errors import UnsupportedModel, require

DOWN = ".kv_a_proj_with_mqa.weight"  # a tensor that latent attention has and nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSite:
    """One latent attention of the checkpoint."""

    prefix: str  # of its tensors, such as "model.layers.3.self_attn"
    layer: int  # decoder layer
    cache_index: int  # the index that transformers passes to cache.update; MTP layers count on
    mtp: bool = False  # a multi-token-prediction layer, which ordinary generation does not run


def mtp_layers(text: Mapping[str, Any]) -> int:
    """How many layers of multi-token prediction the config speaks of."""
    key = "num_nextn_predict_layers"
    found = text.get(key)
    require(
        found is None or is_count(found, 0),
        f"config.json gives {key} = {shown(found)}; a whole number of at least 0 is needed",
        UnsupportedModel,
    )
    return found or 0


def require_every(found: Iterable[AttentionSite], main: int, per_layer: int) -> None:
    """Each of the `main` layers that ordinary generation runs has its attentions."""
    present = {site.cache_index for site in found if not site.mtp}
    absent = tuple(islice((i for i in range(main * per_layer) if i not in present), 8))
    require(
        not absent,
        f"config.json says {main} layers, but there is no *{DOWN} for cache index "
        f"{', '.join(map(str, absent))}",
        UnsupportedModel,
    )


def require_spoken_of(found: Iterable[AttentionSite], text: Mapping[str, Any], main: int) -> None:
    """No layer lies beyond those of generation and of multi-token prediction: it would not run."""
    extra = mtp_layers(text)
    for site in found:  # MTP layers under a root of their own are numbered from 0 again
        require(
            site.layer < main + extra,
            f"the checkpoint has {site.prefix}, but config.json says {main} layers and "
            f"{extra} for multi-token prediction (num_nextn_predict_layers)",
            UnsupportedModel,
        )
