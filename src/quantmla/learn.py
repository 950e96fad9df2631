"""Fits every layer of a checkpoint, one after the other; can go on after a kill.

The work folder keeps each finished layer and the hidden states that the next one starts from, so
a resumed run ends with the transforms that an uninterrupted one with as many threads would have:
every layer's random numbers depend only on the seed and the layer.
"""

import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
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
from quantmla.method import load_method
from quantmla.method.layer import Fitted, Layer, PathErrors, Sample, held_out_errors
from quantmla.method.spread import Spread, cached_spread
from quantmla.progress import say
from quantmla.quant.mixed import ModelFormat
from quantmla.transform.layer import LayerTransform, identity
from quantmla.transform.store import transforms_from_file, transforms_to_bytes
from quantmla.workdir import (
    THREADS,
    begun_with,
    check_workdir,
    is_workdir,
    mark_workdir,
    write_whole,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLog:
    """How one layer went. Errors are on held-out text, each path alone, nothing protected."""

    prefix: str
    before: PathErrors  # the checkpoint as it is, in the same format
    after: PathErrors
    seconds: float
    peak_bytes: int  # of device memory on a GPU, else of the process
    history: tuple[tuple[str, int, float], ...]  # path, step, held-out objective
    spread: Mapping[str, Spread] = field(default_factory=dict)  # before and after


@dataclass(frozen=True, slots=True)
class Learned:
    """All layers, in the model's order."""

    transforms: Mapping[str, LayerTransform]  # by attention prefix
    logs: tuple[LayerLog, ...]


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
    run = _fingerprint(source, tokens, settings)
    check_workdir(workdir, run, resume=resume)
    say_other_threads(workdir)
    done = {log.prefix: (t, log) for t, log in _finished(workdir)}
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
        _save(workdir, site, transform, log)
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
        check_workdir(workdir, _fingerprint(source, tokens, settings), resume=resume)
        _finished(workdir)
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


def _fingerprint(
    source: TensorSource, tokens: CalibrationTokens, settings: LearnSettings
) -> dict[str, Any]:
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


def layer_line(log: LayerLog, number: int, total: int) -> str:
    """What is shown when a layer is finished."""

    def change(before: float, after: float) -> str:
        share = f" ({after / before - 1:+.0%})" if before > 0 else ""
        return f"{before:.2e} -> {after:.2e}{share}"

    return (
        f"layer {number}/{total} {log.prefix}: content output error "
        f"{change(log.before.content_output, log.after.content_output)}, rope score error "
        f"{change(log.before.rope_scores, log.after.rope_scores)}, {log.seconds:.1f} s, "
        f"peak {log.peak_bytes / 2**30:.2f} GiB"
    )


def say_other_threads(workdir: Path) -> None:
    """Sums over other numbers of threads round otherwise: no reason to refuse, but to be known."""
    begun, now = begun_with(workdir).get(THREADS), torch.get_num_threads()
    if begun not in (None, now):
        say(
            f"{workdir} was begun with {begun} CPU threads and goes on with {now}: layers may "
            "differ in their last bits from those of a run that was not stopped",
            True,
        )


def kept_transforms(workdir: Path) -> dict[str, LayerTransform]:
    """Those of the finished layers in a work folder, by attention prefix; none where it is none."""
    found = _finished(workdir) if is_workdir(workdir) else []
    return {log.prefix: transform for transform, log in found}


def _save(workdir: Path, site: AttentionSite, transform: LayerTransform, log: LayerLog) -> None:
    """The log goes last: a layer counts as finished when it is there."""
    stem = f"layer_{site.cache_index:04d}"
    write_whole(workdir / f"{stem}.safetensors", transforms_to_bytes({site.prefix: transform}))
    write_whole(workdir / f"{stem}.json", json.dumps(asdict(log)).encode())


def _finished(workdir: Path) -> list[tuple[LayerTransform, LayerLog]]:
    found = []
    for path in sorted(workdir.glob("layer_*.json")):
        try:
            log = _read_log(path)
            found.append((transforms_from_file(path.with_suffix(".safetensors"))[log.prefix], log))
        except (ValueError, TypeError, KeyError, AttributeError, QuantMLAError) as error:
            raise QuantMLAError(
                f"the finished layer {path} is damaged ({error}): remove this file to learn it "
                "again with --resume"
            ) from error
    return found


def _read_log(path: Path) -> LayerLog:
    data = json.loads(path.read_text())
    data["before"], data["after"] = PathErrors(*data["before"]), PathErrors(*data["after"])
    data["history"] = tuple(tuple(v) for v in data["history"])
    return LayerLog(**data)
