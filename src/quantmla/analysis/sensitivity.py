"""What quantising one path of one layer costs the whole model, by width; and a bit plan from it.

A cost is the mean KL divergence per token from the unquantised model, every token quantised, when
only one path of one layer is stored in so many bits and all else in bf16, less what bf16 alone
does. Transforms are learned for each width first, with few steps: what they gain differs by layer
and path, and so would the plan. All of it is measured on the first text, on windows that are not
learned from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantmla.analysis.bit_plan import (
    Choice,
    costs_by_layer,
    layer_choices,
    plan_bits,
    recipe_format,
    uniform_plan,
)
from quantmla.analysis.inputs import AnalysisRun
from quantmla.analysis.protocol import Protocol
from quantmla.analysis.subject import PATHS, CachePath, ModelSubject
from quantmla.capture.tokens import CalibrationTokens, calibration_tokens, load_tokenizer
from quantmla.checkpoint.source import TensorSource
from quantmla.errors import UsageError, require
from quantmla.evaluate.perplexity import measure_text
from quantmla.evaluate.variant import Variant
from quantmla.kept import read_kept, tensors_of, write_kept
from quantmla.learn import LearnSettings, learn_checkpoint
from quantmla.manifest import CONFIG_KEY
from quantmla.method.quantmla import Options
from quantmla.mla.geometry import MlaGeometry
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.quant.layout import bf16_row_bytes
from quantmla.quant.mixed import ModelFormat, each_layer, model_format
from quantmla.recipe import recipe_from
from quantmla.transform.layer import LayerTransform
from quantmla.transform.store import transforms_from_file, transforms_to_bytes
from quantmla.verify import load_model
from quantmla.workdir import remove_workdir

WIDTHS = (2, 3, 4, 8)
LEARNED = (2, 3, 4)  # wider ones take the transform of the widest of these
FEW_STEPS = Options(
    steps=100, polish_steps=0, rope_steps=40, gram_sequences=8, probes=2, rope_batch=4
)
TRAIN_WINDOWS, HELD_OUT_WINDOWS = 16, 4
Fits = Mapping[int, Mapping[int, LayerTransform]]  # by width, then by cache index


def check(run: AnalysisRun) -> None:
    """UsageError, before any work, for a text that is too short or a budget that none can keep."""
    sensitivity_windows(run.source, run.texts[0][1], run.protocol)
    budget = run.request.budget
    if budget is not None:
        require(
            CONFIG_KEY not in run.source.config,
            f"{run.request.model} is already fused by quantmla: plan with the original checkpoint",
            UsageError,
        )
        check_budget(run.adapter.geometry(run.source.config), budget)


def check_budget(geometry: MlaGeometry, budget: float) -> None:
    """UsageError for bytes per token and layer that no format keeps, or that bf16 does."""
    free: dict[tuple[str, int], float] = {(p, bits): 0.0 for p in PATHS for bits in WIDTHS}
    plan_bits({0: layer_choices(free, geometry)}, budget)
    whole = bf16_row_bytes(geometry.kv_lora_rank, geometry.qk_rope_head_dim)
    require(
        budget < whole,
        f"budget {budget:g} bytes per token leaves nothing to plan: bf16 takes {whole}",
        UsageError,
    )


def measure(model: ModelSubject, protocol: Protocol) -> dict[str, Any]:
    """Costs by layer, path and bits; with a budget also the plan, measured on the same windows."""
    tokens = sensitivity_windows(model.source, model.texts[0][1], protocol)
    fits = {bits: _fit(model, tokens, bits) for bits in LEARNED}
    base = load_model(model.source.path, torch.float32).to(model.device)
    windows = [row[None] for row in tokens.held_out_BS[HELD_OUT_WINDOWS:]]
    indices = sorted(fits[LEARNED[-1]])
    floor = rounding_floor(base, fits, windows)
    costs: list[dict[str, Any]] = []
    for done, index in enumerate(indices):
        model.report("sensitivity by layer", done, len(indices))
        costs += above(floor, layer_divergences(base, fits, windows, index, model.workdir))
    model.report("sensitivity by layer", len(indices), len(indices))
    geometry = model.adapter.geometry(model.source.config)
    choices = {i: layer_choices(c, geometry) for i, c in costs_by_layer(costs).items()}
    plan = None
    if model.budget is not None:
        plan = _plan(base, fits, windows, choices, model.budget)
    return {
        "text": model.texts[0][0],
        "windows": len(windows),
        "length": protocol.length,
        "learning": asdict(FEW_STEPS),
        "floor": floor,
        "costs": costs,
        "plan": plan,
    }


def sensitivity_windows(source: TensorSource, text: str, protocol: Protocol) -> CalibrationTokens:
    """Windows to learn from; and others, the first HELD_OUT_WINDOWS to choose steps by."""
    return calibration_tokens(
        load_tokenizer(source.path),
        text,
        num_sequences=TRAIN_WINDOWS,
        held_out=HELD_OUT_WINDOWS + protocol.sequences,
        sequence_length=protocol.length,
        seed=protocol.seed,
    )


def _fit(model: ModelSubject, tokens: CalibrationTokens, bits: int) -> dict[int, LayerTransform]:
    """Transforms for one width of both paths, by cache index; kept in the work folder."""
    path = model.workdir / f"sensitivity_c{bits}r{bits}.json"
    if not path.is_file():
        settings = LearnSettings(
            method="quantmla",
            options=FEW_STEPS,
            fmt=parse_format(f"c{bits}r{bits}"),
            device=model.device,
        )
        chosen = CalibrationTokens(tokens.train_BS, tokens.held_out_BS[:HELD_OUT_WINDOWS])
        stage = f"transforms for {bits} bits"
        work = path.with_suffix(".work")  # a killed fit goes on after its last finished layer
        learned = learn_checkpoint(
            model.source,
            model.adapter,
            chosen,
            settings,
            work,
            resume=True,
            on_progress=lambda _, done, total: model.report(stage, done, total),
        )
        write_kept(path, {"bits": bits}, transforms_to_bytes(learned.transforms))
        remove_workdir(work)
    read_kept(path)
    sites = model.adapter.sites(model.source.config, model.source.names)
    indices = {site.prefix: site.cache_index for site in sites}
    return {indices[prefix]: t for prefix, t in transforms_from_file(tensors_of(path)).items()}


def composed(fits: Fits, index: int, fmt: CacheFormat) -> LayerTransform:
    """One layer's transform with each path's part from the fit of its width."""

    def of(bits: int) -> LayerTransform:
        return fits[min(bits, max(fits))][index]

    return LayerTransform(of(fmt.content_bits).content, of(fmt.rope_bits).rope)


def variant(name: str, fits: Fits, fmt: ModelFormat) -> Variant:
    """A model whose layers are stored in `fmt`, each after its widths' own transform."""
    indices = fits[max(fits)]
    transforms = {index: composed(fits, index, fmt.for_layer(index)) for index in indices}
    return Variant(name=name, fmt=fmt, transforms=transforms)


