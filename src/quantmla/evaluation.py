"""The stage behind `quantmla eval`: what each method's cache costs, at equal protection.

A fused folder is measured as it is. Every other method is fitted on the base model and simulated
there, which reads the cache as its fused checkpoint would.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantmla.arch import Adapter, adapter_for
from quantmla.capture.decoder import transformers_config
from quantmla.capture.soundness import check_checkpoint
from quantmla.capture.tokens import calibration_tokens, load_tokenizer, read_text
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.device import resolve_device
from quantmla.errors import UsageError, require
from quantmla.evaluate.compare import Settings, compare, evaluation_inputs
from quantmla.evaluate.perplexity import default_text
from quantmla.evaluate.variant import Variant
from quantmla.fits import packaged_fit
from quantmla.learn import LearnSettings, learn_checkpoint
from quantmla.manifest import CONFIG_KEY, open_original, read_manifest
from quantmla.method import METHODS, load_method
from quantmla.progress import bars, say
from quantmla.quant.format import CacheFormat, paper_format, parse_format
from quantmla.quant.layout import layout_for
from quantmla.quant.mixed import (
    ModelFormat,
    distinct_formats,
    each_layer,
    format_from_json,
    uniform_format,
)
from quantmla.recipe import EvaluationRequest
from quantmla.transform.layer import LayerTransform
from quantmla.verify import load_model

BASELINES = tuple(name for name in METHODS if name != "quantmla")  # what ours is compared with
DEFAULT_CONTEXT = 2048
DEFAULT_WINDOWS = 4


class Needles(NamedTuple):
    """How much recall is asked for."""

    of_each_kind: int = 2
    context: int = 2048  # tokens


FEW_NEEDLES = Needles()


class Subject(NamedTuple):
    """What is evaluated: the unquantised base, and a fused folder where there is one."""

    base: TensorSource
    fused: TensorSource | None
    adapter: Adapter


def evaluate(
    request: EvaluationRequest, *, progress: bool, needles: Needles = FEW_NEEDLES
) -> Sequence[Mapping[str, Any]]:
    """Rows of the comparison, the unquantised model first; `needles` says how much recall."""
    subject = open_subject(request)
    check_checkpoint(subject.base, subject.adapter)
    device = resolve_device(request.device)
    fmt = format_asked(request, subject)
    methods = request.methods or default_methods(subject)
    check_methods(methods, subject)
    text = default_text() if request.text is None else read_text(request.text)
    settings = _settings(request, subject, needles)
    tokenizer = load_tokenizer(subject.base.path)
    evaluation_inputs(tokenizer, text, settings)  # whatever it refuses, it refuses before the fits
    base = loaded_model(subject.base.path, device)
    variants = [fitted_variant(subject, name, fmt, device, progress) for name in methods]
    if subject.fused is not None:
        model = loaded_model(subject.fused.path, device)
        variants.append(Variant(name=str(own_method(subject)), model=model, fmt=fmt))
    with bars(progress) as report:
        rows = compare(base, tokenizer, variants, text, settings, report)
    return [asdict(row) for row in rows]


def _settings(request: EvaluationRequest, subject: Subject, needles: Needles) -> Settings:
    """How much is evaluated, which the model's positions must reach."""
    longest = positions(subject)
    context = request.context or min(DEFAULT_CONTEXT, longest)
    require(
        context <= longest,
        f"context {context} is more than the model's {longest} positions",
        UsageError,
    )
    return Settings(
        context=context,
        limit=request.limit or DEFAULT_WINDOWS,
        needles=needles.of_each_kind,
        needle_context=min(needles.context, longest),
    )


def open_subject(request: EvaluationRequest) -> Subject:
    source = open_source(request.model)
    if CONFIG_KEY not in source.config:
        require(
            request.baseline in (None, request.model),
            f"{request.model} was not written by quantmla: it is its own baseline",
            UsageError,
        )
        return Subject(source, None, adapter_for(source.config))
    config = read_manifest(source.config, request.model)
    base = open_original(config, request.model, request.baseline, "--baseline")
    return Subject(base, source, adapter_for(base.config))


