"""What quantizing would take, before it starts."""

import shutil
import time
from pathlib import Path
from typing import Any

import torch

from quantmla.arch import Adapter
from quantmla.capture.estimate import capture_cost
from quantmla.capture.tokens import CalibrationTokens
from quantmla.checkpoint.source import TensorSource
from quantmla.device import resolve_device
from quantmla.quant.layout import layout_for
from quantmla.quant.mixed import describe
from quantmla.recipe import Recipe
from quantmla.workdir import present_part

PROCESS_BYTES = 600 * 2**20  # what python, torch and transformers take before any model
CAPTURES_IN_MEMORY = 2**30  # more of one layer waits on disk (CaptureSettings.memory_limit)


def plan(
    source: TensorSource, adapter: Adapter, recipe: Recipe, tokens: CalibrationTokens
) -> dict[str, Any]:
    """What `--dry-run` prints: sizes from the config and the files, and a rough time.

    The learner's own memory (a few attentions of one batch) and time (by layer, whatever the
    layer's weights are) are left out.
    """
    count = tokens.train_BS.numel() + tokens.held_out_BS.numel()
    geometry = adapter.geometry(source.config)
    cost = capture_cost(geometry, source.config, count)
    weights = sum(path.stat().st_size for path in source.path.glob("*.safetensors"))
    assert recipe.output.folder is not None
    place = present_part(Path(recipe.output.folder).absolute().parent)
    sites = [s for s in adapter.sites(source.config, source.names) if not s.mtp]
    cache = recipe.format.cache_format()
    pages = [layout_for(geometry, cache.for_layer(s.cache_index)).page_bytes for s in sites]
    return {
        "cache_format": describe(cache),
        "cache_bytes_per_token_and_layer": sum(pages) / len(pages) / cache.page_size,
        "layers": len(sites),
        "calibration_tokens": count,
        "memory_bytes": PROCESS_BYTES + cost.memory + min(cost.disk, CAPTURES_IN_MEMORY),
        "work_disk_bytes": cost.disk,
        "output_disk_bytes": weights,
        "free_disk_bytes": shutil.disk_usage(place).free,
        "capture_seconds": round(_seconds(weights, count, recipe.calibration.device)),
    }


def _seconds(weight_bytes: int, tokens: int, device_name: str) -> float:
    """One forward pass of all weights at this machine's matrix rate; learning comes on top."""
    device = resolve_device(device_name)
    x = torch.randn(1024, 1024, device=device)
    x @ x
    began = time.perf_counter()
    for _ in range(4):
        x = torch.tanh(x @ x)
    float(x.sum())
    rate = 4 * 2 * 1024**3 / (time.perf_counter() - began)
    return 2 * (weight_bytes / 2) * tokens / rate
