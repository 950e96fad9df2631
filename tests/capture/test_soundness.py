"""What is refused of a checkpoint before any of its layers runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CASES, rewrite_tensors

from quantmla.arch import adapter_for
from quantmla.capture.soundness import check_checkpoint, check_finite
from quantmla.checkpoint.source import open_source
from quantmla.errors import QuantMLAError

Tiny = Callable[[str], Path]
NORM, HEAD = "model.norm.weight", "lm_head.weight"


def checked(folder: Path) -> None:
    source = open_source(folder)
    adapter = adapter_for(source.config)
    check_checkpoint(source, adapter)
    check_finite(source, adapter)


def without(folder: Path, name: str, **config: Any) -> Path:
    """Takes a tensor out of a checkpoint of one file."""
    from safetensors.torch import load_file, save_file

    file = rewrite_tensors(folder, folder.parent / f"without_{name}", {}, **config)
    tensors = load_file(file / "model.safetensors")
    del tensors[name]
    save_file(tensors, file / "model.safetensors", metadata={"format": "pt"})
    return file


@pytest.mark.parametrize("case", CASES)
def test_whole_checkpoints_of_every_family_are_sound(case: str, tiny_checkpoint: Tiny):
    checked(tiny_checkpoint(case))


def test_what_stands_around_the_layers_must_be_there(tiny_checkpoint: Tiny, tmp_path: Path):
    whole = rewrite_tensors(tiny_checkpoint("deepseek_v3"), tmp_path / "whole", {})
    for name in (HEAD, NORM):
        with pytest.raises(QuantMLAError, match=f"lacks {name}"):
            checked(without(whole, name, tie_word_embeddings=False))
    tied = tmp_path / "tied"
    tied.mkdir()
    checked(without(rewrite_tensors(whole, tied / "whole", {}, tie_word_embeddings=True), HEAD))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rope_parameters", {"rope_theta": "x"}, "rope_theta = 'x', which is not a number above"),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "foo"}, "rope_type = 'foo'; known: "),
        (
            "rope_scaling",
            {"rope_type": "yarn", "factor": "x"},
            "factor = 'x', which is not a number",
        ),
        ("first_k_dense_replace", None, "first_k_dense_replace = None; a whole number of at least"),
        ("vocab_size", 0, "vocab_size = 0, which is not a whole number of at least 1"),
        ("vocab_size", 100, r"embed_tokens.weight is \(256, 64\), but by .* \(100, 64\)"),
        ("dtype", "float64", "dtype is torch.float64; supported: torch.bfloat16"),
        ("dtype", "foo", "refuses config.json: module 'torch' has no attribute 'foo'"),
        ("num_key_value_heads", 0, "can make no model of config.json: integer division or modulo"),
        ("rms_norm_eps", None, "refuses .*'rms_norm_eps' expected float, got NoneType"),
        ("hidden_act", "foo", "hidden_act = 'foo'; known: .*silu"),
    ],
)
def test_configs_that_give_no_model(
    key: str, value: Any, words: str, tiny_checkpoint: Tiny, tmp_path: Path
):
    broken = rewrite_tensors(tiny_checkpoint("deepseek_v3"), tmp_path / "x", {}, **{key: value})
    with pytest.raises(QuantMLAError, match=words):
        checked(broken)


@pytest.mark.parametrize("name", [NORM, "model.embed_tokens.weight", "model.layers.2.x.weight"])
def test_what_no_layers_run_reads_must_be_finite(name: str, tiny_checkpoint: Tiny, tmp_path: Path):
    folder = tiny_checkpoint("deepseek_v3")
    source = open_source(folder)
    bad = source.tensor(name).clone() if name in source.entries else torch.zeros(4)
    bad.view(-1)[3] = torch.nan
    with pytest.raises(QuantMLAError, match=f"{name} has 1 of {bad.numel()} values"):
        checked(rewrite_tensors(folder, tmp_path / "nan", {name: bad}))