def format_asked(request: EvaluationRequest, subject: Subject) -> ModelFormat:
    """As asked, else as recorded, else c4r4."""
    fmt: ModelFormat = parse_format("c4r4" if request.format is None else request.format)
    if request.format is None and subject.fused is not None:
        fmt = format_from_json(subject.fused.config[CONFIG_KEY]["format"])
    for one in distinct_formats(fmt):
        layout_for(subject.adapter.geometry(subject.base.config), one)
    if request.unprotected:
        return each_layer(fmt, CacheFormat.unprotected)
    asked: dict[str, Any] = {"num_sink_tokens": request.sinks, "recent_window": request.recent}
    changes = {k: v for k, v in asked.items() if v is not None}
    return each_layer(fmt, lambda one: replace(one, **changes))


def own_method(subject: Subject) -> str | None:
    """The name of the fused folder's row: the method that it was made by.

    `-fused` follows where a row of the method itself has another quantiser, the published one.
    """
    if subject.fused is None:
        return None
    manifest = subject.fused.config[CONFIG_KEY]
    name, fmt = str(manifest["method"]), format_from_json(manifest["format"])
    other = load_method(name).PUBLISHED_FORMAT and each_layer(fmt, published) != fmt
    return f"{name}-fused" if other else name


def default_methods(subject: Subject) -> tuple[str, ...]:
    """The baselines, less one that the folder itself is of."""
    if subject.fused is None:
        return (*BASELINES, "quantmla")
    return tuple(name for name in BASELINES if name != own_method(subject))


def check_methods(methods: Sequence[str], subject: Subject) -> None:
    """Refuses unknown methods, and two rows of one name."""
    for name in methods:
        load_method(name)
    twice = next((name for name in methods if methods.count(name) > 1), None)
    require(twice is None, f"--methods names {twice} twice", UsageError)
    own = own_method(subject)
    require(
        own not in methods,
        f"--methods names {own}, which the folder itself is of: leave it out",
        UsageError,
    )


def fitted_variant(
    subject: Subject, name: str, fmt: ModelFormat, device: str, progress: bool
) -> Variant:
    """A method on the base model, in the published quantiser where that is what it is."""
    method = load_method(name)
    used = each_layer(fmt, published) if method.PUBLISHED_FORMAT else fmt
    transforms: Mapping[str, LayerTransform] | None = None
    one = uniform_format(fmt)
    if one is not None and one.group_size == parse_format(one.name).group_size:
        transforms = packaged_fit(subject.base.digest(), name, one.name)
    if transforms is not None:
        say(f"{name}: transforms that the package holds for this model", progress)
    else:
        say(f"fitting {name}", progress)
        transforms = fit(subject.base, subject.adapter, name, used, device, progress)
    indices = {
        site.prefix: site.cache_index
        for site in subject.adapter.sites(subject.base.config, subject.base.names)
    }
    by_index = {indices[prefix]: t for prefix, t in transforms.items()}
    return Variant(name=name, fmt=used, transforms=by_index)


def published(fmt: CacheFormat) -> CacheFormat:
    """The published quantiser at the same bits, groups and protection."""
    return paper_format(
        fmt.name,
        group_size=fmt.group_size,
        page_size=fmt.page_size,
        num_sink_tokens=fmt.num_sink_tokens,
        recent_window=fmt.recent_window,
    )


def fit(
    source: TensorSource,
    adapter: Adapter,
    name: str,
    fmt: ModelFormat,
    device: str,
    progress: bool,
) -> Mapping[str, LayerTransform]:
    """One method on packaged calibration text, with the method's own amount of it."""
    method = load_method(name)
    amounts = method.CALIBRATION
    tokens = calibration_tokens(
        load_tokenizer(source.path),
        read_text(),
        num_sequences=amounts["num_sequences"],
        held_out=amounts["held_out_sequences"],
        sequence_length=amounts["sequence_length"],
        seed=0,
    )
    settings = LearnSettings(method=name, options=method.Options(), fmt=fmt, device=device)
    with tempfile.TemporaryDirectory() as work, bars(progress) as report:
        learned = learn_checkpoint(
            source, adapter, tokens, settings, Path(work) / "fit", on_progress=report
        )
    return learned.transforms


def positions(subject: Subject) -> int:
    """Tokens that the model's positions reach."""
    config = transformers_config(subject.base.config, subject.adapter.model_type)
    return int(config.max_position_embeddings)


def loaded_model(path: Path, device: str) -> Any:
    """In float32, so that only the cache differs between variants."""
    return load_model(path, torch.float32).to(device)