def one_path(index: int, path: CachePath, bits: int) -> ModelFormat:
    """One path of one layer in `bits`, all else in bf16; nothing is protected."""
    name = f"c{bits}r16" if path == "content" else f"c16r{bits}"
    plain, narrow = (parse_format(n).unprotected() for n in ("c16r16", name))
    return model_format(plain, {index: narrow})


def rounding_floor(base: nn.Module, fits: Fits, windows: Sequence[Tensor]) -> float:
    """What a cache in bf16 costs, which is in every cell's divergence too."""
    plain = variant("bf16", fits, parse_format("c16r16").unprotected())
    return measure_text(base, [plain], windows)[0].overall.kl_mean


def above(floor: float, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their cost: small independent errors add up in divergence."""
    return [{**row, "cost": max(0.0, row["kl"] - floor)} for row in rows]


def layer_divergences(
    base: nn.Module, fits: Fits, windows: Sequence[Tensor], index: int, workdir: Path
) -> list[dict[str, Any]]:
    """Rows of one layer; kept in the work folder."""
    kept = workdir / f"sensitivity_{index:04d}.json"
    if kept.is_file():
        return list(read_kept(kept))
    cells = [(path, bits) for path in PATHS for bits in WIDTHS]
    variants = [
        variant(f"{path} {bits}", fits, one_path(index, path, bits)) for path, bits in cells
    ]
    rows = [
        {
            "layer": index,
            "path": path,
            "bits": bits,
            "kl": result.overall.kl_mean,
            "kl_error": result.overall.kl_error,
        }
        for (path, bits), result in zip(cells, measure_text(base, variants, windows), strict=True)
    ]
    write_kept(kept, rows)
    return rows


def _plan(
    base: nn.Module,
    fits: Fits,
    windows: Sequence[Tensor],
    choices: Mapping[int, Sequence[Choice]],
    budget: float,
) -> dict[str, Any]:
    """The plan beside the best uniform format that keeps the budget."""
    best = plan_bits(choices, budget)
    names = {choice.format for choice in next(iter(choices.values()))}
    uniform = [uniform_plan(choices, name) for name in sorted(names)]
    within = [plan for plan in uniform if plan.bytes_per_token <= budget]
    plans = [best, min(within, key=lambda plan: plan.cost)]
    formats = [each_layer(planned_format(p.formats), CacheFormat.unprotected) for p in plans]
    measured = measure_text(base, [variant(f.name, fits, f) for f in formats], windows)
    rows = [
        {
            "bytes_per_token": plan.bytes_per_token,
            "predicted_kl": plan.cost,
            "measured_kl": result.overall.kl_mean,
            "formats": {str(index): name for index, name in plan.formats.items()},
        }
        for plan, result in zip(plans, measured, strict=True)
    ]
    return {"budget": budget, **rows[0], "best_uniform": rows[1]}


def planned_format(formats: Mapping[int, str]) -> ModelFormat:
    """The cache format of a plan, as its recipe has it."""
    return recipe_from({"format": recipe_format(formats)}).format.cache_format()
