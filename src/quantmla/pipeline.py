"""The stages in order: what the subcommands `quantize` and `verify` do."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantmla.arch import Adapter, adapter_for
from quantmla.capture.soundness import check_checkpoint, check_finite
from quantmla.capture.tokens import CalibrationTokens, calibration_tokens, load_tokenizer, read_text
from quantmla.card import model_card
from quantmla.checkpoint.rewrite import check_output, check_space, remove_replaced
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.device import resolve_device
from quantmla.errors import UsageError, require
from quantmla.finished import LOG, finished_output
from quantmla.fuse.checkpoint import CONFIG_KEY, fuse_checkpoint
from quantmla.fuse.copied import require_copied, require_same_files
from quantmla.interrupts import is_interrupt, words
from quantmla.layer_log import LayerLog, Learned, layer_line
from quantmla.learn import LearnSettings, check_learning, fingerprint, learn_checkpoint
from quantmla.lock import sole_user
from quantmla.manifest import log_table, manifest, open_original, read_manifest
from quantmla.method import load_method, options_for
from quantmla.plan import plan
from quantmla.progress import bars, say
from quantmla.quant.layout import layout_for
from quantmla.quant.mixed import ModelFormat, distinct_formats, require_layers
from quantmla.recipe import Calibration, Recipe, decided, resolved, to_yaml
from quantmla.run_record import FILE_NAME as RUN
from quantmla.run_record import run_record
from quantmla.transform.store import FILE_NAME, transforms_from_file, transforms_to_bytes
from quantmla.verify import (
    LayerCheck,
    require_exact,
    verify_layers,
    verify_logits,
)
from quantmla.workdir import check_makeable, check_workdir, empty_workdir, is_workdir


def quantize(
    recipe: Recipe, *, resume: bool, dry_run: bool, overwrite: bool, progress: bool
) -> Mapping[str, Any]:
    """Learns, fuses, writes and verifies the recipe's output folder; returns a summary."""
    fmt = recipe.format.cache_format()
    options = options_for(recipe.transform.method, recipe.transform.options)
    recipe = resolved(recipe, _fusing_method(recipe, fmt).CALIBRATION)
    device = resolve_device(recipe.calibration.device)
    recipe = decided(recipe, asdict(options))
    source, adapter = _original(recipe, fmt)
    out = _output(recipe)
    method, seed = recipe.transform.method, recipe.calibration.seed
    settings = LearnSettings(method=method, options=options, fmt=fmt, seed=seed, device=device)
    tokens = _tokens(source, recipe.calibration)
    run, written = fingerprint(source, tokens, settings), None
    if resume and not overwrite and out.exists():
        written = finished_output(source, adapter, recipe, run)
    whole = written is not None
    work = _Work(out.with_name(out.name + ".work"), run, resume, overwrite, written, progress)
    check_output(source.path, out, overwrite=overwrite or whole, marks=(CONFIG_KEY,))
    check_makeable(work.folder, out)
    if not whole:
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
        learned, checks = _run(source, adapter, recipe, tokens, settings, work)
        try:
            remove_replaced(out)
            empty_workdir(work.folder)
        except KeyboardInterrupt:
            what = f"{out} is written and checked; {work.folder} can be removed"
            raise KeyboardInterrupt(f"interrupted at its end: {what}") from None
    return _summary(source, adapter, out, learned, checks)


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
    run: dict[str, Any]  # the fingerprint of what is learned
    resume: bool
    overwrite: bool
    written: Learned | None  # what the output is made of, if the run that is resumed wrote it
    progress: bool


def _run(
    source: TensorSource,
    adapter: Adapter,
    recipe: Recipe,
    tokens: CalibrationTokens,
    settings: LearnSettings,
    work: _Work,
) -> tuple[Learned, tuple[LayerCheck, ...]]:
    """Learns, writes the output, then proves that it holds the same function."""
    out, run = _output(recipe), work.run
    try:
        if work.written is None:
            learned = _learn(source, adapter, tokens, settings, work)
            _write(source, adapter, recipe, learned, run, overwrite=work.overwrite)
        else:
            check_workdir(work.folder, run, resume=True)
            say(f"{out} is written: its check is all that is left to do", work.progress)
            learned = work.written
        checks = verify_layers(source, open_source(out), adapter, learned.transforms)
        require_exact(checks)
        return learned, checks
    except BaseException as error:
        if not is_interrupt(error):
            raise
        how, said = "go on with --resume", f"{words(error)}; finished layers are in {work.folder}"
        if finished_output(source, adapter, recipe, run) is not None:
            said = f"interrupted; {out} is written but not checked"
            how += f", or check it with `quantmla verify {out}`"
        raise KeyboardInterrupt(f"{said}: {how}") from None


def _learn(
    source: TensorSource,
    adapter: Adapter,
    tokens: CalibrationTokens,
    settings: LearnSettings,
    work: _Work,
) -> Learned:
    prefixes = [s.prefix for s in adapter.sites(source.config, source.names) if not s.mtp]

    def on_layer(log: LayerLog) -> None:
        say(layer_line(log, prefixes.index(log.prefix) + 1, len(prefixes)), work.progress)

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


def _write(
    source: TensorSource,
    adapter: Adapter,
    recipe: Recipe,
    learned: Learned,
    run: Mapping[str, Any],
    *,
    overwrite: bool,
) -> None:
    """Fuses into the output folder, with all that stands beside the weights."""
    config = manifest(source, adapter, recipe, tuple(learned.transforms))
    extra: dict[str, bytes | str] = {
        FILE_NAME: transforms_to_bytes(learned.transforms),
        "recipe.yaml": to_yaml(recipe),
        "quantmla_log.csv": log_table(learned.logs),
        LOG: json.dumps([asdict(log) for log in learned.logs]) + "\n",
        RUN: run_record(run),
        "README.md": model_card(config, learned.logs),
    }
    fuse_checkpoint(
        source,
        adapter,
        learned.transforms,
        _output(recipe),
        quantmla_config=config,
        extra_files=extra,
        overwrite=overwrite,
    )


def _summary(
    source: TensorSource,
    adapter: Adapter,
    out: Path,
    learned: Learned,
    checks: tuple[LayerCheck, ...],
) -> dict[str, Any]:
    def geometric_mean(values: list[float]) -> float:
        return float(torch.tensor(values).clamp(min=1e-30).log().mean().exp())

    before, after = ([getattr(log, when) for log in learned.logs] for when in ("before", "after"))
    prefixes = [site.prefix for site in adapter.sites(source.config, source.names)]
    return {
        "output": str(out),
        "layers_fused": len(learned.transforms),
        "layers_copied": [prefix for prefix in prefixes if prefix not in learned.transforms],
        "attentions_not_latent": list(adapter.ignored(source.config, source.names)),
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
    source = open_original(config, out, against, "--against")
    require_same_files(source, fused)
    adapter = adapter_for(source.config)
    transforms = transforms_from_file(fused.path / FILE_NAME)
    checks = verify_layers(source, fused, adapter, transforms)
    require_exact(checks)
    require_copied(source, fused, adapter, transforms)
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
