"""The stage behind `quantmla eval --tasks`: every task through every variant, resumable."""

import contextlib
import hashlib
import importlib.util
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from quantmla.capture.soundness import check_checkpoint
from quantmla.capture.tokens import load_tokenizer
from quantmla.device import resolve_device
from quantmla.doctor import gpus, versions
from quantmla.errors import UsageError, require
from quantmla.evaluate.compare import BASELINE
from quantmla.evaluate.variant import Variant, require_equal_protection
from quantmla.evaluation import (
    Subject,
    check_methods,
    fitted_variant,
    format_asked,
    loaded_model,
    open_subject,
    own_method,
    positions,
    published,
)
from quantmla.interrupts import is_interrupt
from quantmla.lock import sole_user
from quantmla.method import load_method
from quantmla.progress import Report, bars, say
from quantmla.quant.layout import bf16_row_bytes, layout_for
from quantmla.quant.mixed import describe, each_layer
from quantmla.recipe import TaskRequest
from quantmla.serve.settings import NOT_COMPILED
from quantmla.tasks.build import Built, build_task
from quantmla.tasks.checks import check_engine, check_tasks
from quantmla.tasks.registry import Asked, asked_tasks
from quantmla.tasks.results import (
    FILE,
    SCHEMA,
    VERSION,
    Document,
    finished,
    item_path,
    start_run,
    summarize,
    write_json,
)
from quantmla.tasks.scoring import Amount, chosen_items, score_items, uses_chat
from quantmla.tasks.vllm_engine import Engines, vllm_arguments
from quantmla.workdir import check_makeable

NEEDLE_LENGTH = 4096  # tokens of a needle test, or as many as the model has positions
PACKAGES = ("lm_eval", "datasets")
Done = Callable[[int], None]
Models = Callable[[Variant, Done], Any]  # lm-eval's model of a variant


class _Work(NamedTuple):
    """What is the same for all tasks."""

    request: TaskRequest
    folder: Path
    subject: Subject
    tokenizer: Any
    variants: list[Variant]
    models: Models
    amount: Amount


def evaluate_tasks(request: TaskRequest, *, progress: bool) -> Document:
    """Runs what is not yet in the run folder; returns what its tasks.json then holds.

    Raises before any model is loaded where a task is unknown or lacks data, where one would run
    code without consent, and where the folder holds another run.
    """
    require(
        importlib.util.find_spec("lm_eval") is not None,
        "tasks need lm-eval, which is not installed: pip install 'quantmla[eval]'",
        UsageError,
    )
    given = request.evaluation
    subject = open_subject(given)
    check_checkpoint(subject.base, subject.adapter)
    asked = asked_tasks(request.tasks, min(NEEDLE_LENGTH, positions(subject)))
    check_tasks(asked, request, positions(subject))
    geometry = subject.adapter.geometry(subject.base.config)
    check_engine(asked, request, geometry, fused=subject.fused is not None)
    check_methods(given.methods, subject)
    device = resolve_device(given.device)
    folder = Path(request.output)
    check_makeable(folder, folder)
    with sole_user(folder), contextlib.ExitStack() as after:
        plan = _planned(request, subject)
        document = start_run(folder, _document(request, subject, plan, device), request.resume)
        variants = [_ready(variant, request, subject, device, progress) for variant in plan]
        work = _Work(
            request,
            folder,
            subject,
            load_tokenizer(subject.base.path),
            variants,
            _models(request, subject, variants, device, after),
            Amount(given.limit, request.max_new_tokens),
        )
        try:
            return _run(work, asked, document, progress)
        except BaseException as error:
            if not is_interrupt(error):
                raise
            raise KeyboardInterrupt(
                f"interrupted; finished tasks are in {folder}: go on with --resume"
            ) from None


def _planned(request: TaskRequest, subject: Subject) -> list[Variant]:
    """The unquantised baseline, the methods asked for, and what was fused; nothing is loaded."""
    fmt, variants = format_asked(request.evaluation, subject), [BASELINE]
    for name in request.evaluation.methods:
        used = each_layer(fmt, published) if load_method(name).PUBLISHED_FORMAT else fmt
        variants.append(Variant(name=name, fmt=used))
    if subject.fused is not None:
        variants.append(Variant(name=str(own_method(subject)), fmt=fmt))
    require_equal_protection(variants)
    return variants


def _ready(
    plan: Variant, request: TaskRequest, subject: Subject, device: str, progress: bool
) -> Variant:
    """A planned variant with its weights or its learned transforms."""
    if plan.name in request.evaluation.methods:
        fmt = format_asked(request.evaluation, subject)
        return fitted_variant(subject, plan.name, fmt, device, progress)
    if plan.fmt is None or subject.fused is None or request.engine == "vllm":
        return plan
    return replace(plan, model=loaded_model(subject.fused.path, device))


