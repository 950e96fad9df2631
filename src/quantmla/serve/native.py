"""`native_cache`: generation of transformers that attends to packed pages with the kernels.

    cache = native_cache(model, parse_format("c4r4"), inputs["attention_mask"])
    model.generate(**inputs, past_key_values=cache)

No bf16 copy of the cache is made in a step of generation: new rows are appended by a kernel, the
model's queries are taken into latent space by the key half of `kv_b_proj`, decode attention reads
packed pages, and its latent output leaves through the value half. This needs the attention
implementation "quantmla", which `native_cache` sets; for every other cache, and for prompts, it is
"sdpa". A prompt, or a part of one, is attended to as transformers does: its own tokens in bf16,
tokens before it as `gather` reads them.

B sequences, N heads, S new tokens, P content head dim, E rope head dim, V value head dim, R rank.
"""

import threading
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from quantmla.errors import UnsupportedModel, UsageError, require
from quantmla.kernels.api import choose
from quantmla.kernels.problem import DecodeQuery, Operation, Problem, platform_of
from quantmla.mla.rope import to_interleaved
from quantmla.quant.format import CacheFormat
from quantmla.serve.pool import PagePool
from quantmla.serve.transformers import QuantMLACache, QuantMLALayer

ATTENTION = "quantmla"
MOST_QUERIES = 8  # new tokens that are decoded; more are a part of a prompt


class _Handover(threading.local):
    """The layer whose `update` was called last: the attention that follows is its own."""

    layer: "NativeLayer | None" = None


_handover = _Handover()


class NativeLayer(QuantMLALayer):
    """One latent attention's cache in pools; what `update` returns is for `attend` alone."""

    backend = "auto"
    paged: PagePool | None  # type: ignore[assignment]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        rank, rope = key_states.shape[-1], value_states.shape[-1]
        batch, device = key_states.shape[0], key_states.device
        self.paged = PagePool(self.fmt, rank, rope, batch, device, self.backend)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Caches latents [B, 1, S, R] and rope keys [B, 1, S, E].

        Of at most MOST_QUERIES tokens it returns them alone, and leaves attention to `attend`;
        of more, the whole context.
        """
        latent, k_rope, counts = self._rows(key_states, value_states, kwargs)
        assert self.paged is not None
        dtype, size = key_states.dtype, key_states.shape[2]
        few = size <= MOST_QUERIES
        before = self._read(dtype) if self.seen and not few else None
        if few:
            self._hand_over()
        self.paged.append(latent, to_interleaved(k_rope, self.rope_order).contiguous(), counts)
        self.seen += size
        new = latent[:, None].to(dtype), k_rope[:, None].to(dtype)
        if before is None:
            return new
        return torch.cat((before[0], new[0]), dim=2), torch.cat((before[1], new[1]), dim=2)

    def _hand_over(self) -> None:
        waiting, _handover.layer = _handover.layer, self
        if waiting is not None:
            _handover.layer = None
            raise UsageError(
                f"the model's attention implementation is not {ATTENTION!r}, so nothing attended "
                "to the native cache: make it with native_cache(model, ...) of the same model"
            )

    def attend(self, module: torch.nn.Module, query_BNSD: Tensor, scaling: float) -> Tensor:
        """Attention of the last S tokens over all that is cached, [B, S, N, V]."""
        assert self.paged is not None
        heads, rope = query_BNSD.shape[1], self.paged.qk_rope_head_dim
        content_BNSP, q_rope_BNSE = query_BNSD.split((query_BNSD.shape[-1] - rope, rope), dim=-1)
        w_uk_NPR, w_uv_NVR = _absorbed(module, heads, content_BNSP.shape[-1])
        dtype = torch.bfloat16 if query_BNSD.is_cuda else query_BNSD.dtype
        latent_BSNR = torch.einsum("bnsp,npr->bsnr", content_BNSP, w_uk_NPR).to(dtype)
        q_rope_BSNE = to_interleaved(q_rope_BNSE, self.rope_order).transpose(1, 2).to(dtype)
        query = DecodeQuery(latent_BSNR, q_rope_BSNE.contiguous(), scaling)
        out_BSNR = self.paged.decode(query).out_BSNR.to(query_BNSD.dtype)
        return torch.einsum("bsnr,nvr->bsnv", out_BSNR, w_uv_NVR).contiguous()


def _absorbed(module: torch.nn.Module, heads: int, content_dim: int) -> tuple[Tensor, Tensor]:
    """The key and value halves of `kv_b_proj`, [N, P, R] and [N, V, R]: views, no copies."""
    linear = module.kv_b_proj
    require(
        isinstance(linear, torch.nn.Linear)
        and linear.bias is None
        and linear.weight.dtype.itemsize > 1,
        f"kv_b_proj is {linear}, not a torch.nn.Linear of 16 bits or more without bias: "
        "native attention cannot absorb it",
        UnsupportedModel,
    )
    assert isinstance(linear, torch.nn.Linear)
    weight_NXR = linear.weight.unflatten(0, (heads, -1))
    return weight_NXR[:, :content_dim], weight_NXR[:, content_dim:]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention implementation "quantmla": a native layer's own, else "sdpa"."""
    layer, _handover.layer = _handover.layer, None
    if layer is None:
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    return layer.attend(module, query, kwargs["scaling"]), None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def native_cache(
    model: Any,
    fmt: CacheFormat | None = None,
    attention_mask: Tensor | None = None,
    backend: str = "auto",
    skip_layers: Sequence[int] = (),
) -> QuantMLACache:
    """A cache for `model.generate`, and the model set to attend to it with a backend's kernels.

    `fmt` None: what the fused checkpoint's config.json says, its skipped layers included. "auto" is
    the first backend that can, on a GPU never the reference; raises UsageError with the reasons of
    all if none can, or of the named one. Everything that `QuantMLACache` does works, but for `crop`
    beyond the window's pages. New tokens of a step of 2 to 8 see packed what its last one does.
    """
    require(
        isinstance(model, torch.nn.Module) and hasattr(model, "config"),
        f"the model is {type(model).__name__} {model!r:.80}: give a loaded model of transformers",
        UsageError,
    )
    config = model.config
    cache = (
        QuantMLACache.from_config(config, attention_mask)
        if fmt is None
        else QuantMLACache(config, fmt, attention_mask, skip_layers=skip_layers)
    )
    packed = [i for i, layer in enumerate(cache.layers) if isinstance(layer, QuantMLALayer)]
    for operation in get_args(Operation):
        for fmt_used in {cache.layers[i].fmt for i in packed}:
            choose(_problem(operation, model, fmt_used), backend)
    for i in packed:
        stock = cache.layers[i]
        cache.layers[i] = NativeLayer(stock.fmt, stock.rope_order, stock.padding, stock.mask_width)
        cache.layers[i].backend = backend
    _handover.layer = None
    model.set_attn_implementation(ATTENTION)
    return cache


def _problem(operation: Operation, model: Any, fmt: CacheFormat) -> Problem:
    text = model.config.get_text_config(decoder=True)
    require(
        fmt.recent_window is not None,
        "an unprotected cache format (recent_window None) is for evaluation only, without kernels",
        UsageError,
    )
    platform, capability = platform_of(model.device)
    return Problem(
        operation=operation,
        platform=platform,
        capability=capability,
        dtype=torch.bfloat16,
        fmt=fmt,
        kv_lora_rank=text.kv_lora_rank,
        qk_rope_head_dim=text.qk_rope_head_dim,
        window_page_size=fmt.page_size,
        num_heads=text.num_attention_heads,
        query_len=1,
    )
