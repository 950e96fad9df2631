"""Which device a stage runs on."""

import torch

from quantmla.errors import UsageError, require


def resolve_device(name: str) -> str:
    """`auto` is the first GPU where there is one; a device that is not here is refused."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N") from error
    here = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())
    count = torch.cuda.device_count() if here and device.type == "cuda" else 1
    require(
        here and (device.index or 0) < count,
        f"device {name!r} is not on this machine",
        UsageError,
    )
    return name