def _models(
    request: TaskRequest,
    subject: Subject,
    variants: list[Variant],
    device: str,
    after: contextlib.ExitStack,
) -> Models:
    """What answers for a variant; `after` the run, what was started for it is stopped."""
    if request.engine == "vllm":
        engines = Engines()
        after.callback(engines.stop)

        def in_vllm(variant: Variant, done: Done) -> Any:
            source = subject.base if variant.fmt is None else subject.fused
            assert source is not None
            arguments = vllm_arguments(
                source.path,
                packed=variant.fmt is not None,
                compiled=subject.adapter.model_type not in NOT_COMPILED,
                positions=positions(subject),
                engines=len(variants),
            )
            return engines.get(variant.name, arguments)

        return in_vllm
    from quantmla.tasks.model import PackedCacheLM  # lm-eval may be absent until here

    base, tokenizer = loaded_model(subject.base.path, device), load_tokenizer(subject.base.path)
    return lambda variant, done: PackedCacheLM(base, tokenizer, variant, done)


def _document(
    request: TaskRequest, subject: Subject, plan: Sequence[Variant], device: str
) -> Document:
    fused = subject.fused
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "complete": False,
        "header": {
            "versions": versions() | {name: version(name) for name in PACKAGES},
            "gpus": [] if device == "cpu" else [gpu["name"] for gpu in gpus()],
            "processor": platform.machine(),
        },
        "model": {
            "id": request.evaluation.model,
            "base_sha256": subject.base.digest(),
            "fused_sha256": None if fused is None else fused.digest(),
        },
        "settings": {"device": device, "engine": request.engine, "seed": 0},
        "variants": [_described(subject, variant) for variant in plan],
        "tasks": [],
    }


def _described(subject: Subject, variant: Variant) -> Document:
    fmt, geometry = variant.fmt, subject.adapter.geometry(subject.base.config)
    sites = subject.adapter.sites(subject.base.config, subject.base.names)
    if fmt is None:
        size = float(bf16_row_bytes(geometry.kv_lora_rank, geometry.qk_rope_head_dim))
    else:
        formats = [fmt.for_layer(site.cache_index) for site in sites if not site.mtp]
        pages = [layout_for(geometry, one).page_bytes for one in formats]
        size = sum(pages) / len(pages) / fmt.page_size
    return {
        "name": variant.name,
        "format": "bf16" if fmt is None else describe(fmt),
        "sinks": 0 if fmt is None else fmt.num_sink_tokens,
        "recent": None if fmt is None else fmt.recent_window,
        "bytes_per_token": size,
    }


def _run(work: _Work, asked: Sequence[Asked], document: Document, progress: bool) -> Document:
    data = None if work.request.data is None else Path(work.request.data)
    path = work.folder / FILE
    with bars(progress) as report:
        for task in asked:
            built = build_task(task, data, work.tokenizer, work.amount.limit)
            about = _about(work, built)
            known = {t["name"]: t for t in document["tasks"]} | {about["name"]: about}
            document = {**document, "tasks": list(known.values())}
            for variant in work.variants:
                if finished(work.folder, variant.name, about) is None:
                    say(f"{task.label}: {variant.name}", progress)
                    part = _one(work, built, variant, report)
                    if not path.is_file():  # first: by it a folder is known as a run's
                        write_json(path, summarize(work.folder, document))
                    target = item_path(work.folder, variant.name, task.label)
                    write_json(target, {"task": about} | part)
                    write_json(path, summarize(work.folder, document))
    document = summarize(work.folder, document)
    write_json(path, document)
    return document


def _about(work: _Work, built: Built) -> Document:
    """A task as tasks.json describes it."""
    spec = built.asked.spec
    task = next(iter(built.parts.values()))
    where = "quantmla" if spec.folder is None else "lm-eval"
    chosen = chosen_items(built.sizes, work.amount.limit)
    first = {name: built.parts[name].eval_docs[indices[0]] for name, indices in chosen.items()}
    digest = hashlib.sha256(json.dumps(first, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "name": built.asked.label,
        "kind": spec.kind,
        "metric": spec.metric,
        "shots": spec.shots,
        "shots_from": built.shots_from,
        "max_new_tokens": work.amount.new_tokens(spec, positions(work.subject)),
        "chat": uses_chat(built, work.tokenizer),
        "definition": f"{where} {spec.lm_eval_name} {task.VERSION}",
        "data": built.origin.name,
        "data_sha256": built.origin.sha256,
        "first_items_sha256": digest,
        "items": sum(len(indices) for indices in chosen.values()),
        "items_in_all": sum(built.sizes.values()),
    }


def _one(work: _Work, built: Built, variant: Variant, report: Report) -> Document:
    stage, seen = f"{built.asked.label} {variant.name}", 0
    total = sum(len(x) for x in chosen_items(built.sizes, work.amount.limit).values())

    def done(count: int) -> None:
        nonlocal seen
        seen = min(total, seen + count)
        report(stage, seen, total)

    began = time.perf_counter()
    lm = work.models(variant, done)
    items = score_items(built, lm, work.tokenizer, work.amount)
    cost = {
        "seconds": round(time.perf_counter() - began, 2),
        "truncated": getattr(lm, "truncated", None),  # only our own model counts these
        "cache_bytes": getattr(lm, "cache_bytes", None) or None,
    }
    return {"cost": cost, "items": items}
