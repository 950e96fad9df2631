"""Float64 values to tensors stored as the checkpoint stores them, and back."""

from collections.abc import Mapping

from torch import Tensor

from quantmla.checkpoint.block_fp8 import dequantize_blocks, requantize_blocks
from quantmla.checkpoint.source import TensorSource
from quantmla.errors import require


def encode(source: TensorSource, name: str, values: Tensor) -> dict[str, Tensor]:
    """What to store in place of `name`: its dtype and shape; for block FP8 the scales too."""
    require(
        tuple(values.shape) == source.shape(name),
        f"{name} is {source.shape(name)} in the checkpoint, not {tuple(values.shape)}",
    )
    scale = source.scale_name(name)
    if scale is None:
        return {name: values.to(source.dtype(name))}
    quantization = source.config.get("quantization_config") or {}
    old = (source.tensor(name), source.tensor(scale))
    codes, scale_AB = requantize_blocks(
        values, old, source.fp8_block, power_of_two=quantization.get("scale_fmt") == "ue8m0"
    )
    return {name: codes, scale: scale_AB}


def decode(source: TensorSource, name: str, stored: Mapping[str, Tensor]) -> Tensor:
    """float64 values of what `encode` made."""
    scale = source.scale_name(name)
    if scale is None:
        return stored[name].double()
    return dequantize_blocks(stored[name], stored[scale], source.fp8_block)
