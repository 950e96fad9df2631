"""`QuantMLACache`: the packed latent cache as a `Cache` of transformers (5.15 and later).

    cache = QuantMLACache(model.config, parse_format("c4r4"), inputs["attention_mask"])
    model.generate(**inputs, past_key_values=cache)

What attention sees: in a step of one token, every key as decode reads it (docs/flow.md). In a step
of several tokens (a prompt, a part of one, drafts under verification) the new tokens see one
another in bf16, and what was cached before as decode read it. Rows of a float32 model are
rounded to bf16 when they are cached, because that is what the window holds; everything is returned
in the model's dtype. B sequences, S new tokens, R latent channels, E rope channels.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from quantmla.cache.paged import PagedCache
from quantmla.errors import UnsupportedModel, UsageError, require
from quantmla.mla.rope import RopeOrder, from_interleaved, to_interleaved
from quantmla.quant.format import CacheFormat
from quantmla.quant.mixed import ModelFormat, distinct_formats, require_layers
from quantmla.quant.page import require_byte_layout
from quantmla.serve.families import cached_rope_order
from quantmla.serve.padding import check_positions, left_padding
from quantmla.serve.settings import cache_settings


class QuantMLALayer(CacheLayerMixin):
    """One latent attention's packed cache; every row's pages begin at its first real token."""

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        fmt: CacheFormat,
        rope_order: RopeOrder,
        padding: Sequence[int] | None = None,
        mask_width: int = 0,
    ):
        super().__init__()
        self.fmt, self.rope_order = fmt, rope_order
        self.padding = None if padding is None else list(padding)
        self.mask_width = mask_width  # tokens of the mask that tells the padding; 0 without one
        self.paged: PagedCache | None = None
        self.seen = 0  # tokens of the batch, padding included
        self.record_past = False
        self.decode_tokens = 1  # steps of up to so many tokens read the cache as decode does

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch = key_states.shape[0]
        require(batch > 0, "a batch of 0 sequences cannot be cached", UsageError)
        rows = self.padding if self.padding is not None else [0] * batch
        require(
            batch % len(rows) == 0,
            f"attention_mask has {len(rows)} rows, which do not divide the batch of {batch}",
            UsageError,
        )
        # beams and num_return_sequences repeat each row in place
        self.padding = [p for p in rows for _ in range(batch // len(rows))]
        latent_rank, rope_dim = key_states.shape[-1], value_states.shape[-1]
        self.paged = self.new_pages(latent_rank, rope_dim, batch, key_states.device)
        self.is_initialized = True

    def new_pages(
        self, latent_rank: int, rope_dim: int, batch: int, device: torch.device
    ) -> PagedCache:
        """What this layer's rows are kept in."""
        return PagedCache(self.fmt, latent_rank, rope_dim, batch, device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Caches latents [B, 1, S, R] and rope keys [B, 1, S, E]; returns the whole context so."""
        latent, k_rope, counts = self._rows(key_states, value_states, kwargs)
        assert self.paged is not None
        dtype, size = key_states.dtype, key_states.shape[2]
        before = self._read(dtype) if size > self.decode_tokens else None
        self.paged.keep_past = self.record_past
        self.paged.append(latent, to_interleaved(k_rope, self.rope_order), counts)
        self.seen += size
        if before is None:
            return self._read(dtype)
        return (
            torch.cat((before[0], latent[:, None].to(dtype)), dim=2),
            torch.cat((before[1], k_rope[:, None].to(dtype)), dim=2),
        )

    def _rows(
        self, key_states: Tensor, value_states: Tensor, kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, list[int]]:
        """A call's rows in bf16, [B, S, R] and [B, S, E], and how many of each are no padding."""
        check_states(key_states, value_states)
        size = key_states.shape[2]
        if not self.is_initialized:
            # drafts may follow the prompt at once: then past rows are being recorded
            require(
                size <= self.mask_width or self.mask_width == 0 or self.record_past,
                f"attention_mask has {self.mask_width} columns, the prompt {size} tokens: give "
                "QuantMLACache the whole mask of the prompt",
                UsageError,
            )
            self.lazy_initialization(key_states, value_states)
        assert self.padding is not None
        self._check_prompt(size, kwargs)
        counts = [min(size, max(0, self.seen + size - p)) for p in self.padding]
        latent, k_rope = key_states[:, 0], value_states[:, 0]
        return latent.to(torch.bfloat16), k_rope.to(torch.bfloat16), counts

    def _read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All that was seen, [B, 1, T, R] and [B, 1, T, E]; zeros at padding."""
        assert self.paged is not None
        latent, k_rope = self.paged.read()
        missing = self.seen - latent.shape[1]  # a whole batch that begins with padding
        latent, k_rope = (torch.nn.functional.pad(x, (0, 0, missing, 0)) for x in (latent, k_rope))
        return latent[:, None].to(dtype), from_interleaved(k_rope, self.rope_order)[:, None].to(
            dtype
        )

    def _check_prompt(self, size: int, kwargs: Mapping[str, Any]) -> None:
        """The mask is that of the prompt, of which `size` tokens come now."""
        assert self.padding is not None
        if self.seen and self.seen >= self.mask_width:
            return
        positions = kwargs.get("kwargs", kwargs).get("position_ids")
        check_positions(positions, self.padding, self.seen, size, self.mask_width > 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """From now on bf16 rows of packed tokens stay until the next crop, which may need them."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back -n tokens for n < 0; n > 0 is the length to keep, as older releases say."""
        asked = _whole(tokens_to_remove, "the tokens to crop are")  # or a tensor's one element
        removed = -asked if asked <= 0 else max(0, self.seen - asked)
        require(removed <= self.seen, f"cannot crop {removed} of {self.seen} tokens", UsageError)
        if self.paged is not None:
            self.paged.crop(removed)
            self.seen -= removed

    def reset(self) -> None:
        """Forgets every token; the left padding stays that of the mask given at construction."""
        self.seen = 0
        if self.paged is not None:
            self.paged.clear()

    def _select(self, indices: Any) -> None:
        if self.paged is None or self.padding is None:
            return
        batch = len(self.padding)
        try:
            chosen = torch.arange(batch)[torch.as_tensor(indices).cpu()].reshape(-1).tolist()
        except (IndexError, TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"sequences {indices!r:.80} cannot be selected from a batch of {batch}"
            ) from None
        self.paged.select(chosen)
        self.padding = [self.padding[i] for i in chosen]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        times = _whole(repeats, "the repeats of a batch are")
        require(times > 0, f"the repeats of a batch are {times}, not at least 1", UsageError)
        if self.padding is not None:
            self._select([i for i in range(len(self.padding)) for _ in range(times)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def offload(self) -> None:
        raise UsageError("QuantMLACache is not offloaded: its pages stay on the model's device")

    prefetch = offload

    def allocated_bytes(self) -> int:
        """Memory that this layer's tokens take: pages, window and sinks."""
        return 0 if self.paged is None else self.paged.allocated_bytes()


def _whole(value: Any, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{what} {value!r:.80}, not a whole number") from None


def check_states(key_states: Tensor, value_states: Tensor) -> None:
    for name, x in (("latent", key_states), ("rope key", value_states)):
        require(
            x.dtype in (torch.bfloat16, torch.float32, torch.float64),
            f"the {name} is {x.dtype}; QuantMLACache takes models in torch.bfloat16, torch.float32 "
            "or torch.float64",
            UsageError,
        )
        require(
            x.ndim == 4 and x.shape[1] == 1,
            f"the {name} has shape {tuple(x.shape)}, not [batch, 1, tokens, channels]: "
            "this transformers release does not cache latents; 5.15 or later is needed",
            UnsupportedModel,
        )


def require_config(config: Any) -> None:
    require(
        hasattr(config, "get_text_config"),
        f"the model's config is {type(config).__name__} {config!r:.80}: give model.config",
        UsageError,
    )


class QuantMLACache(Cache):
    """A packed cache for every latent attention of a model, stock layers for all others.

    Give `attention_mask` when the batch is left-padded: sinks and pages are counted from each row's
    first real token. `rope_order` is that of the rope keys the model hands over, by default its
    family's. Layers in `skip_layers` keep the stock bf16 cache. Beam search, assisted generation,
    several turns over one cache and `reset` work; offloading and compilation do not.
    """

    def __init__(
        self,
        config: Any,
        fmt: ModelFormat,
        attention_mask: Tensor | None = None,
        rope_order: RopeOrder | None = None,
        skip_layers: Sequence[int] = (),
    ):
        for one in distinct_formats(fmt):
            require_byte_layout(one)
        require_config(config)
        text = config.get_text_config(decoder=True)
        require(
            getattr(text, "kv_lora_rank", None) is not None,
            f"model_type {text.model_type!r} has no kv_lora_rank: it has no latent attention",
            UnsupportedModel,
        )
        order = rope_order or cached_rope_order(text)
        require(
            order in get_args(RopeOrder),
            f"rope_order {order!r} is not one of {get_args(RopeOrder)}",
            UsageError,
        )
        padding = left_padding(attention_mask)
        width = 0 if attention_mask is None else attention_mask.shape[1]
        stock = DynamicCache(config=text).layers
        sparse = [i for i, layer in enumerate(stock) if hasattr(layer, "update_indexer")]
        require(
            not sparse,
            f"layers {sparse} select keys by an indexer, which is not handled",
            UnsupportedModel,
        )
        require(
            isinstance(skip_layers, Collection) and all(type(i) is int for i in skip_layers),
            f"skip_layers is {skip_layers!r:.80}, not a list of layers' numbers",
            UsageError,
        )
        unknown = sorted(set(skip_layers) - set(range(len(stock))))
        require(
            not unknown,
            f"skip_layers {unknown} do not exist; the model has {len(stock)}",
            UsageError,
        )
        require_layers(fmt, range(len(stock)))
        super().__init__(
            layers=[
                QuantMLALayer(fmt.for_layer(i), order, padding, width)
                if type(layer) is DynamicLayer and i not in skip_layers
                else layer
                for i, layer in enumerate(stock)
            ]
        )

    @classmethod
    def from_config(cls, config: Any, attention_mask: Tensor | None = None) -> "QuantMLACache":
        """The cache that a fused checkpoint's own config.json asks for under `quantmla_config`."""
        require_config(config)
        settings = cache_settings(config)
        return cls(config, settings.fmt, attention_mask, skip_layers=settings.ignored_layers)

    def allocated_bytes(self) -> int:
        """Memory of all packed layers."""
        return sum(
            layer.allocated_bytes() for layer in self.layers if isinstance(layer, QuantMLALayer)
        )
