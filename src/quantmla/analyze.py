"""The stage behind `quantmla analyze`: every study of every layer, one decoder layer in memory.

The work folder beside the output keeps the hidden states that the next layer starts from, each
finished layer and each finished model study, so a killed run goes on. Random numbers depend on the
seed, the layer and the study alone.
"""

import hashlib
import importlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quantmla.analysis import LAYER_STUDIES, MODEL_STUDIES
from quantmla.analysis.bit_plan import recipe_format
from quantmla.analysis.inputs import (
    FILE_NAME,
    PLAN_NAME,
    AnalysisRun,
    fingerprint,
    open_run,
    require_absent,
)
from quantmla.analysis.report import as_text, rounded
from quantmla.analysis.subject import ModelSubject, StudyLayer
from quantmla.capture.stream import CapturedSite, CaptureSettings, captured_layers
from quantmla.doctor import gpus, versions
from quantmla.errors import QuantMLAError
from quantmla.interrupts import is_interrupt
from quantmla.kept import read_kept, write_kept
from quantmla.learn import resident, say_other_threads
from quantmla.lock import sole_user
from quantmla.method.layer import Sample
from quantmla.progress import Report, bars, say
from quantmla.recipe import AnalysisRequest, Recipe, recipe_from, to_yaml
from quantmla.workdir import (
    THREADS,
    check_workdir,
    empty_workdir,
    is_workdir,
    mark_workdir,
    write_whole,
)

VERSION = 1  # of that file
HEADLINE = (
    "rope_content_ratio",
    "rope_content_ratio_interval",
    "predictor_spearman",
    "bound_violations",
)
Found = dict[str, Any]


def analyze(request: AnalysisRequest, *, progress: bool) -> Mapping[str, Any]:
    """Writes `analysis.json` into the request's output folder; returns its headline figures."""
    run = open_run(request)
    out, text = Path(request.output) / FILE_NAME, b""
    earlier = _result_of(run, out) if request.resume and not request.overwrite else None
    if earlier is not None:  # written last: the run was killed after it, or is finished
        with sole_user(run.work):
            check_workdir(run.work, fingerprint(run), resume=True)
            empty_workdir(run.work)
        say(f"{out} is whole, of this run: nothing is left to do", progress)
        return _summary(run, out, earlier)
    require_absent(out, request)
    try:
        with sole_user(run.work):
            if request.overwrite and not request.resume:
                empty_workdir(run.work)
            layers = _layers(run, progress)
            found = _report(run, layers, _model_studies(run, layers, progress))
            out.parent.mkdir(parents=True, exist_ok=True)
            plan = found["model_studies"].get("sensitivity", {}).get("plan")
            if plan is not None:
                write_whole(out.with_name(PLAN_NAME), to_yaml(_plan_recipe(request, plan)).encode())
            text = as_text(found).encode()
            write_whole(out, text)  # last: where it is, the run is finished
            empty_workdir(run.work)
    except BaseException as error:
        if not is_interrupt(error):
            raise
        if text and out.is_file() and out.read_bytes() == text:
            raise KeyboardInterrupt(
                f"interrupted at its end: {out} is written; {run.work} can be removed"
            ) from None
        raise KeyboardInterrupt(
            f"interrupted; finished layers are in {run.work}: go on with --resume"
        ) from None
    return _summary(run, out, found)


