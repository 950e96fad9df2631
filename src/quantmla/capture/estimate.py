"""What capturing costs, from config.json alone."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from quantmla.capture.decoder import decoder_class, on_meta, transformers_config
from quantmla.capture.record import attentions
from quantmla.capture.site import capture_shapes
from quantmla.mla.geometry import MlaGeometry


class CaptureCost(NamedTuple):
    """Bytes, temporary memory of one forward pass left out."""

    memory: int  # the largest decoder layer or the embedding, once as stored and once as run
    disk: int  # hidden states before and after a layer, and that layer's captures


def capture_cost(
    geometry: MlaGeometry,
    config: Mapping[str, Any],
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
) -> CaptureCost:
    """`tokens` of all sequences together; `dtype` is that of weights and activations."""
    text = config.get("text_config") or config
    built = transformers_config(config, text["model_type"])
    model = on_meta(decoder_class(built), built)
    parts = [*model.layers, model.embed_tokens]
    largest = max(sum(p.numel() for p in part.parameters()) for part in parts)
    shapes = capture_shapes(geometry, (1, tokens), torch.float32, dtype)
    captured = sum(shape.num_bytes for shape in shapes.values())
    per_layer = max(len(attentions(layer)) for layer in model.layers)
    hidden = tokens * geometry.hidden_size * dtype.itemsize
    return CaptureCost(memory=2 * largest * dtype.itemsize, disk=2 * hidden + per_layer * captured)
