"""The wide model computes what nano computes; bf16 storage costs what rounding nano would."""

import json

import pytest
import torch
import wide_nano

from quantmla.checkpoint.source import open_source
from quantmla.serving.refusals import ALLOWED_VALUES
from quantmla.verify import load_model

# Two roundings of one size differ by up to the square root of 2 in their root mean square, and a
# few hundred positions leave that mean uncertain by a tenth.
FACTOR = 2
EPS = 2.0**-9  # bf16 rounds a number by at most this share of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("wide") / "deeper" / "wide-nano"
    wide_nano.write_wide_nano(out)
    return out


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(2, 4096, (2, 160), generator=torch.Generator().manual_seed(0))


def logits(model, tokens):
    with torch.inference_mode():
        return model(input_ids=tokens, use_cache=False).logits.double()


def rms(x):
    return x.square().mean().sqrt().item()


@pytest.fixture(scope="module")
def nano(tokens):
    """Logits of nano with float64 weights; transformers' norms and softmax stay in float32."""
    return logits(load_model(open_source("nano").path, torch.float64), tokens)


def test_the_function_is_nanos(folder, tokens, nano):
    model = load_model(folder, torch.float64)
    weights = wide_nano.wide_weights(open_source("nano"))
    assert set(weights) == set(model.state_dict())
    model.load_state_dict(weights)
    in_float32 = logits(load_model(open_source("nano").path, torch.float32), tokens)
    assert rms(logits(model, tokens) - nano) <= FACTOR * rms(in_float32 - nano)


def test_storing_it_costs_what_rounding_nano_would(folder, tokens, nano):
    """Half of it, in fact: noise in the channels that the rotation filled meets no weight."""
    noisy = load_model(open_source("nano").path, torch.float64)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in noisy.named_parameters():
            if "kv_a_proj_with_mqa" in name or "kv_b_proj" in name:
                noise = torch.rand(weight.shape, generator=draw, dtype=torch.float64) * 2 - 1
                weight.mul_(1 + EPS * noise)
    cost = rms(logits(load_model(folder, torch.float64), tokens) - nano)
    assert 0 < cost <= FACTOR * rms(logits(noisy, tokens) - nano)


def test_it_is_what_vllm_takes(folder):
    config = json.loads((folder / "config.json").read_text())
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    assert [config[size] for size in sizes] == [512, 64, 64, 128]
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] in ALLOWED_VALUES["--dtype"]
    source = open_source(folder)
    assert {source.dtype(name) for name in source.names} == {torch.bfloat16}
    assert source.shape("model.layers.0.self_attn.kv_b_proj.weight") == (6 * (64 + 128), 512)


def test_only_whole_folders(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["wide_nano.py", str(folder)])
    with pytest.raises(SystemExit, match="2"):
        wide_nano.main()

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(wide_nano, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        wide_nano.write_wide_nano(tmp_path / "out")
    assert not list(tmp_path.iterdir())
