"""A model's attention inputs, layer by layer, with one decoder layer in memory.

B sequences, S tokens of each, D hidden size, N heads, R latent rank, P content and E rope channels.
"""

import hashlib
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantmla.arch.adapter import Adapter, AttentionSite
from quantmla.capture.decoder import EMBEDDING, Skeleton, decoder_part, open_skeleton
from quantmla.capture.layer import LayerCapture
from quantmla.capture.record import attentions, recording
from quantmla.capture.site import SiteRows
from quantmla.capture.store import (
    Shape,
    holds,
    map_rows,
    open_rows,
    read_fingerprint,
)
from quantmla.checkpoint.source import TensorSource, require_finite
from quantmla.errors import QuantMLAError, UsageError, require
from quantmla.workdir import UNFINISHED

OnProgress = Callable[[str, int, int], None]  # stage, sequences done, sequences in all


class CapturedSite(NamedTuple):
    site: AttentionSite
    capture: LayerCapture


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """Where and how the decoder layers run."""

    workdir: Path | None = None  # for hidden states and large captures; None keeps all in memory
    device: torch.device | str = "cpu"
    dtype: torch.dtype | None = None  # of weights and activations; None: the checkpoint's
    batch_size: int = 8  # sequences per forward pass
    latent_dtype: torch.dtype = torch.float32  # of the captured unit latents
    memory_limit: int = 2**30  # bytes of one layer's captures; more go to the work folder

    def __post_init__(self) -> None:
        require(
            self.batch_size >= 1, f"batch_size {self.batch_size} must be at least 1", UsageError
        )
        require(self.memory_limit >= 0, f"memory_limit {self.memory_limit} is negative", UsageError)


@dataclass(frozen=True)
class _Run:
    skeleton: Skeleton
    adapter: Adapter
    sites: dict[int, list[AttentionSite]]  # by decoder layer, MTP layers left out
    wanted: frozenset[str]  # prefixes
    tokens_BS: Tensor
    settings: CaptureSettings
    on_progress: OnProgress

    @property
    def last(self) -> int:
        """Last decoder layer that has to run."""
        return max(layer for layer, sites in self.sites.items() if self.wanted_of(layer))

    def wanted_of(self, layer: int) -> list[AttentionSite]:
        return [site for site in self.sites.get(layer, []) if site.prefix in self.wanted]

    @property
    def hidden_shape(self) -> Shape:
        sizes = (
            *self.tokens_BS.shape,
            self.adapter.geometry(self.skeleton.source.config).hidden_size,
        )
        return Shape(sizes, self.skeleton.dtype)


