"""The transforms of a model in one safetensors file, for audit, verification and resuming.

Tensors are named `{prefix}.content.rotation`, `.content.scale`, `.rope.angle`, `.rope.gain` and,
where there is one, `.rope.online`. A rotation that is the identity is left out.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from quantmla.errors import QuantMLAError, require
from quantmla.transform.layer import ContentTransform, LayerTransform, RopeTransform

# Not *.safetensors: where there is no index, engines take every such file for weights.
FILE_NAME = "quantmla_transforms.sft"
ROTATION, SCALE, ANGLE, GAIN = "content.rotation", "content.scale", "rope.angle", "rope.gain"
ONLINE = "rope.online"


def transforms_to_bytes(
    transforms: Mapping[str, LayerTransform], dtype: torch.dtype = torch.float64
) -> bytes:
    """The file's content. Equal transforms give equal bytes; float64 loses nothing."""
    tensors: dict[str, Tensor] = {}
    for prefix, (content, rope, online) in transforms.items():
        named = {SCALE: content.scale_R}
        if not torch.equal(
            content.rotation_RR, torch.eye(len(content.scale_R)).to(content.rotation_RR)
        ):
            named[ROTATION] = content.rotation_RR
        named |= {ANGLE: rope.angle_F, GAIN: rope.gain_F}
        if online is not None:
            named[ONLINE] = online
        for key, x in named.items():
            tensors[f"{prefix}.{key}"] = x.detach().to("cpu", dtype).clone().contiguous()
    return bytes(save(tensors, metadata={"format": "pt"}))


def transforms_from_file(path: Path) -> dict[str, LayerTransform]:
    """Transforms by attention prefix. Raises QuantMLAError for a file that is not such a one."""
    require(path.is_file(), f"{path} does not exist")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise QuantMLAError(f"{path} is not a file of transforms: {error}") from error
    keys = (ROTATION, SCALE, ANGLE, GAIN, ONLINE)
    prefixes = sorted(
        {
            name.removesuffix(f".{key}")
            for name in tensors
            for key in keys
            if name.endswith(f".{key}")
        }
    )
    needed = [f"{prefix}.{key}" for prefix in prefixes for key in (SCALE, ANGLE, GAIN)]
    absent = [name for name in needed if name not in tensors]
    require(not absent, f"{path} lacks {', '.join(absent[:3])}")
    require(bool(prefixes), f"{path} holds no transforms")
    whole = sorted(name for name, x in tensors.items() if not x.is_floating_point())
    require(not whole, f"{path} has no floating-point numbers in {', '.join(whole[:3])}")
    unusable = sorted(name for name, x in tensors.items() if not bool(torch.isfinite(x).all()))
    require(not unusable, f"{path} has NaN or infinity in {', '.join(unusable[:3])}")
    found = {prefix: _transform(tensors, prefix) for prefix in prefixes}
    for prefix, transform in found.items():
        require(_is_whole(transform), f"{path} has tensors of {prefix} that do not fit together")
    return found


def _is_whole(transform: LayerTransform) -> bool:
    content, rope, online_EE = transform
    rank, pairs = content.scale_R.numel(), rope.angle_F.numel()
    found = [content.scale_R, content.rotation_RR, rope.angle_F, rope.gain_F]
    wanted = [(rank,), (rank, rank), (pairs,), (pairs,)]
    if online_EE is not None:
        found, wanted = [*found, online_EE], [*wanted, (2 * pairs, 2 * pairs)]
    return [tuple(x.shape) for x in found] == wanted


def _transform(tensors: Mapping[str, Tensor], prefix: str) -> LayerTransform:
    named = {
        key: tensors[f"{prefix}.{key}"].double()
        for key in (ROTATION, SCALE, ANGLE, GAIN, ONLINE)
        if f"{prefix}.{key}" in tensors
    }
    scale_R = named[SCALE]
    rotation_RR = named.get(ROTATION, torch.eye(len(scale_R), dtype=torch.float64))
    return LayerTransform(
        ContentTransform(rotation_RR, scale_R),
        RopeTransform(named[ANGLE], named[GAIN]),
        named.get(ONLINE),
    )
