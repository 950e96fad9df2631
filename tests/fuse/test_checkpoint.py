"""Fused checkpoints, run by stock transformers against the originals."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import CASES, build, logits, random_tokens, random_transform, rewrite_tensors

from quantmla.arch import Adapter, adapter_for
from quantmla.checkpoint.block_fp8 import SCALE_SUFFIX, quantize_blocks
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.errors import UsageError
from quantmla.fuse.checkpoint import FuseReport, fuse_checkpoint, nmse
from quantmla.transform.layer import LayerTransform
from quantmla.verify import attention_output, random_case, relative_error

Tiny = Callable[[str], Path]
TOLERANCE = 1e-4  # of logits in float32, relative


def transforms_of(source: TensorSource, adapter: Adapter) -> dict[str, LayerTransform]:
    g = adapter.geometry(source.config)
    return {
        site.prefix: random_transform(g.kv_lora_rank, g.qk_rope_head_dim // 2, 7 + i)
        for i, site in enumerate(adapter.sites(source.config, source.names))
    }


def fuse(
    source: TensorSource,
    out: Path,
    transforms: Mapping[str, LayerTransform] | None = None,
    adapter: Adapter | None = None,
    **options: Any,
) -> FuseReport:
    right = adapter_for(source.config)
    if transforms is None:
        transforms = transforms_of(source, right)
    options = {"quantmla_config": {"version": 1}, "extra_files": {}} | options
    return fuse_checkpoint(source, adapter or right, transforms, out, **options)


@pytest.fixture(scope="module")
def original_logits(tiny_checkpoint: Tiny) -> Callable[[str], torch.Tensor]:
    kept: dict[str, torch.Tensor] = {}

    def of(case: str) -> torch.Tensor:
        if case not in kept:
            kept[case] = logits(tiny_checkpoint(case), random_tokens())
        return kept[case]

    return of


def assert_same_layout(a: TensorSource, b: TensorSource) -> None:
    assert b.names == a.names
    for name in a.names:
        assert (b.shape(name), b.dtype(name), b.shard_of[name]) == (
            a.shape(name),
            a.dtype(name),
            a.shard_of[name],
        )


@pytest.mark.parametrize("case", CASES)
def test_logits_of_the_fused_model_are_those_of_the_original(
    case: str, tiny_checkpoint: Tiny, tmp_path: Path, original_logits
):
    source = open_source(tiny_checkpoint(case))
    report = fuse(source, tmp_path / "out")
    out = open_source(tmp_path / "out")
    assert_same_layout(source, out)
    assert report.copied == ()
    assert len(report.fused) == {"longcat_flash": 4, "kimi_linear": 1}.get(case, 2)
    for prefix, tensors in report.rounding.items():
        assert not torch.equal(
            out.tensor(f"{prefix}.kv_b_proj.weight"), source.tensor(f"{prefix}.kv_b_proj.weight")
        )
        assert all(
            0 <= value < 2**-46 for value in tensors.values()
        )  # half a step of float32, squared
    after = logits(tmp_path / "out", random_tokens())
    assert relative_error(after, original_logits(case)) < TOLERANCE


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3", "deepseek_v3_half", "minicpm3"])
def test_the_wrong_rope_layout_is_seen(
    case: str, tiny_checkpoint: Tiny, tmp_path: Path, original_logits
):
    source = open_source(tiny_checkpoint(case))
    right = adapter_for(source.config)
    other = "half" if right.weight_rope_order == "interleaved" else "interleaved"
    fuse(source, tmp_path / "out", adapter=replace(right, weight_rope_order=other))
    after = logits(tmp_path / "out", random_tokens())
    assert relative_error(after, original_logits(case)) > 10 * TOLERANCE


@pytest.mark.parametrize("case", ["deepseek_v3", "longcat_flash", "kimi_linear"])
def test_a_bias_that_is_not_rotated_is_seen(
    case: str, tiny_checkpoint: Tiny, tmp_path: Path, original_logits
):
    source = open_source(tiny_checkpoint(case))
    fuse(source, tmp_path / "out")
    old = {n: source.tensor(n) for n in source.names if n.endswith("kv_a_proj_with_mqa.bias")}
    assert old
    broken = rewrite_tensors(tmp_path / "out", tmp_path / "broken", old)
    assert relative_error(logits(broken, random_tokens()), original_logits(case)) > 10 * TOLERANCE


def test_a_forgotten_multiplier_is_seen(tiny_checkpoint: Tiny, tmp_path: Path, original_logits):
    source = open_source(tiny_checkpoint("longcat_flash"))
    right = adapter_for(source.config)
    transforms = transforms_of(source, right)
    fuse(source, tmp_path / "out", transforms, replace(right, latent_multipliers=False))
    # Without the multipliers the fold is still exact, only the cached latent is another one.
    after = logits(tmp_path / "out", random_tokens())
    assert relative_error(after, original_logits("longcat_flash")) < TOLERANCE
    prefix, transform = next(iter(transforms.items()))
    stored = open_source(tmp_path / "out").float_tensor(f"{prefix}.kv_a_layernorm.weight")
    assert relative_error(stored * (64 / 48) ** 0.5, transform.content.scale_R) > 0.1


def test_mtp_layers_are_copied_or_fused_but_never_dropped(tiny_checkpoint: Tiny, tmp_path: Path):
    tiny = open_source(tiny_checkpoint("deepseek_v3"))
    extra = {
        name.replace("layers.1.", "layers.2."): tiny.tensor(name)
        for name in tiny.names
        if "layers.1." in name
    } | {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}
    source = open_source(rewrite_tensors(tiny.path, tmp_path / "mtp", extra))
    transforms = transforms_of(source, adapter_for(source.config))
    mtp = "model.layers.2.self_attn"

    report = fuse(source, tmp_path / "fused", transforms)
    fused = open_source(tmp_path / "fused")
    assert_same_layout(source, fused)
    assert (report.copied, report.fused[-1]) == ((), mtp)
    name = f"{mtp}.kv_a_layernorm.weight"
    assert torch.equal(fused.tensor(name), transforms[mtp].content.scale_R.float())

    del transforms[mtp]
    report = fuse(source, tmp_path / "copied", transforms)
    copied = open_source(tmp_path / "copied")
    assert_same_layout(source, copied)
    assert report.copied == (mtp,)
    for name in source.names:
        if ".layers.2." in name:
            assert torch.equal(copied.tensor(name), source.tensor(name))


def test_layers_without_a_transform_are_copied(
    tiny_checkpoint: Tiny, tmp_path: Path, original_logits
):
    source = open_source(tiny_checkpoint("longcat_flash"))
    transforms = transforms_of(source, adapter_for(source.config))
    for prefix in (next(iter(transforms)), list(transforms)[-1]):
        del transforms[prefix]
    report = fuse(source, tmp_path / "out", transforms)
    assert report.copied == ("model.layers.0.self_attn.0", "model.layers.1.self_attn.1")
    after = logits(tmp_path / "out", random_tokens())
    assert relative_error(after, original_logits("longcat_flash")) < TOLERANCE


def test_fp8_checkpoints_stay_fp8_and_their_rounding_is_reported(
    tiny_checkpoint: Tiny, tmp_path: Path
):
    tiny = open_source(tiny_checkpoint("glm4_moe_lite"))
    attention = ("kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj", "o_proj", "q_a_proj")
    change: dict[str, torch.Tensor] = {}
    for name in tiny.names:
        if name.endswith(tuple(f"{part}.weight" for part in attention)):
            change[name], change[name + SCALE_SUFFIX] = quantize_blocks(
                tiny.float_tensor(name), (64, 64)
            )
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
    source = open_source(rewrite_tensors(tiny.path, tmp_path / "fp8", change, **config))
    adapter = adapter_for(source.config)
    sites = adapter.sites(source.config, source.names)
    for site in sites:  # nothing folded: not a byte changes
        for name, x in adapter.write(adapter.read(source, site), site, source).items():
            assert torch.equal(x.view(torch.uint8), source.tensor(name).view(torch.uint8)), name

    report = fuse(source, tmp_path / "out")
    fused = open_source(tmp_path / "out")
    assert_same_layout(source, fused)
    g = adapter.geometry(source.config)
    for site in sites:
        rounding = report.rounding[site.prefix]
        for part in ("kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj"):
            # e4m3: a uniform error of half a step is at most 2**-8 / 3 of a value's square
            assert 1e-5 < rounding[f"{site.prefix}.{part}.weight"] < 2**-8 / 3 * 1.5
            scale = f"{site.prefix}.{part}.weight{SCALE_SUFFIX}"
            assert not torch.equal(fused.tensor(scale), source.tensor(scale))
        case = random_case(g, 32, 0)
        before = attention_output(adapter.read(source, site), g, case)
        after = attention_output(adapter.read(fused, site), g, case)
        assert relative_error(after, before) < 0.15  # some rounding steps of about 3 % each


def test_the_stock_config_reader_sees_the_same_model(tiny_checkpoint: Tiny, tmp_path: Path):
    source = open_source(tiny_checkpoint("deepseek_v3"))
    fuse(source, tmp_path / "out", quantmla_config={"version": 1, "format": {"content_bits": 4}})
    before, after = (
        transformers.AutoConfig.from_pretrained(path).to_dict() | {"_name_or_path": ""}
        for path in (source.path, tmp_path / "out")
    )
    assert after.pop("quantmla_config") == {"version": 1, "format": {"content_bits": 4}}
    assert after == before
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_bf16_rounding_is_reported(tmp_path: Path):
    source = open_source(build("deepseek_v3", tmp_path / "model", dtype=torch.bfloat16))
    report = fuse(source, tmp_path / "out")
    values = [v for tensors in report.rounding.values() for v in tensors.values()]
    # 8 fraction bits with the implicit one: half a step is 2**-9 of a value at most
    assert 1e-7 < max(values) < 2**-18


def test_other_models_ignored_layers_are_reported(tiny_checkpoint: Tiny, tmp_path: Path):
    report = fuse(open_source(tiny_checkpoint("kimi_linear")), tmp_path / "out")
    assert report.ignored == ("model.layers.0.self_attn",)


def test_transforms_must_fit_the_checkpoint(tiny_checkpoint: Tiny, tmp_path: Path):
    source = open_source(tiny_checkpoint("youtu"))
    transform = random_transform(64, 8, 0)
    with pytest.raises(UsageError, match=r"has no latent attention model.layers.9.self_attn"):
        fuse(source, tmp_path / "out", {"model.layers.9.self_attn": transform})
    online = transform._replace(online_rope_EE=torch.eye(16).double())
    with pytest.raises(
        UsageError, match=r"transform of model.layers.0.self_attn rotates rope keys online"
    ):
        fuse(source, tmp_path / "out", {"model.layers.0.self_attn": online})
    assert not (tmp_path / "out").exists()


def test_extra_files_lie_beside_the_weights(tiny_checkpoint: Tiny, tmp_path: Path):
    fuse(open_source(tiny_checkpoint("youtu")), tmp_path / "out", extra_files={"log.csv": "a,b\n"})
    assert (tmp_path / "out" / "log.csv").read_text() == "a,b\n"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantmla_config"] == {
        "version": 1
    }


def test_nmse_of_zero_tensors():
    zero, one = torch.zeros(3), torch.ones(3)
    assert (nmse(zero, zero), nmse(one, zero), nmse(2 * one, one)) == (0.0, float("inf"), 1.0)