def captured_layers(
    source: TensorSource,
    adapter: Adapter,
    tokens_BS: Tensor,
    settings: CaptureSettings,
    *,
    skip: Container[str] = (),
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Iterator[CapturedSite]:
    """What each attention of the model sees on whole causal sequences, in the order of the layers.

    `skip` holds prefixes of sites that are not needed. With a work folder, a later call with the
    same arguments goes on from the first layer that is still needed, with the same bytes. A
    capture's files are deleted when the next one is asked for. MTP layers are not run. Raises
    QuantMLAError that names the layer for NaN or infinity and for attentions that saw nothing.
    """
    skeleton = open_skeleton(source, adapter, settings.dtype)
    _check_tokens(tokens_BS, skeleton)
    sites: dict[int, list[AttentionSite]] = {}
    for site in adapter.sites(source.config, source.names):
        if not site.mtp:
            sites.setdefault(site.layer, []).append(site)
    wanted = frozenset(s.prefix for of in sites.values() for s in of if s.prefix not in skip)
    run = _Run(skeleton, adapter, sites, wanted, tokens_BS, settings, on_progress)
    return _stream(run) if wanted else iter(())


def _check_tokens(tokens_BS: Tensor, skeleton: Skeleton) -> None:
    require(
        tokens_BS.dim() == 2 and tokens_BS.numel() > 0,
        f"calibration tokens of shape {tuple(tokens_BS.shape)}: [sequences, tokens] are needed, "
        "at least one of each",
        UsageError,
    )
    vocabulary = skeleton.source.shape(skeleton.prefix + EMBEDDING)[0]
    low, high = int(tokens_BS.min()), int(tokens_BS.max())
    require(
        low >= 0 and high < vocabulary,
        f"calibration tokens from {low} to {high} do not fit a vocabulary of {vocabulary}",
        UsageError,
    )
    longest = getattr(skeleton.config, "max_position_embeddings", None)
    require(
        longest is None or tokens_BS.shape[1] <= longest,
        f"sequences of {tokens_BS.shape[1]} tokens are longer than the model's {longest} positions",
        UsageError,
    )


def _stream(run: _Run) -> Iterator[CapturedSite]:
    folder = run.settings.workdir
    mark = fingerprint(run) if folder is not None else ""
    start, hidden = _resume(run, folder, mark)
    for layer in range(start, run.last + 1):
        if hidden is None:
            hidden = _embed(run, folder, mark)
        after, rows = _run_layer(run, layer, hidden, mark)
        try:
            for site, of_site in rows.items():
                yield CapturedSite(site, of_site.finish())
                of_site.discard()
        finally:
            for of_site in rows.values():
                of_site.discard()
        hidden = after
        if folder is not None:
            _hidden_file(folder, layer).unlink(missing_ok=True)


def fingerprint(run: _Run) -> str:
    """Of all that decides the bytes of hidden states."""
    import transformers

    settings = run.settings
    sha = hashlib.sha256(run.skeleton.source.digest().encode())
    sha.update(run.tokens_BS.contiguous().cpu().numpy().tobytes())
    facts = (
        *run.tokens_BS.shape,
        run.skeleton.dtype,
        torch.device(settings.device).type,
        settings.batch_size,
        torch.__version__,
        transformers.__version__,
    )
    sha.update(repr(tuple(map(str, facts))).encode())
    return sha.hexdigest()


def _hidden_file(folder: Path, layer: int) -> Path:
    """Hidden states before this layer."""
    return folder / f"hidden_{layer}.safetensors"


def _resume(run: _Run, folder: Path | None, mark: str) -> tuple[int, Tensor | None]:
    """First layer to run and the hidden states before it, if some that can be used are on disk.

    Files in the work folder that this run cannot use are removed.
    """
    if folder is None:
        return 0, None
    folder.mkdir(parents=True, exist_ok=True)
    ours = ("capture_*.safetensors", "capture_*.safetensors" + UNFINISHED)
    for pattern in (*ours, "hidden_*.safetensors" + UNFINISHED):
        for left in folder.glob(pattern):
            left.unlink()
    first_wanted = min(layer for layer in run.sites if run.wanted_of(layer))
    usable = -1
    for layer in range(first_wanted + 1):
        file = _hidden_file(folder, layer)
        if read_fingerprint(file) == mark and holds(file, run.hidden_shape):
            usable = layer
    for file in folder.glob("hidden_*.safetensors"):
        if file != _hidden_file(folder, usable):
            file.unlink()
    return (usable, map_rows(_hidden_file(folder, usable))) if usable >= 0 else (0, None)


def _batches(run: _Run) -> Iterator[slice]:
    size, total = run.settings.batch_size, len(run.tokens_BS)
    for begin in range(0, total, size):
        yield slice(begin, min(begin + size, total))


@contextmanager
def _part(run: _Run, layer: int | None) -> Iterator[Any]:
    """The model's part with gradients off; running out of memory ends in a sentence."""
    what = "the embedding" if layer is None else f"layer {layer}"
    device = torch.device(run.settings.device)
    try:
        with torch.no_grad(), decoder_part(run.skeleton, layer, device) as model:
            yield model
    except (torch.OutOfMemoryError, MemoryError) as error:
        sequences, length = run.tokens_BS.shape
        raise QuantMLAError(
            f"out of memory on {device} in {what}: lower batch_size ({run.settings.batch_size}), "
            f"the sequence length ({length}) or the number of sequences ({sequences})"
        ) from error


def _embed(run: _Run, folder: Path | None, mark: str) -> Tensor:
    rows = open_rows(run.hidden_shape, folder and _hidden_file(folder, 0), mark)
    try:
        with _part(run, None) as model:
            for batch in _batches(run):
                ids = run.tokens_BS[batch].to(run.settings.device)
                hidden = model(input_ids=ids, use_cache=False).last_hidden_state
                rows.append(require_finite("the embedding of calibration tokens", hidden))
        return rows.finish()
    except BaseException:
        rows.discard()
        raise


def _run_layer(
    run: _Run, layer: int, hidden_BSD: Tensor, mark: str
) -> tuple[Tensor | None, dict[AttentionSite, SiteRows]]:
    """Hidden states after the layer (None when nobody needs them), and what its attentions saw."""
    folder = run.settings.workdir
    after = None
    if layer < run.last:
        after = open_rows(run.hidden_shape, folder and _hidden_file(folder, layer + 1), mark)
    rows: dict[AttentionSite, SiteRows] = {}
    try:
        with _part(run, layer) as model:
            modules = _modules(run, layer, model)
            for site, module in modules.items():
                rows[site] = _site_rows(run, site, module)
            with recording({site.prefix: module for site, module in modules.items()}) as taken:
                for batch in _batches(run):
                    hidden = hidden_BSD[batch].to(run.settings.device)
                    hidden = model(inputs_embeds=hidden, use_cache=False).last_hidden_state
                    require_finite(f"layer {layer}'s output on calibration tokens", hidden)
                    if after is not None:
                        after.append(hidden)
                    for site, of_site in rows.items():
                        of_site.append(taken[site.prefix])
                    run.on_progress(f"capture layer {layer}", batch.stop, len(run.tokens_BS))
        return after.finish() if after is not None else None, rows
    except BaseException:
        for unfinished in (after, *rows.values()):
            if unfinished is not None:
                unfinished.discard()
        raise


def _modules(run: _Run, layer: int, model: Any) -> dict[AttentionSite, Any]:
    """The attention module of each wanted site."""
    sites = run.sites.get(layer, [])
    found = attentions(model.layers[layer])
    require(
        len(found) == len(sites),
        f"layer {layer} has {len(found)} latent attentions in transformers, "
        f"but {len(sites)} in the checkpoint",
    )
    return {s: module for s, module in zip(sites, found, strict=True) if s.prefix in run.wanted}


def _site_rows(run: _Run, site: AttentionSite, module: Any) -> SiteRows:
    settings = run.settings
    return SiteRows(
        site=site,
        geometry=run.adapter.geometry(run.skeleton.source.config),
        rope_order=run.adapter.cache_rope_order,
        softmax_scale=float(module.scaling),
        shape_BS=tuple(run.tokens_BS.shape),
        dtypes=(settings.latent_dtype, run.skeleton.dtype),
        folder=settings.workdir,
        memory_limit=settings.memory_limit,
    )
