"""Teacher-forced evaluation: for every query at once, what decoding with the cache would have seen.

Inside `teacher_forced` one forward pass without a cache gives, at every position, the logits that
token-by-token decoding through the packed cache gives. Rows are rounded to bf16 first; then key k
is exact for the query at position q (q + 1 tokens cached) iff it is a sink or
k >= fmt.first_recent(q + 1), and otherwise as read back. Attention is then computed in float32
(float64 for float64 models).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantmla.errors import UnsupportedModel, UsageError, require
from quantmla.evaluate.mixed_attention import BothForms, attend
from quantmla.evaluate.stored import StoredCoordinates, coordinates
from quantmla.mla.rope import RopeOrder
from quantmla.quant.format import CacheFormat
from quantmla.quant.mixed import ModelFormat, require_layers
from quantmla.quant.roundtrip import read_content, read_rope
from quantmla.serve.families import cached_rope_order
from quantmla.transform.layer import LayerTransform

Transforms = Mapping[int, LayerTransform]


def latent_attentions(model: nn.Module) -> dict[int, nn.Module]:
    """Every latent attention by its cache index; refuses models that have none, or sparse ones."""
    found = {
        int(module.layer_idx): module  # type: ignore[arg-type]
        for module in model.modules()
        if hasattr(module, "expand_kv") and hasattr(module, "kv_a_layernorm")
    }
    require(
        bool(found),
        f"{type(model).__name__} has no latent attention that caches latents "
        "(transformers >= 5.15 is needed)",
        UnsupportedModel,
    )
    sparse = [index for index, module in found.items() if hasattr(module, "indexer")]
    require(
        not sparse,
        f"layers {sparse} select keys by an indexer, which is not handled",
        UnsupportedModel,
    )
    return dict(sorted(found.items()))


def norm_weight(module: nn.Module) -> Tensor:
    """What unit latents are multiplied by before the cache: norm weight times a family's factor."""
    factor = float(getattr(module, "mla_scale_kv_lora", 1.0))
    return module.kv_a_layernorm.weight.detach().float() * factor  # type: ignore[union-attr, return-value, operator]


@contextmanager
def teacher_forced(
    model: nn.Module,
    fmt: ModelFormat,
    transforms: Transforms | None = None,
    *,
    rope_order: RopeOrder | None = None,
) -> Iterator[None]:
    """Within it, forward passes of a transformers MLA model read their keys as decoding would.

    For one forward without a cache, over unpadded or right-padded batches (values at padding mean
    nothing). `transforms`, by cache index, simulate a method on its base model; layers without one
    and `transforms=None` quantise the model's own cache coordinates (a fused model, or rtn).
    `rope_order` is that of the cached rope channels, by default the family's. Restores the model
    on exit. Raises UnsupportedModel or UsageError before anything is changed.
    """
    layers = latent_attentions(model)
    unknown = sorted(set(transforms or {}) - set(layers))
    require(
        not unknown, f"transforms for layers {unknown}; the model has {sorted(layers)}", UsageError
    )
    require_layers(fmt, layers)
    nested = [index for index, module in layers.items() if "expand_kv" in vars(module)]
    require(
        not nested, f"layers {nested} are already under evaluation; leave that first", UsageError
    )
    order = rope_order or cached_rope_order(next(iter(layers.values())).config)
    readers = {
        module: _Reader(
            module,
            fmt.for_layer(index),
            coordinates(order, (transforms or {}).get(index), norm_weight(module)),
        )
        for index, module in layers.items()
    }
    name = f"quantmla_teacher_forced_{id(readers)}"

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return readers[module].attend(query, scaling), None

    with ExitStack() as stack:
        hook = model.register_forward_pre_hook(_check_inputs, with_kwargs=True)
        stack.callback(hook.remove)
        for reader in readers.values():
            stack.enter_context(reader)
        configs: dict[int, Any] = {id(m.config): m.config for m in layers.values()}
        for config in configs.values():
            stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            config._attn_implementation = name
        ALL_ATTENTION_FUNCTIONS[name] = attention
        stack.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, name)
        yield


def _check_inputs(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    for name in ("past_key_values", "cache"):
        require(
            kwargs.get(name) is None,
            f"teacher-forced evaluation reads no cache: leave {name} out",
            UsageError,
        )
    mask = kwargs.get("attention_mask")
    if mask is not None:
        require(
            mask.ndim == 2 and bool((mask[:, 0] != 0).all()),
            "teacher-forced evaluation takes right-padded batches: attention_mask must be 2-D "
            "and begin with 1",
            UsageError,
        )


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Reader:
    """Stands between one attention's `expand_kv` and its attention function."""

    def __init__(self, module: nn.Module, fmt: CacheFormat, stored: StoredCoordinates):
        self.module, self.fmt, self.stored = module, fmt, stored
        self.expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = module.expand_kv  # type: ignore[assignment]
        self.forms: BothForms | None = None

    def __enter__(self) -> None:
        self.module.expand_kv = self.read  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        del self.module.expand_kv  # the class's own again
        self.forms = None

    def read(self, latent: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the place of `expand_kv`: [B, 1, T, R] and [B, 1, T, E] to keys and values."""
        like = latent.dtype
        stored_latent = self.stored.store_latent(latent[:, 0])
        stored_rope = self.stored.store_rope(k_rot[:, 0])

        def expand(rows_BTR: Tensor, rope_BTE: Tensor) -> tuple[Tensor, Tensor]:
            latents, ropes = (
                self.stored.restore_latent(rows_BTR),
                self.stored.restore_rope(rope_BTE),
            )
            key, value = self.expand(latents[:, None].to(like), ropes[:, None].to(like))
            return _widen(key), _widen(value)

        read = expand(read_content(stored_latent, self.fmt), read_rope(stored_rope, self.fmt))
        exact = read if self.fmt.recent_window is None else expand(stored_latent, stored_rope)
        self.forms = BothForms(*exact, *read, stored_rope)
        return exact

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        assert self.forms is not None
        forms, self.forms = self.forms, None
        require(
            query.shape[2] == forms.stored_rope_BTE.shape[1],
            "teacher-forced evaluation reads no cache: the model gave more keys than queries",
            UsageError,
        )

        def restore(stored_rope: Tensor) -> Tensor:
            return self.stored.restore_rope(stored_rope).to(query.dtype)

        out = attend(_widen(query), forms, self.fmt, scaling, restore)
        return out.transpose(1, 2).contiguous().to(query.dtype)
