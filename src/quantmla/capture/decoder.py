"""One decoder layer of a checkpoint inside transformers' own model, everything else left empty.

The base model is built whole on the meta device, where it costs nothing; then every layer but one
forgets its modules and passes hidden states on. transformers' own loader fills what is left from
the tensors of that layer, with all its conversions (stacked experts, renamings, parameters kept in
float32). The model's own forward then makes masks, positions and rotary embeddings.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantmla.arch.adapter import Adapter
from quantmla.checkpoint.block_fp8 import SCALE_SUFFIX
from quantmla.checkpoint.source import TensorSource, require_finite
from quantmla.errors import QuantMLAError, UnsupportedModel, one_line, require
from quantmla.interrupts import interrupt_waits

EMBEDDING = "embed_tokens.weight"


# Model types that transformers runs with another family's class.
RUN_AS = {"kimi_k2": "deepseek_v3"}


@dataclass(frozen=True)
class Skeleton:
    """How to build any part of one checkpoint's decoder."""

    source: TensorSource
    model_class: type
    config: Any  # of transformers, text part
    prefix: str  # of decoder tensors in the checkpoint, such as "model."
    dtype: torch.dtype  # of activations and weights


def open_skeleton(source: TensorSource, adapter: Adapter, dtype: torch.dtype | None) -> Skeleton:
    """Reads the config only. `dtype` None takes the checkpoint's own."""
    config = transformers_config(source.config, adapter.model_type)
    first = adapter.sites(source.config, source.names)[0]
    prefix = first.prefix.partition(f"layers.{first.layer}.")[0]
    stored = source.dtype(prefix + EMBEDDING)  # MTP layers may have embeddings of their own
    return Skeleton(
        source=source,
        model_class=decoder_class(config),
        config=config,
        prefix=prefix,
        dtype=dtype or _own_dtype(config.dtype, stored),
    )


def _own_dtype(asked: Any, stored: torch.dtype) -> torch.dtype:
    """What config.json asks for, else what the embedding has."""
    known = (torch.bfloat16, torch.float16, torch.float32)
    dtype = stored if asked is None else asked
    require(
        dtype in known,
        f"the checkpoint's dtype is {dtype!r}; supported: {', '.join(map(str, known))}",
    )
    return dtype  # type: ignore[no-any-return]


def transformers_config(config: Mapping[str, Any], model_type: str) -> Any:
    """transformers' config of the text decoder, without quantization, which we undo ourselves."""
    from transformers import CONFIG_MAPPING

    model_type = RUN_AS.get(model_type, model_type)
    require(
        model_type in CONFIG_MAPPING,
        f"this transformers does not know model type {model_type!r}: a newer one is needed",
        UnsupportedModel,
    )
    text = dict(config.get("text_config") or config)
    quantization = text.pop("quantization_config", None) or config.get("quantization_config")
    method = (quantization or {}).get("quant_method", "fp8")
    require(
        method == "fp8",
        f"weights quantized by {method!r} are not read: only block FP8 and unquantized ones are",
        UnsupportedModel,
    )
    try:
        return CONFIG_MAPPING[model_type].from_dict(text | {"model_type": model_type})
    except Exception as error:  # transformers checks a config by errors of many kinds
        raise QuantMLAError(f"transformers refuses config.json: {one_line(error)}") from error


def decoder_class(config: Any) -> type:
    """The base model's class, without a language-model head."""
    from transformers import MODEL_MAPPING

    require(
        type(config) in MODEL_MAPPING,
        f"this transformers has no decoder for {config.model_type!r}: a newer one is needed",
        UnsupportedModel,
    )
    found: type = MODEL_MAPPING[type(config)]
    return found


def on_meta(model_class: type, config: Any) -> Any:
    """Parameters with shapes but without memory."""
    try:
        with torch.device("meta"):
            return model_class(config)
    except MemoryError:
        raise
    except Exception as error:  # a value that no module can be made of fails in many ways
        raise QuantMLAError(
            f"transformers can make no model of config.json: {one_line(error)}"
        ) from error


def _pass_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _forget(module: nn.Module) -> None:
    """Makes a module the identity; plain attributes that the model's forward may read stay."""
    module._modules.clear()
    module._parameters.clear()
    module._buffers.clear()
    module._is_hf_initialized = True  # type: ignore[assignment]  # nothing left to initialize
    module.forward = _pass_on  # type: ignore[method-assign]


def _only(model_class: type, layer: int | None) -> type:
    """A subclass that holds one decoder layer, or for None the embedding alone."""

    def init(self: Any, config: Any) -> None:
        model_class.__init__(self, config)  # type: ignore[misc]
        for index, module in enumerate(self.layers):
            if index != layer:
                _forget(module)
        _forget(self.norm)
        if layer is not None:
            _forget(self.embed_tokens)

    # The name stays, since transformers looks up conversions and dtypes by it.
    return type(
        model_class.__name__,
        (model_class,),
        {"__init__": init, "__module__": model_class.__module__},
    )


def _tensors(skeleton: Skeleton, layer: int | None) -> dict[str, Tensor]:
    """The checkpoint's tensors of one part, block FP8 undone; others stay mapped from the file."""
    source = skeleton.source
    start = skeleton.prefix + (EMBEDDING if layer is None else f"layers.{layer}.")
    found = {}
    for name in source.names:
        if not name.startswith(start) or name.endswith(SCALE_SUFFIX):
            continue
        plain = source.scale_name(name) is None
        tensor = source.tensor(name) if plain else source.float_tensor(name, skeleton.dtype)
        found["model." + name.removeprefix(skeleton.prefix)] = require_finite(name, tensor)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars and warnings from transformers; what it was set to before comes back."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def decoder_part(skeleton: Skeleton, layer: int | None, device: torch.device) -> Iterator[Any]:
    """The base model with one layer in memory (None: the embedding), which is freed on leaving.

    Layer: call with `inputs_embeds` of hidden states before it; `last_hidden_state` comes after it.
    """
    model = _load(skeleton, layer).to(device)
    try:
        yield model
    finally:
        model.to("meta")  # frees the weights now, whatever still refers to the modules


def _load(skeleton: Skeleton, layer: int | None) -> Any:
    what = "the embedding" if layer is None else f"layer {layer}"
    with interrupt_waits(), _quiet():
        tensors = _tensors(skeleton, layer)  # outside the try: its errors are sentences already
        try:
            model, info = _only(skeleton.model_class, layer).from_pretrained(  # type: ignore[attr-defined]
                None,
                config=skeleton.config,
                state_dict=tensors,
                dtype=skeleton.dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, and refused below
            )
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # what a config makes of a model's modules fails in many ways
            raise QuantMLAError(
                f"{what} of the checkpoint does not fit its config.json: {one_line(error)}"
            ) from error
    for name, stored, built in sorted(info["mismatched_keys"])[:1]:
        raise QuantMLAError(
            f"{what} of the checkpoint does not fit its config.json: {name} is {tuple(stored)}, "
            f"not {tuple(built)}"
        )
    missing = sorted(info["missing_keys"])
    require(
        not missing,
        f"the checkpoint lacks {len(missing)} parameters of {what}, such as {missing[:1]}",
    )
    return model.requires_grad_(False)
