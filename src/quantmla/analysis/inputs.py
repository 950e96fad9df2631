"""What `quantmla analyze` works on: everything that can be refused is refused here."""

import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantmla import __version__
from quantmla.analysis import LAYER_STUDIES, MODEL_STUDIES
from quantmla.analysis.protocol import PRESETS, Protocol
from quantmla.arch import Adapter, adapter_for
from quantmla.capture.soundness import check_checkpoint
from quantmla.capture.tokens import calibration_tokens, load_tokenizer, packaged_texts, read_text
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.device import resolve_device
from quantmla.errors import UnsupportedModel, UsageError, require
from quantmla.quant.layout import layout_for
from quantmla.recipe import AnalysisRequest
from quantmla.workdir import check_makeable, is_workdir

FILE_NAME = "analysis.json"
PLAN_NAME = "bit_plan.yaml"  # beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisRun:
    """What is analysed, and how."""

    request: AnalysisRequest
    protocol: Protocol
    studies: tuple[str, ...]
    source: TensorSource
    adapter: Adapter
    device: str
    texts: tuple[tuple[str, str], ...]  # name and text
    tokens_BS: Tensor  # cell after cell
    work: Path

    @property
    def of_layers(self) -> tuple[str, ...]:
        return tuple(name for name in self.studies if name in LAYER_STUDIES)

    @property
    def of_model(self) -> tuple[str, ...]:
        return tuple(name for name in self.studies if name in MODEL_STUDIES)


def open_run(request: AnalysisRequest) -> AnalysisRun:
    """The checked request; UsageError or UnsupportedModel before any work."""
    known = (*LAYER_STUDIES, *MODEL_STUDIES)
    for name in request.studies:
        require(name in known, f"unknown study {name!r}; known: {', '.join(known)}", UsageError)
    require(
        request.preset in PRESETS,
        f"unknown preset {request.preset!r}; known: {', '.join(PRESETS)}",
        UsageError,
    )
    protocol = PRESETS[request.preset]
    device = resolve_device(request.device)
    work = _work_folder(request)
    source = open_source(request.model)
    adapter = adapter_for(source.config)
    geometry = adapter.geometry(source.config)
    layout_for(geometry, protocol.direction_format())
    require(
        geometry.qk_rope_head_dim > 0,
        f"{request.model} has no rope path: there are not two paths to compare",
        UnsupportedModel,
    )
    check_checkpoint(source, adapter)
    texts = tuple((Path(name).name, read_text(name)) for name in request.texts)
    texts = texts or packaged_texts()
    run = AnalysisRun(
        request=request,
        protocol=protocol,
        studies=request.studies or _default_studies(request),
        source=source,
        adapter=adapter,
        device=device,
        texts=texts,
        tokens_BS=_tokens(source, texts, protocol),
        work=work,
    )
    require(
        request.budget is None or "sensitivity" in run.studies,
        "a budget needs the study sensitivity: add it to --studies",
        UsageError,
    )
    for name in run.of_model:
        importlib.import_module(MODEL_STUDIES[name]).check(run)
    return run


def _default_studies(request: AnalysisRequest) -> tuple[str, ...]:
    """Studies of the whole model hold all of it in memory: they run for a budget, or when named."""
    return (*LAYER_STUDIES, *(() if request.budget is None else MODEL_STUDIES))


def _work_folder(request: AnalysisRequest) -> Path:
    out = Path(request.output)
    require(
        out.name not in ("", "..") and "\0" not in request.output,
        f"output folder {request.output!r} has no name: give one, such as out/analysis",
        UsageError,
    )
    work = out.with_name(out.name + ".work")
    for folder in (out, work):
        check_makeable(folder, out)
    result = out / FILE_NAME  # of a run that is resumed it may be its own, which `analyze` asks
    if not request.resume:
        require_absent(result, request)
    # a stopped run may have left its own
    own = request.resume and (is_workdir(work) or result.exists())
    if request.budget is not None and not own:
        require_absent(out / PLAN_NAME, request)
    return work


def require_absent(file: Path, request: AnalysisRequest) -> None:
    """Refuses to replace a file that the request does not say is to be replaced."""
    require(
        request.overwrite or not file.exists(),
        f"{file} exists: choose another folder, or replace it with --overwrite",
        UsageError,
    )


def _tokens(source: TensorSource, texts: Sequence[tuple[str, str]], protocol: Protocol) -> Tensor:
    """Disjoint windows of each text, cell after cell, [B, S]."""
    tokenizer = load_tokenizer(source.path)
    windows = []
    for name, text in texts:
        try:
            found = calibration_tokens(
                tokenizer,
                text,
                num_sequences=protocol.draws * protocol.sequences,
                held_out=0,
                sequence_length=protocol.length,
                seed=protocol.seed,
            )
        except UsageError as error:
            raise UsageError(f"text {name}: {error}") from None
        # such rows are all alike: attention to others changes nothing, and gains have no ratio
        require(
            bool((found.train_BS != found.train_BS[:, :1]).any(1).all()),
            f"text {name} repeats one token through a window of {protocol.length}: attention has "
            "nothing to tell apart there; give another text",
            UsageError,
        )
        windows.append(found.train_BS)
    return torch.cat(windows)


def fingerprint(run: AnalysisRun) -> dict[str, Any]:
    """All that decides the figures."""
    ids = run.tokens_BS.contiguous().numpy()
    return {
        "model": run.source.digest(),
        "tokens": hashlib.sha256(repr(ids.shape).encode() + ids.tobytes()).hexdigest(),
        "protocol": asdict(run.protocol),
        "studies": list(run.studies),
        "budget": run.request.budget,
        "device": torch.device(run.device).type,
        "quantmla": __version__,
        "torch": torch.__version__,
    }
