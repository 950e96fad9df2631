"""The stages in order: what the subcommands `quantize` and `verify` do."""

import json
from collections.abc import Container, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantmla.arch import Adapter, adapter_for
from quantmla.capture.soundness import check_checkpoint, check_finite
from quantmla.capture.tokens import CalibrationTokens, calibration_tokens, load_tokenizer, read_text
from quantmla.card import model_card
from quantmla.checkpoint.rewrite import check_output, check_space
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.device import resolve_device
from quantmla.errors import QualityGateFailed, QuantMLAError, UsageError, require
from quantmla.fuse.checkpoint import FuseReport, fuse_checkpoint
from quantmla.learn import LayerLog, Learned, LearnSettings, check_learning, learn_checkpoint
from quantmla.lock import sole_user
from quantmla.manifest import CONFIG_KEY, log_table, manifest, read_manifest
from quantmla.method import load_method, options_for
from quantmla.plan import plan
from quantmla.progress import bars, say
from quantmla.quant.layout import layout_for
from quantmla.quant.mixed import ModelFormat, distinct_formats, require_layers
from quantmla.recipe import Calibration, Recipe, decided, resolved, to_yaml
from quantmla.run_record import run_record
from quantmla.transform.store import FILE_NAME, transforms_from_file, transforms_to_bytes
from quantmla.verify import LayerCheck, changed_tensors, verify_layers, verify_logits
from quantmla.workdir import check_makeable, empty_workdir, is_workdir

MAX_FOLD_ERROR = 1e-9  # relative, float64: a fold that is not exact is a bug or a broken checkpoint
STORED_FACTOR = 2  # of the rounding floor; on another machine single weights may round differently


def quantize(
    recipe: Recipe, *, resume: bool, dry_run: bool, overwrite: bool, progress: bool
) -> Mapping[str, Any]:
    """Learns, fuses, verifies and writes the recipe's output folder; returns a summary."""
    fmt = recipe.format.cache_format()
    options = options_for(recipe.transform.method, recipe.transform.options)
    recipe = resolved(recipe, _fusing_method(recipe, fmt).CALIBRATION)
    device = resolve_device(recipe.calibration.device)
    recipe = decided(recipe, asdict(options))
    source, adapter = _original(recipe, fmt)
    out = _output(recipe)
    check_output(source.path, out, overwrite=overwrite, marks=(CONFIG_KEY,))
    work = _Work(out.with_name(out.name + ".work"), resume, progress)
    check_makeable(work.folder, out)
    tokens = _tokens(source, recipe.calibration)
    method, seed = recipe.transform.method, recipe.calibration.seed
    settings = LearnSettings(method=method, options=options, fmt=fmt, seed=seed, device=device)
    check_space(source, out)
    if dry_run:
        kept = None if overwrite and not resume and is_workdir(work.folder) else work.folder
        with sole_user(work.folder) if work.folder.is_dir() else nullcontext():
            check_learning(source, adapter, tokens, settings, kept, resume=resume)
        return plan(source, adapter, recipe, tokens)
    check_finite(source, adapter)
    with sole_user(work.folder):
        if overwrite and not resume:
            empty_workdir(work.folder)
        learned = _learn(source, adapter, tokens, settings, work)
        report, checks = _write(source, adapter, recipe, learned, overwrite=overwrite)
        empty_workdir(work.folder)
    return _summary(out, learned, report, checks)


def _fusing_method(recipe: Recipe, fmt: ModelFormat) -> Any:
    """The recipe's method, which must leave nothing to run beside the weights."""
    name = recipe.transform.method
    method = load_method(name)
    for one in distinct_formats(fmt):
        reason = method.why_not_fused(one)
        require(reason is None, f"method {name} cannot be fused: {reason}", UsageError)
    return method


