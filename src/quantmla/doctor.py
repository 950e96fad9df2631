"""What this machine has and which parts of the package work on it."""

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from quantmla import __version__

PACKAGES = ("torch", "transformers", "triton", "vllm", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Installed versions; None where a package is missing."""
    found: dict[str, str | None] = {"quantmla": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def gpus() -> list[dict[str, Any]]:
    """Name, memory (bytes) and compute capability of every CUDA GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"name": p.name, "memory": p.total_memory, "capability": f"{p.major}.{p.minor}"}
        for p in properties
    ]


def diagnose() -> dict[str, Any]:
    """Versions, GPUs, and per feature `yes` or the reason why not."""
    import torch

    devices = gpus()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "versions": versions(),
        "gpus": devices,
        "works": {
            "quantize, verify, eval": "yes" if devices else "yes, on the CPU",
            "eval --tasks": "yes" if find_spec("lm_eval") else "no: lm-eval is not installed",
            "triton kernels": _triton(devices),
            "hopper kernels": _hopper(devices),
            "vllm plugin": _vllm(devices),
        },
    }


def _triton(devices: list[dict[str, Any]]) -> str:
    if find_spec("triton") is None:
        return "no: triton is not installed"
    return "yes" if devices else "no: torch sees no CUDA GPU"


def _vllm(devices: list[dict[str, Any]]) -> str:
    """With the Triton kernels, where those for Hopper cannot be compiled."""
    if not find_spec("vllm"):
        return "no: vllm is not installed"
    return "yes" if _any_hopper(devices) and find_spec("triton") else _hopper(devices)


def _hopper(devices: list[dict[str, Any]]) -> str:
    if not devices:
        return "no: torch sees no CUDA GPU"
    if not _any_hopper(devices):
        return "no: needs a GPU of compute capability 9.0"
    there = find_spec("cuda") and find_spec("cuda.bindings")
    return "yes" if there else "no: cuda-bindings is not installed"


def _any_hopper(devices: list[dict[str, Any]]) -> bool:
    return any(device["capability"] == "9.0" for device in devices)
