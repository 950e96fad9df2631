"""What fusing leaves alone: tensors, config.json but for one key, the tokenizer's files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import rewrite_tensors

from quantmla.arch import adapter_for
from quantmla.checkpoint.source import open_source
from quantmla.errors import QualityGateFailed
from quantmla.fuse.checkpoint import CONFIG_KEY, fuse_checkpoint
from quantmla.fuse.copied import changed_tensors, require_same_files

Tiny = Callable[[str], Path]


@pytest.fixture
def pair(tiny_model: Tiny, tmp_path: Path):
    """An original with a tokenizer, and a copy as fusing writes it."""
    source = open_source(tiny_model("deepseek_v3"))
    settings, out = {"version": 1}, tmp_path / "out"
    adapter = adapter_for(source.config)
    fuse_checkpoint(source, adapter, {}, out, quantmla_config=settings, extra_files={})
    return source, out


def test_changed_tensors_are_named(tiny_checkpoint: Tiny, tmp_path: Path):
    source = open_source(tiny_checkpoint("youtu"))
    assert changed_tensors(source, source, ()) == ()
    norm, other = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    flipped = source.tensor(norm).clone()
    flipped[0] = torch.nextafter(flipped[0], torch.tensor(9.0))
    change = {norm: flipped, other: source.tensor(other).double(), "extra": torch.ones(1)}
    changed = open_source(rewrite_tensors(source.path, tmp_path / "changed", change))
    assert changed_tensors(source, changed, ()) == tuple(sorted(change))
    # bytes may differ where that is allowed, dtypes nowhere
    assert changed_tensors(source, changed, (norm, other)) == tuple(sorted(("extra", other)))


def test_the_copy_and_what_is_added_beside_it_pass(pair):
    source, out = pair
    (out / "README.md").write_text("a card")
    (out / "eval.json").write_text("{}")
    require_same_files(source, open_source(out))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rms_norm_eps": 1e-2}, "rms_norm_eps"),
        ({"num_hidden_layers": 1, "hidden_act": "gelu"}, "hidden_act, num_hidden_layers"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_parameters"),
        ({"added": None}, "added"),
        ({"rms_norm_eps": ...}, "rms_norm_eps"),
    ],
)
def test_a_config_that_is_another_is_named_by_its_keys(pair, change, named):
    source, out = pair
    config = json.loads((out / "config.json").read_text()) | change
    kept = {key: value for key, value in config.items() if value is not ...}
    (out / "config.json").write_text(json.dumps(kept))
    with pytest.raises(QualityGateFailed, match=f"is not the original's: it differs in {named}$"):
        require_same_files(source, open_source(out))


def test_settings_of_the_cache_are_no_difference(pair):
    source, out = pair
    config = json.loads((out / "config.json").read_text())
    config[CONFIG_KEY] = {"version": 2}
    (out / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    require_same_files(source, open_source(out))


def test_a_tokenizer_that_is_missing_or_another_is_named(pair):
    source, out = pair
    file = out / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(QualityGateFailed, match=r"tokenizer\.json is not the original's"):
        require_same_files(source, open_source(out))
    file.unlink()
    with pytest.raises(QualityGateFailed, match=r"tokenizer\.json is missing"):
        require_same_files(source, open_source(out))