def _original(recipe: Recipe, fmt: ModelFormat) -> tuple[TensorSource, Adapter]:
    """The checkpoint to start from, whose sizes must fit the format."""
    source = open_source(recipe.model.id, revision=recipe.model.revision)
    require(
        CONFIG_KEY not in source.config,
        f"{recipe.model.id} is already fused by quantmla: give the original checkpoint",
        UsageError,
    )
    adapter = adapter_for(source.config)
    for one in distinct_formats(fmt):
        layout_for(adapter.geometry(source.config), one)
    sites = adapter.sites(source.config, source.names)
    require_layers(fmt, [site.cache_index for site in sites if not site.mtp])
    check_checkpoint(source, adapter)
    return source, adapter


def _output(recipe: Recipe) -> Path:
    require(recipe.output.folder is not None, "the recipe names no output.folder", UsageError)
    assert recipe.output.folder is not None
    out = Path(recipe.output.folder)
    require(
        out.name not in ("", "..") and "\0" not in recipe.output.folder,
        f"output folder {recipe.output.folder!r} has no name: give one, such as out/c4r4",
        UsageError,
    )
    return out


def _tokens(source: TensorSource, calibration: Calibration) -> CalibrationTokens:
    train, held_out = calibration.num_sequences, calibration.held_out_sequences
    length = calibration.sequence_length
    assert train is not None  # resolved() has filled them in
    assert held_out is not None
    assert length is not None
    return calibration_tokens(
        load_tokenizer(source.path),
        read_text(calibration.text),
        num_sequences=train,
        held_out=held_out,
        sequence_length=length,
        seed=calibration.seed,
    )


class _Work(NamedTuple):
    """Where finished layers are kept, and how the run is shown."""

    folder: Path
    resume: bool
    progress: bool


def _learn(
    source: TensorSource,
    adapter: Adapter,
    tokens: CalibrationTokens,
    settings: LearnSettings,
    work: _Work,
) -> Learned:
    prefixes = [s.prefix for s in adapter.sites(source.config, source.names) if not s.mtp]

    def on_layer(log: LayerLog) -> None:
        say(_line(log, prefixes.index(log.prefix) + 1, len(prefixes)), work.progress)

    try:
        with bars(work.progress) as report:
            return learn_checkpoint(
                source,
                adapter,
                tokens,
                settings,
                work.folder,
                resume=work.resume,
                on_progress=report,
                on_layer=on_layer,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; finished layers are in {work.folder}: go on with --resume"
        ) from None


def _line(log: LayerLog, number: int, total: int) -> str:
    def change(before: float, after: float) -> str:
        share = f" ({after / before - 1:+.0%})" if before > 0 else ""
        return f"{before:.2e} -> {after:.2e}{share}"

    return (
        f"layer {number}/{total} {log.prefix}: content output error "
        f"{change(log.before.content_output, log.after.content_output)}, rope score error "
        f"{change(log.before.rope_scores, log.after.rope_scores)}, {log.seconds:.1f} s, "
        f"peak {log.peak_bytes / 2**30:.2f} GiB"
    )


def _write(
    source: TensorSource, adapter: Adapter, recipe: Recipe, learned: Learned, *, overwrite: bool
) -> tuple[FuseReport, tuple[LayerCheck, ...]]:
    """Fuses into the output folder, then proves that the folder holds the same function."""
    assert recipe.output.folder is not None
    config = manifest(source, adapter, recipe, tuple(learned.transforms))
    extra: dict[str, bytes | str] = {
        FILE_NAME: transforms_to_bytes(learned.transforms),
        "recipe.yaml": to_yaml(recipe),
        "quantmla_log.csv": log_table(learned.logs),
        "quantmla_log.json": json.dumps([asdict(log) for log in learned.logs]) + "\n",
        "quantmla_run.json": run_record(),
        "README.md": model_card(config, learned.logs),
    }
    report = fuse_checkpoint(
        source,
        adapter,
        learned.transforms,
        Path(recipe.output.folder),
        quantmla_config=config,
        extra_files=extra,
        overwrite=overwrite,
    )
    checks = verify_layers(source, open_source(recipe.output.folder), adapter, learned.transforms)
    _require_exact(checks)
    return report, checks


