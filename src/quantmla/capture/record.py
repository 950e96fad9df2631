"""Hooks that see what an attention reads, without a change to what it computes.

B sequences, S tokens of each, N heads, R latent rank, P content and E rope channels per head.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantmla.errors import UnsupportedModel, require

IMPLEMENTATION = "quantmla_capture"  # name of our attention function in transformers' table
SINK = "_quantmla_query_sink"  # attribute of an attention module that is being recorded

Taken = dict[str, Tensor]  # the activations of one forward pass, in the model's own rope order


def unit_latent(latent_BSR: Tensor, eps: float) -> Tensor:
    """RMS-normalised over channels, float32."""
    x = latent_BSR.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def norm_eps(norm: nn.Module) -> float:
    """The epsilon that the module uses, which need not be the config's."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(norm, name, None)
        if isinstance(value, float):
            return value
    raise UnsupportedModel(
        f"{type(norm).__name__} does not say its epsilon: it is no known RMSNorm"
    )


def attentions(layer: nn.Module) -> list[nn.Module]:
    """The latent attentions inside one decoder layer, in order."""
    return [m for m in layer.modules() if hasattr(m, "kv_a_layernorm") and hasattr(m, "expand_kv")]


@contextmanager
def recording(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Taken]]:
    """While open, each forward pass replaces the named attentions' entries in the yielded dict.

    Entries: `unit_latent` [B, S, R] float32, `k_rope` [B, S, E], `query` [B, S, N, P + E]. The
    attention itself runs through torch's scaled dot product. All is undone on leaving.
    """
    taken: dict[str, Taken] = {name: {} for name in modules}
    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(_watch_latent(module, taken[name]))
            stack.enter_context(_watch_key(module, taken[name]))
            stack.enter_context(_watch_query(module, taken[name]))
        yield taken


@contextmanager
def _watch_latent(module: Any, into: Taken) -> Iterator[None]:
    norm = module.kv_a_layernorm
    eps = norm_eps(norm)

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        into["unit_latent"] = unit_latent(args[0].detach(), eps)

    handle = norm.register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _watch_key(module: Any, into: Taken) -> Iterator[None]:
    original: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = module.expand_kv

    def expand_kv(latent: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        into["k_rope"] = k_rot.detach().squeeze(1)
        return original(latent, k_rot)

    module.expand_kv = expand_kv
    try:
        yield
    finally:
        del module.expand_kv


@contextmanager
def _watch_query(module: Any, into: Taken) -> Iterator[None]:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    # Both tables only gain a name of ours, which nobody else asks for.
    AttentionInterface.register(IMPLEMENTATION, _record_then_attend)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)

    def sink(query_BNSC: Tensor) -> None:
        into["query"] = query_BNSC.detach().transpose(1, 2)

    config = module.config
    before = config._attn_implementation
    require(
        before in ("sdpa", "eager", IMPLEMENTATION),
        f"attention implementation {before!r} cannot be recorded: load the model with 'sdpa'",
        UnsupportedModel,
    )
    config._attn_implementation = IMPLEMENTATION
    setattr(module, SINK, sink)
    try:
        yield
    finally:
        delattr(module, SINK)
        config._attn_implementation = before


def _record_then_attend(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sink = getattr(module, SINK, None)
    if sink is not None:  # other attentions of the same model may share the config
        sink(query)
    return sdpa_attention_forward(module, query, *args, **kwargs)