def _result_of(run: AnalysisRun, out: Path) -> Found | None:
    """What the file holds if this run, or one that was asked the same, wrote it."""
    try:
        found = dict(json.loads(out.read_text(encoding="utf-8")))
        facts = json.loads(as_text(_facts(run)))
        same = {key: found[key] for key in facts} == facts
        here = found["header"]["versions"] == versions()
        gpu = bool(found["header"]["gpus"]) == (run.device != "cpu")
        plan = found["model_studies"].get("sensitivity", {}).get("plan")
        budget = None if plan is None else plan["budget"]
        _summary(run, out, found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return found if same and here and gpu and budget == rounded(run.request.budget) else None


def _summary(run: AnalysisRun, out: Path, found: Found) -> dict[str, Any]:
    """The headline figures of a result."""
    of_layers = {"layers": len(found["layers"])} if run.of_layers else {}
    headline = {name: found[name] for name in HEADLINE}
    plan = found["model_studies"].get("sensitivity", {}).get("plan")
    return {"output": str(out)} | of_layers | headline | _plan_summary(out, plan)


def _plan_summary(out: Path, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """The recipe of a plan, and what it gains over one format in all layers."""
    if plan is None:
        return {}
    uniform = plan["best_uniform"]
    sides = {"bit_plan": plan, next(iter(uniform["formats"].values())): uniform}
    gain = {
        name: {key: side[key] for key in ("bytes_per_token", "measured_kl")}
        for name, side in sides.items()
    }
    return {"recipe": str(out.with_name(PLAN_NAME))} | gain


def _plan_recipe(request: AnalysisRequest, plan: Mapping[str, Any]) -> Recipe:
    """What `quantize --recipe` takes; learning is from the text that the plan was measured on."""
    text = request.texts[0] if request.texts else None
    return recipe_from(
        {
            "model": {"id": request.model},
            "calibration": {"text": text},
            "format": recipe_format({int(i): name for i, name in plan["formats"].items()}),
        }
    )


def _layers(run: AnalysisRun, progress: bool) -> list[Found]:
    """Results of all layers in the model's order; those in the work folder are not made again."""
    mark = fingerprint(run)
    check_workdir(run.work, mark, resume=run.request.resume)
    say_other_threads(run.work)
    kept = run.work.glob("layer_*.json") if is_workdir(run.work) else ()
    done: dict[str, Found] = {found["prefix"]: found for found in map(read_kept, kept)}
    sites = [s for s in run.adapter.sites(run.source.config, run.source.names) if not s.mtp]
    settings = CaptureSettings(
        workdir=run.work, device=run.device, batch_size=run.protocol.batch_size
    )
    mark_workdir(run.work, mark | {THREADS: torch.get_num_threads()})
    if not run.of_layers:
        return []
    with bars(progress) as report:
        stream = captured_layers(
            run.source, run.adapter, run.tokens_BS, settings, skip=tuple(done), on_progress=report
        )
        for captured in stream:
            found = _layer(run, captured, report)
            number = captured.site.cache_index
            write_kept(run.work / f"layer_{number:04d}.json", found)
            done[captured.site.prefix] = found
            say(
                f"layer {len(done)}/{len(sites)} {found['prefix']}: {found['seconds']:.1f} s",
                progress,
            )
    return [done[site.prefix] for site in sites if site.prefix in done]


def _layer(run: AnalysisRun, captured: CapturedSite, report: Report) -> Found:
    """Every layer study of one attention."""
    began = time.perf_counter(), time.process_time()
    site, capture = captured
    device = torch.device(run.device)
    parts = (capture.unit_latent_BSR, capture.k_rope_BSE, capture.q_content_BSNP)
    layer = StudyLayer(
        prefix=site.prefix,
        weights=run.adapter.read(run.source, site, dtype=torch.float32).to(device=device),
        softmax_scale=capture.softmax_scale,
        sample=Sample(*resident((*parts, capture.q_rope_BSNE), device)),
        sequences=run.protocol.sequences,
    )
    found: Found = {"prefix": site.prefix, "layer": site.layer, "cache_index": site.cache_index}
    try:
        for number, name in enumerate(run.of_layers):
            report(f"layer {site.cache_index} studies", number, len(run.of_layers))
            draw = generator(run.protocol.seed, site.cache_index, name, device)
            found[name] = _study(name).measure(layer, run.protocol, draw)
    except torch.OutOfMemoryError as error:
        raise QuantMLAError(
            f"out of memory in {name} of {site.prefix}: use --device cpu, or --preset quick"
        ) from error
    report(f"layer {site.cache_index} studies", len(run.of_layers), len(run.of_layers))
    found["seconds"] = time.perf_counter() - began[0]
    found["cpu_seconds"] = time.process_time() - began[1]
    return found


def generator(seed: int, layer: int, study: str, device: torch.device) -> torch.Generator:
    """Random numbers that no other layer or study has."""
    sha = hashlib.sha256(f"{seed} {layer} {study}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(sha[:4], "little"))


def _study(name: str) -> Any:
    return importlib.import_module((LAYER_STUDIES | MODEL_STUDIES)[name])


def _model_studies(run: AnalysisRun, layers: Sequence[Found], progress: bool) -> Found:
    """Studies of the whole model; a finished one is not made again."""
    found: Found = {}
    for name in run.of_model:
        path = run.work / f"model_{name}.json"
        if not path.is_file():
            say(f"study {name} of the whole model", progress)
            with bars(progress) as report:
                subject = ModelSubject(
                    source=run.source,
                    adapter=run.adapter,
                    device=run.device,
                    texts=run.texts,
                    layers=layers,
                    budget=run.request.budget,
                    workdir=run.work,
                    report=_stages_said(report, progress),
                )
                result = _study(name).measure(subject, run.protocol)
            write_kept(path, result)
        found[name] = read_kept(path)
    return found


def _stages_said(report: Report, progress: bool) -> Report:
    """Each stage is also one line when it begins, as a log shows no bars."""
    begun: set[str] = set()

    def both(stage: str, done: int, total: int) -> None:
        if stage not in begun:
            begun.add(stage)
            say(stage, progress)
        report(stage, done, total)

    return both


def _facts(run: AnalysisRun) -> Found:
    """What was asked, as the file tells it."""
    return {
        "model_sha256": run.source.digest(),
        "preset": run.request.preset,
        "protocol": asdict(run.protocol),
        "texts": [
            {"name": name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for name, text in run.texts
        ],
        "studies": list(run.studies),
    }


def _report(run: AnalysisRun, layers: Sequence[Found], of_model: Found) -> Found:
    """The whole of analysis.json."""
    summary = {
        name: _study(name).summarize([layer[name] for layer in layers], run.protocol)
        for name in run.of_layers
    }
    matched, gain, bound = (summary.get(name) for name in ("matched_error", "gain", "bound"))
    return {
        "version": VERSION,
        "header": {
            "versions": versions(),
            "gpus": [gpu["name"] for gpu in gpus()] if run.device != "cpu" else [],
            "machine": platform.machine(),
            "cpu_threads": torch.get_num_threads(),
            "layer_seconds": sum(layer["seconds"] for layer in layers),
            "layer_cpu_seconds": sum(layer["cpu_seconds"] for layer in layers),
        },
        "model": run.request.model,
        **_facts(run),
        "rope_content_ratio": matched and matched["ratio"],
        "rope_content_ratio_interval": matched and matched["interval"],
        "predictor_spearman": gain and gain["models"]["full"]["spearman"],
        "bound_violations": bound and bound["violations"],
        "summary": summary,
        "layers": list(layers),
        "model_studies": of_model,
    }