def _require_exact(checks: tuple[LayerCheck, ...]) -> None:
    """Gates both errors of every layer: the fold's own, and that of the weights on disk."""
    for check in checks:
        require(
            check.fold_error <= MAX_FOLD_ERROR,
            f"fusing changed {check.prefix} by {check.fold_error:.1e} in float64, more than "
            f"{MAX_FOLD_ERROR:.0e}",
            QualityGateFailed,
        )
        require(
            check.stored_error <= STORED_FACTOR * check.rounding_error + MAX_FOLD_ERROR,
            f"the stored weights of {check.prefix} change its output by {check.stored_error:.1e}, "
            f"but rounding to their dtype explains {check.rounding_error:.1e}",
            QualityGateFailed,
        )


def _summary(
    out: Path, learned: Learned, report: FuseReport, checks: tuple[LayerCheck, ...]
) -> dict[str, Any]:
    def geometric_mean(values: list[float]) -> float:
        return float(torch.tensor(values).clamp(min=1e-30).log().mean().exp())

    before, after = ([getattr(log, when) for log in learned.logs] for when in ("before", "after"))
    return {
        "output": str(out),
        "layers_fused": len(report.fused),
        "layers_copied": list(report.copied),
        "attentions_not_latent": list(report.ignored),
        "content_output_error": {
            "before": geometric_mean([e.content_output for e in before]),
            "after": geometric_mean([e.content_output for e in after]),
        },
        "rope_score_error": {
            "before": geometric_mean([e.rope_scores for e in before]),
            "after": geometric_mean([e.rope_scores for e in after]),
        },
        "largest_fold_error": max(check.fold_error for check in checks),
        "largest_stored_error": max(check.stored_error for check in checks),
    }


def verify(out: str, *, against: str | None) -> Mapping[str, Any]:
    """Quantisation-off equivalence of a fused folder with its original: per layer, end to end."""
    fused = open_source(out)
    config = read_manifest(fused.config, out)
    base = config["base_model"] if against is None else against
    source = open_source(base)
    require(
        source.digest() == config["base_sha256"],
        f"{base} is not the checkpoint that {out} was made from: their hashes differ",
        QuantMLAError,
    )
    adapter = adapter_for(source.config)
    transforms = transforms_from_file(fused.path / FILE_NAME)
    checks = verify_layers(source, fused, adapter, transforms)
    _require_exact(checks)
    _require_copied(source, fused, adapter, transforms)
    tokens = calibration_tokens(
        load_tokenizer(source.path),
        read_text(),
        num_sequences=2,
        held_out=0,
        sequence_length=512,
        seed=0,
    )
    logits = verify_logits(source.path, fused.path, tokens.train_BS)
    return {
        "layers": [asdict(check) for check in checks],
        "largest_fold_error": max(check.fold_error for check in checks),
        "largest_stored_error": max(check.stored_error for check in checks),
        "logits_relative_error": logits.relative_error,
        "nll_before": logits.nll_before,
        "nll_drift": logits.nll_drift,
        "tokens": logits.tokens,
    }


def _require_copied(
    source: TensorSource, fused: TensorSource, adapter: Adapter, transforms: Container[str]
) -> None:
    """Every tensor that no transform touches is the original, byte for byte."""
    folded = {
        name
        for site in adapter.sites(source.config, source.names)
        if site.prefix in transforms
        for name in adapter.fused_names(source, site)
    }
    differ = changed_tensors(source, fused, folded)
    require(
        not differ,
        f"{len(differ)} tensors that fusing leaves alone are not the original's: "
        f"{', '.join(differ[:3])}",
        QualityGateFailed,
    )
