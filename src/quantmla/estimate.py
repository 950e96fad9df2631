"""What a cache will take, from a model's config alone.

All sizes are bytes of the key-value cache: weights, workspaces and an engine's own tables are not
counted. MLA caches one latent and one rope key per token and layer, whatever the number of heads.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from quantmla.arch import adapter_for
from quantmla.checkpoint.config import LAYERS
from quantmla.errors import UnsupportedModel, UsageError, require
from quantmla.manifest import CONFIG_KEY, read_manifest
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.quant.layout import bf16_row_bytes, layout_for
from quantmla.quant.mixed import ModelFormat, format_from_json, require_layers, uniform_format
from quantmla.serve.capacity import Capacity, capacity
from quantmla.serve.settings import why_not_served
from quantmla.serve.vllm.pool import pool_layout

UNITS = {"": 1}
UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
UNITS |= {p: 1024 ** (i + 1) for i, p in enumerate("KMGT")}  # as most tools read a bare letter
UNITS["B"] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the cache must hold."""

    context: int = 131_072  # tokens per request
    batch: int = 1  # requests
    budget: int | None = None  # bytes for the cache

    def __post_init__(self) -> None:
        require(self.context >= 1, f"context {self.context} must be at least 1 token", UsageError)
        require(self.batch >= 1, f"batch {self.batch} must be at least 1 request", UsageError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes, except where the name says otherwise."""

    format: str
    cached_layers: int
    page_size: int  # tokens
    page_bytes: int | None  # of one layer; None where layers differ
    bytes_per_token_and_layer: float  # mean over the layers
    bytes_per_token: float
    bf16_bytes_per_token: int
    context: int  # tokens
    batch: int  # requests
    request_bytes: int  # packed pages, bf16 window and sinks of one request
    total_bytes: int
    bf16_total_bytes: int
    ratio: float  # bf16 to packed, window included
    budget: int | None = None
    tokens_in_budget: int | None = None  # packed
    bf16_tokens_in_budget: int | None = None
    concurrency: int | None = None  # requests of `context` tokens
    bf16_concurrency: int | None = None
    # as vLLM counts, its blocks and its windows included; {"not_served": reason} where it cannot
    vllm: Capacity | dict[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_size(text: str) -> int:
    """`141GiB`, `80GB`, `24G` (binary) or plain bytes, to bytes."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): size for unit, size in UNITS.items()}
    known = match is not None and match[2].lower() in units
    require(
        known,
        f"memory size {text!r} is not a number with a unit of GiB, GB, G, MiB, MB, TiB or TB, "
        "for example 141GiB",
        UsageError,
    )
    assert match is not None
    size = int(Decimal(match[1]) * units[match[2].lower()])  # exact, as a float is not
    require(size > 0, f"memory size {text!r} must be more than 0", UsageError)
    return size


def request_bytes(fmt: CacheFormat, context: int, page_bytes: int, row_bytes: int) -> int:
    """One layer of one request: packed pages, the bf16 window, and the sinks older than it."""
    first_recent = fmt.first_recent(context)
    pages = -(-first_recent // fmt.page_size)
    rows = context - first_recent + min(fmt.num_sink_tokens, first_recent)
    return pages * page_bytes + rows * row_bytes


def cached_layers(config: Mapping[str, Any]) -> list[int]:
    """Cache indices of the latent attentions that ordinary generation runs: no MTP layers."""
    adapter = adapter_for(config)
    text = adapter.text_config(config)
    if not adapter.every_layer:  # a hybrid: its other layers keep a state of fixed size
        layers = (text.get("linear_attn_config") or {}).get("full_attn_layers")
        require(
            layers is not None,
            "config.json has no linear_attn_config.full_attn_layers: which layers have latent "
            "attention cannot be told from the config alone",
            UnsupportedModel,
        )
        assert layers is not None
        main = adapter.num_layers(config)
        require(
            LAYERS.fits(layers) and max(layers) <= main,
            f"config.json gives linear_attn_config.full_attn_layers = {layers!r:.80}; they must be "
            f"{LAYERS.words} and at most {main}, the number of layers",
            UnsupportedModel,
        )
        return [layer - 1 for layer in layers]  # the config counts from 1
    return list(range(adapter.num_layers(config) * adapter.attentions_per_layer))


def recorded_format(config: Mapping[str, Any], model: str) -> ModelFormat | None:
    """The format that a fused checkpoint was made for; None for any other model's config."""
    if CONFIG_KEY not in config:
        return None
    return format_from_json(read_manifest(config, model)["format"])


def chosen_format(config: Mapping[str, Any], model: str, name: str | None) -> ModelFormat:
    """The format of that name; without one the recorded format, and c4r4 where there is none."""
    recorded = recorded_format(config, model)
    if name is None and recorded is not None:
        return recorded
    return parse_format("c4r4" if name is None else name)


def estimate(config: Mapping[str, Any], fmt: ModelFormat, load: Workload) -> Estimate:
    """Sizes of the cache of the model that `config` (its config.json) describes.

    UnsupportedModel where the model has no latent attention that we handle.
    """
    geometry, indices = adapter_for(config).geometry(config), cached_layers(config)
    require_layers(fmt, indices)
    formats = [fmt.for_layer(index) for index in indices]
    pages = [layout_for(geometry, one).page_bytes for one in formats]
    layers = len(indices)
    row = bf16_row_bytes(geometry.kv_lora_rank, geometry.qk_rope_head_dim)
    request = sum(
        request_bytes(one, load.context, page, row)
        for one, page in zip(formats, pages, strict=True)
    )
    bf16_request = layers * load.context * row
    per_token = sum(pages) / fmt.page_size
    return Estimate(
        format=fmt.name,
        cached_layers=layers,
        page_size=fmt.page_size,
        page_bytes=pages[0] if len(set(pages)) == 1 else None,
        bytes_per_token_and_layer=per_token / layers,
        bytes_per_token=per_token,
        bf16_bytes_per_token=layers * row,
        context=load.context,
        batch=load.batch,
        request_bytes=request,
        total_bytes=load.batch * request,
        bf16_total_bytes=load.batch * bf16_request,
        ratio=bf16_request / request,
        budget=load.budget,
        tokens_in_budget=None if load.budget is None else int(load.budget // per_token),
        bf16_tokens_in_budget=None if load.budget is None else load.budget // (layers * row),
        concurrency=None if load.budget is None else load.budget // request,
        bf16_concurrency=None if load.budget is None else load.budget // bf16_request,
        vllm=None if load.budget is None else _in_vllm(config, fmt, load.context, load.budget),
    )


def _in_vllm(
    config: Mapping[str, Any], model_format: ModelFormat, context: int, budget: int
) -> Capacity | dict[str, str]:
    """What fits; where `quantmla serve` or its plugin would refuse the model, the reason."""
    adapter, fmt = adapter_for(config), uniform_format(model_format)
    g, reason = adapter.geometry(config), why_not_served(config, adapter.model_type, model_format)
    if reason is not None:
        return {"not_served": f"the model {reason}"}
    assert fmt is not None
    try:
        layout = pool_layout(fmt, g.kv_lora_rank, g.qk_rope_head_dim)
    except UsageError as error:
        return {"not_served": str(error)}
    return capacity(
        layout,
        layers=len(cached_layers(config)),
        row_bytes=bf16_row_bytes(g.kv_lora_rank, g.qk_rope_head_dim),
        budget=budget,
        context=context,
    )
