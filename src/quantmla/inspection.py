"""What a model is, from its config and the headers of its weight files alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantmla.arch import adapter_for
from quantmla.arch.sites import mtp_layers
from quantmla.checkpoint.locate import PACKAGED, read_config
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.errors import UnsupportedModel
from quantmla.estimate import cached_layers, chosen_format, recorded_format
from quantmla.quant.layout import layout_for
from quantmla.quant.mixed import describe, distinct_formats


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Facts about one model; None where the model does not say."""

    model: str
    model_type: str | None
    architecture: str | None
    supported: bool
    reason: str | None  # why it is not supported
    attention: dict[str, Any] | None  # the sizes of MlaGeometry
    rope_order: str | None  # order of the rope rows in the weights
    layers: int | None
    cached_layers: int | None  # latent attentions that keep a cache
    mtp_layers: int  # multi-token-prediction layers that the config promises
    dtype: str | None  # as the config says
    quantization: str | None  # of the weights, as the config says
    cache_format: str | None  # what a fused checkpoint was made for
    weight_bytes: dict[str, int] | None  # by dtype of the files; None without local files

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect_model(model: str) -> Inspection:
    """Everything that config.json and the weights' headers tell; no weight is read.

    A hub id is judged by its config alone, which is all that is downloaded. Raises QuantMLAError
    for a local folder that is not whole.
    """
    config = read_config(model)
    facts: dict[str, Any] = {"attention": None, "rope_order": None, "cached_layers": None}
    reason = None
    try:
        facts = _attention(config)
        for fmt in distinct_formats(chosen_format(config, model, None)):
            layout_for(adapter_for(config).geometry(config), fmt)  # as estimate and quantize do
    except UnsupportedModel as error:
        reason = str(error)
    recorded = recorded_format(config, model)
    text = config.get("text_config") or config
    method = (config.get("quantization_config") or {}).get("quant_method")
    return Inspection(
        model=model,
        model_type=config.get("model_type"),
        architecture=next(iter(config.get("architectures") or ()), None),
        supported=reason is None,
        reason=reason,
        layers=text.get("num_hidden_layers") or text.get("num_layers"),
        mtp_layers=mtp_layers(text),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        quantization=method,
        cache_format=None if recorded is None else describe(recorded),
        weight_bytes=_weight_bytes(open_source(model)) if _is_local(model) else None,
        **facts,
    )


def _is_local(model: str) -> bool:
    return model in PACKAGED or Path(model).is_dir()


def _weight_bytes(source: TensorSource) -> dict[str, int]:
    total: Counter[str] = Counter()
    for entry in source.entries.values():
        total[entry.dtype] += entry.end - entry.begin
    return dict(total)


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    adapter = adapter_for(config)
    geometry = adapter.geometry(config)
    return {
        "attention": asdict(geometry),
        "rope_order": adapter.weight_rope_order if geometry.rotated else "not rotated",
        "cached_layers": len(cached_layers(config)),
    }
