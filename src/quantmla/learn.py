"""Fits every layer of a checkpoint, one after the other; can go on after a kill.

The work folder keeps each finished layer and the hidden states that the next one starts from, so
a resumed run ends with the transforms that an uninterrupted one with as many threads would have:
every layer's random numbers depend only on the seed and the layer.
"""

import hashlib
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantmla import __version__
from quantmla.arch.adapter import Adapter, AttentionSite
from quantmla.capture.layer import LayerCapture
from quantmla.capture.stream import CaptureSettings, OnProgress, captured_layers
from quantmla.capture.tokens import CalibrationTokens
from quantmla.checkpoint.source import TensorSource
from quantmla.errors import QuantMLAError
from quantmla.layer_log import LayerLog, Learned, finished_layers, save_layer
from quantmla.method import load_method
from quantmla.method.layer import Fitted, Layer, Sample, held_out_errors
from quantmla.method.spread import cached_spread
from quantmla.progress import say
from quantmla.quant.mixed import ModelFormat
from quantmla.transform.layer import LayerTransform, identity
from quantmla.workdir import (
    THREADS,
    begun_with,
    check_workdir,
    mark_workdir,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnSettings:
    """What decides the transforms, apart from model and text."""

    method: str
    options: Any  # the method's Options
    fmt: ModelFormat
    seed: int = 0
    device: str = "cpu"
    batch_size: int = 8  # sequences per forward pass of the model


def learn_checkpoint(  # noqa: PLR0913
    source: TensorSource,
    adapter: Adapter,
    tokens: CalibrationTokens,
    settings: LearnSettings,
    workdir: Path,
    *,
    resume: bool = False,
    on_progress: OnProgress | None = None,
    on_layer: Callable[[LayerLog], None] | None = None,
) -> Learned:
    """Captures and fits layer by layer; `workdir` is left in place for the caller to remove.

    Raises UsageError for a work folder of another run when resuming, or of any run when not.
    """
    run = fingerprint(source, tokens, settings)
    check_workdir(workdir, run, resume=resume)
    say_other_threads(workdir)
    earlier = finished_layers(workdir)
    done = {log.prefix: (earlier.transforms[log.prefix], log) for log in earlier.logs}
    all_BS = torch.cat((tokens.train_BS, tokens.held_out_BS))
    capture = CaptureSettings(
        workdir=workdir, device=settings.device, batch_size=settings.batch_size
    )
    stream = captured_layers(
        source, adapter, all_BS, capture, skip=tuple(done), **_given(on_progress=on_progress)
    )
    mark_workdir(workdir, run | {THREADS: torch.get_num_threads()})
    for site, captured in stream:
        transform, log = _fit_site(
            source, adapter, site, captured, (len(tokens.train_BS), settings)
        )
        save_layer(workdir, site, transform, log)
        done[site.prefix] = (transform, log)
        if on_layer is not None:
            on_layer(log)
    order = [s.prefix for s in adapter.sites(source.config, source.names) if s.prefix in done]
    return Learned({p: done[p][0] for p in order}, tuple(done[p][1] for p in order))


def check_learning(
    source: TensorSource,
    adapter: Adapter,
    tokens: CalibrationTokens,
    settings: LearnSettings,
    workdir: Path | None,
    *,
    resume: bool,
) -> None:
    """Refuses what `learn_checkpoint` would before its first layer; None: an empty work folder."""
    if workdir is not None:
        check_workdir(workdir, fingerprint(source, tokens, settings), resume=resume)
        finished_layers(workdir)
    # checks its arguments at once, and runs nothing before a layer is asked for
    captured_layers(
        source, adapter, torch.cat((tokens.train_BS, tokens.held_out_BS)), CaptureSettings()
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _fit_site(
    source: TensorSource,
    adapter: Adapter,
    site: AttentionSite,
    captured: LayerCapture,
    run: tuple[int, LearnSettings],
) -> tuple[LayerTransform, LayerLog]:
    num_train, settings = run
    began = time.perf_counter()
    device = torch.device(settings.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    weights = adapter.read(source, site, dtype=torch.float32).to(device=device)
    captures = (
        captured.unit_latent_BSR,
        captured.k_rope_BSE,
        captured.q_content_BSNP,
        captured.q_rope_BSNE,
    )
    parts = resident(captures, device)
    layer = Layer(
        weights=weights,
        softmax_scale=captured.softmax_scale,
        train=Sample(*(x[:num_train] for x in parts)),
        held_out=Sample(*(x[num_train:] for x in parts)),
    )
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + site.cache_index)
    fmt = settings.fmt.for_layer(site.cache_index)
    try:
        plain = identity(weights.norm_R.cpu(), captured.k_rope_BSE.shape[-1] // 2)
        before = held_out_errors(layer, plain, fmt)  # first: it refuses what no method can learn
        fitted: Fitted = load_method(settings.method).fit(layer, fmt, settings.options, generator)
        after = held_out_errors(layer, fitted.transform, fmt)
    except torch.OutOfMemoryError as error:
        raise QuantMLAError(
            f"out of memory while learning {site.prefix}: lower num_sequences, sequence_length or "
            "the method's batch_size"
        ) from error
    except QuantMLAError as error:
        raise QuantMLAError(f"{site.prefix}: {error}") from error
    log = LayerLog(
        prefix=site.prefix,
        before=before,
        after=after,
        seconds=time.perf_counter() - began,
        peak_bytes=_peak_bytes(device),
        history=tuple(tuple(v) for v in fitted.history),  # type: ignore[misc]
        spread={
            "before": cached_spread(layer, plain),
            "after": cached_spread(layer, fitted.transform),
        },
    )
    return fitted.transform, log


def resident(parts: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Captures on the GPU where they leave half of its free memory; else they stay in place."""
    if device.type != "cuda":
        return parts
    free, _ = torch.cuda.mem_get_info(device)
    if sum(x.nbytes for x in parts) > free // 2:
        return parts
    return tuple(x.to(device) for x in parts)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def fingerprint(
    source: TensorSource, tokens: CalibrationTokens, settings: LearnSettings
) -> dict[str, Any]:
    """All that decides the transforms: two runs with the same one end alike."""
    ids = hashlib.sha256()
    for part in (tokens.train_BS, tokens.held_out_BS):
        ids.update(repr(tuple(part.shape)).encode() + part.contiguous().numpy().tobytes())
    return {
        "model": source.digest(),
        "tokens": ids.hexdigest(),
        "method": settings.method,
        "options": asdict(settings.options),
        "format": settings.fmt.to_json(),
        "seed": settings.seed,
        "device": torch.device(settings.device).type,
        "quantmla": __version__,
        "torch": torch.__version__,
    }


def say_other_threads(workdir: Path) -> None:
    """Sums over other numbers of threads round otherwise: no reason to refuse, but to be known."""
    begun, now = begun_with(workdir).get(THREADS), torch.get_num_threads()
    if begun not in (None, now):
        say(
            f"{workdir} was begun with {begun} CPU threads and goes on with {now}: layers may "
            "differ in their last bits from those of a run that was not stopped",
            True,
        )
