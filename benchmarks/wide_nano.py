"""The packaged model in DeepSeek's latent width, so that vLLM's unquantised attention takes it.

    python benchmarks/wide_nano.py OUT

vLLM reads a bf16 latent cache only where kv_lora_rank is 512, and its FlashAttention takes heads of
64 + 64 channels only with values of 128. The checkpoint written here computes nano's function in
those sizes, without any approximation but bf16 weights:

- latents get 384 channels of zeros, then all 512 are rotated by a random orthogonal matrix. RMSNorm
  does not see a rotation; its own weight moves into kv_b_proj. The rows of kv_a_proj are doubled,
  because the mean square is over four times as many channels: so the norm's eps keeps its meaning;
- values get 64 channels of zeros, and o_proj columns of zeros for them;
- the head becomes a tensor of its own: vLLM's DeepSeek classes do not tie it to the embeddings.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quantmla.arguments import run_script
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.errors import UsageError
from quantmla.workdir import check_makeable

RANK, VALUE = 512, 128
NORM = 0.5  # constant weight of the latents' norm: sqrt(128 / 512)
SEED = 0
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
Weights = dict[str, Tensor]


def rotation(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix, uniform but for the signs of its columns."""
    draw = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(size, size, generator=draw, dtype=torch.float64)
    q: Tensor = torch.linalg.qr(gaussian).Q
    return q


def wide_config(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"kv_lora_rank": RANK, "v_head_dim": VALUE, "tie_word_embeddings": False}


def wide_attention(weights: Weights, prefix: str, config: dict[str, Any], seed: int) -> Weights:
    """The four tensors of one layer that change, in float64."""
    rank, nope = config["kv_lora_rank"], config["qk_nope_head_dim"]
    heads, value = config["num_attention_heads"], config["v_head_dim"]
    down, gain, up, out = (
        weights[f"{prefix}.{name}.weight"].double()
        for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    )
    turn = rotation(RANK, seed)[:, :rank]  # the other columns would meet zeros alone
    scale = (RANK / rank) ** 0.5
    up = (up * gain) @ turn.T * (1 / (scale * NORM))
    key, values = up.unflatten(0, (heads, nope + value)).split((nope, value), dim=1)
    values = torch.cat((values, values.new_zeros(heads, VALUE - value, RANK)), dim=1)
    wide_out = out.new_zeros(out.shape[0], heads, VALUE)
    wide_out[:, :, :value] = out.unflatten(1, (heads, value))
    return {
        f"{prefix}.kv_a_proj_with_mqa.weight": torch.cat((scale * turn @ down[:rank], down[rank:])),
        f"{prefix}.kv_a_layernorm.weight": gain.new_full((RANK,), NORM),
        f"{prefix}.kv_b_proj.weight": torch.cat((key, values), dim=1).flatten(0, 1),
        f"{prefix}.o_proj.weight": wide_out.flatten(1),
    }


def wide_weights(source: TensorSource, seed: int = SEED) -> Weights:
    """Every tensor of the wide model, those that change in float64."""
    weights = {name: source.tensor(name) for name in source.names}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    for layer in range(source.config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn"
        weights |= wide_attention(weights, prefix, source.config, seed + layer)
    return weights


def write_wide_nano(out: Path, seed: int = SEED) -> None:
    """The checkpoint in bf16, which is what vLLM runs in; whole or not at all.

    FileExistsError where the folder is there.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists")
    source = open_source("nano")
    weights = {
        name: x.to(torch.bfloat16).contiguous() for name, x in wide_weights(source, seed).items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
        for name in COPIED:
            shutil.copyfile(source.path / name, draft / name)
        text = json.dumps(wide_config(dict(source.config)), indent=2) + "\n"
        (draft / "config.json").write_text(text)
        os.chmod(draft, 0o755)  # mkdtemp's folders are private
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    check_makeable(options.out, options.out)
    try:
        write_wide_nano(options.out)
    except FileExistsError as error:
        raise UsageError(str(error)) from None


if __name__ == "__main__":
    main()
