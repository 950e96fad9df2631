"""One adapter per family of models with Multi-head Latent Attention: `adapter_for(config)`."""

from quantmla.arch.adapter import Adapter, AttentionSite, QueryDown
from quantmla.arch.families import FAMILIES, REFUSED, WRAPPERS
from quantmla.arch.lookup import adapter_for

__all__ = [
    "FAMILIES",
    "REFUSED",
    "WRAPPERS",
    "Adapter",
    "AttentionSite",
    "QueryDown",
    "adapter_for",
]
