from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import build, random_tokens, random_transform, rewrite_tensors

from quantmla.arch import adapter_for
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.errors import QuantMLAError
from quantmla.fuse.checkpoint import fuse_checkpoint
from quantmla.transform.layer import LayerTransform
from quantmla.verify import (
    load_model,
    relative_error,
    verify_layers,
    verify_logits,
)

Tiny = Callable[[str], Path]


def fused(source: TensorSource, out: Path) -> tuple[TensorSource, dict[str, LayerTransform]]:
    adapter = adapter_for(source.config)
    transforms = {
        site.prefix: random_transform(64, 8, i)
        for i, site in enumerate(adapter.sites(source.config, source.names))
    }
    fuse_checkpoint(source, adapter, transforms, out, quantmla_config={}, extra_files={})
    return open_source(out), transforms


def test_fold_and_rounding_floor_are_told_apart(tmp_path: Path):
    source = open_source(build("deepseek_v3", tmp_path / "model", dtype=torch.bfloat16))
    out, transforms = fused(source, tmp_path / "out")
    checks = verify_layers(source, out, adapter_for(source.config), transforms)
    assert [check.prefix for check in checks] == list(transforms)
    for check in checks:
        assert check.fold_error < 1e-12
        assert 1e-5 < check.stored_error < 0.05  # some bf16 roundings of 2**-9 each
        assert check.stored_error == check.rounding_error  # the floor, made anew
        assert not check.mtp


def test_float32_weights_have_a_lower_floor(tiny_checkpoint: Tiny, tmp_path: Path):
    source = open_source(tiny_checkpoint("youtu"))
    out, transforms = fused(source, tmp_path / "out")
    for check in verify_layers(source, out, adapter_for(source.config), transforms):
        assert check.fold_error < 1e-12
        assert check.stored_error < 1e-5


def test_a_broken_fold_is_seen_in_its_layer(tiny_checkpoint: Tiny, tmp_path: Path):
    source = open_source(tiny_checkpoint("deepseek_v3"))
    out, transforms = fused(source, tmp_path / "out")
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.bias"
    broken = rewrite_tensors(out.path, tmp_path / "broken", {name: source.tensor(name)})
    first, second = verify_layers(
        source, open_source(broken), adapter_for(source.config), transforms
    )
    assert first.stored_error < 1e-5
    assert second.stored_error > 1e-3
    assert second.rounding_error < 1e-5
    assert second.fold_error < 1e-12


def test_another_transform_than_the_stored_one_is_no_excuse(tiny_checkpoint: Tiny):
    """An unfused checkpoint passes only because outputs agree, not because of the transform."""
    source = open_source(tiny_checkpoint("youtu"))
    transforms = {"model.layers.0.self_attn": random_transform(64, 8, 0)}
    (check,) = verify_layers(source, source, adapter_for(source.config), transforms)
    assert check.stored_error == 0


def test_missing_layers_are_named(tiny_checkpoint: Tiny):
    source = open_source(tiny_checkpoint("youtu"))
    transforms = {"model.layers.7.self_attn": random_transform(64, 8, 0)}
    with pytest.raises(QuantMLAError, match=r"has no latent attention model.layers.7.self_attn"):
        verify_layers(source, source, adapter_for(source.config), transforms)


def test_a_transform_that_does_not_fit_its_layer_is_no_fault_of_flags(tiny_checkpoint: Tiny):
    source = open_source(tiny_checkpoint("youtu"))
    prefix = "model.layers.0.self_attn"
    with pytest.raises(QuantMLAError, match=rf"{prefix} cannot be folded: .* rank 32") as caught:
        verify_layers(
            source, source, adapter_for(source.config), {prefix: random_transform(32, 8, 0)}
        )
    assert caught.value.exit_code == 1


def test_logits_end_to_end(tiny_checkpoint: Tiny, tmp_path: Path):
    source = open_source(tiny_checkpoint("deepseek_v2"))
    out, _ = fused(source, tmp_path / "out")
    check = verify_logits(source.path, out.path, random_tokens())
    assert 0 < check.relative_error < 1e-4
    assert abs(check.nll_drift) < 1e-4
    assert check.nll_before > 4  # random weights know nothing of random tokens
    assert check.tokens == 2 * 47
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    broken = rewrite_tensors(out.path, tmp_path / "broken", {name: source.tensor(name)})
    assert verify_logits(source.path, broken, random_tokens()).relative_error > 1e-2


def test_logits_need_rows_of_tokens_and_a_loadable_model(tiny_checkpoint: Tiny, tmp_path: Path):
    folder = tiny_checkpoint("youtu")
    with pytest.raises(QuantMLAError, match=r"tokens of shape \(5,\)"):
        verify_logits(folder, folder, torch.zeros(5, dtype=torch.long))
    (tmp_path / "config.json").write_text('{"model_type": "youtu"}')
    with pytest.raises(QuantMLAError, match="transformers cannot load"):
        verify_logits(tmp_path, folder, random_tokens())


def test_a_model_is_loaded_whole_and_finite(tiny_checkpoint: Tiny, tmp_path: Path):
    folder, name = tiny_checkpoint("deepseek_v3"), "model.norm.weight"
    bad = open_source(folder).tensor(name).clone()
    bad[3] = torch.inf
    with pytest.raises(QuantMLAError, match=r"model.norm.weight of .*nan has 1 of 64 values"):
        load_model(rewrite_tensors(folder, tmp_path / "nan", {name: bad}), torch.float32)
    large = rewrite_tensors(folder, tmp_path / "large", {name: torch.full((64,), 3e38)})
    with pytest.raises(QuantMLAError, match=r"the output of .*large on sample text has"):
        verify_logits(large, large, random_tokens())
    more = rewrite_tensors(folder, tmp_path / "more", {}, num_hidden_layers=3)
    with pytest.raises(
        QuantMLAError, match=r"more lacks \d+ parameters, such as \['model.layers.2"
    ):
        load_model(more, torch.float32)
    unknown = rewrite_tensors(folder, tmp_path / "act", {}, hidden_act="foo")
    with pytest.raises(QuantMLAError, match=r"cannot load .*: there is no 'foo'"):
        load_model(unknown, torch.float32)


def test_the_error_of_a_layer_that_gives_zero():
    zero = torch.zeros(2, 3)
    assert relative_error(zero, zero) == 0
    assert relative_error(zero + 1, zero) == float("inf")
