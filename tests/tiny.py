"""Tiny random checkpoints of every family, built by the classes of transformers itself.

Weights keep activations near unit size, so that attention matters to the logits; norm weights and
biases are random, head dims of keys and values differ.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor, nn

from quantmla.capture.tokens import read_text
from quantmla.transform.layer import ContentTransform, LayerTransform, RopeTransform

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "max_position_embeddings": 2560,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
DENSE = {"intermediate_size": 48, "num_hidden_layers": 2}
EXPERTS = DENSE | {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

# case name -> configuration class, model class (both of transformers), settings besides LATENT
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", EXPERTS | {"q_lora_rank": None}),
    "deepseek_v2_lora_yarn": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        EXPERTS
        | {
            "q_lora_rank": 32,
            "attention_bias": True,
            "rope_parameters": YARN | {"mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        EXPERTS | {"q_lora_rank": 32, "attention_bias": True, "rope_parameters": YARN},
    ),
    "deepseek_v3_half": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        EXPERTS | {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        EXPERTS | {"q_lora_rank": 32, "attention_bias": True},
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {
            "num_layers": 2,
            "q_lora_rank": 32,
            "head_dim": 16,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "attention_bias": True,
            # another rank than hidden_size, or the latent's multiplier would be 1
            "kv_lora_rank": 48,
        },
    ),
    "minicpm3": (
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        DENSE | {"q_lora_rank": 32, "attention_bias": True, "dim_model_base": 32},
    ),
    "minicpm3_no_lora": (
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        DENSE | {"q_lora_rank": None, "v_head_dim": None},
    ),
    "youtu": (
        "YoutuConfig",
        "YoutuForCausalLM",
        DENSE | {"q_lora_rank": 32, "attention_bias": True},
    ),
    "mistral4": (
        "Mistral4Config",
        "Mistral4ForCausalLM",
        EXPERTS | {"q_lora_rank": 32, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    ),
    "axk1": (
        "AXK1Config",
        "AXK1ForCausalLM",
        EXPERTS | {"q_lora_rank": 32, "attention_bias": True},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "moe_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
        },
    ),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def build(case: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Saves the tiny model of `case` to `folder`, which it returns."""
    config_class, model_class, settings = CASES[case]
    config = getattr(transformers, config_class)(**(LATENT | settings))
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config)
    randomize(model, generator(seed))
    model.to(dtype).save_pretrained(folder, max_shard_size="100KB")
    return folder


def randomize(model: nn.Module, draw: torch.Generator) -> None:
    for name, x in model.named_parameters():
        noise = torch.randn(x.shape, generator=draw)
        if name.endswith("bias"):
            x.copy_(0.3 * noise)
        elif "norm" in name:
            x.copy_(0.5 + torch.rand(x.shape, generator=draw))
        elif "embed_tokens" in name:
            x.copy_(noise)
        elif x.dim() >= 2 and "conv1d" not in name and "A_log" not in name:
            x.copy_(noise / x.shape[-1] ** 0.5)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model as stock transformers loads it."""
    transformers.utils.logging.disable_progress_bar()
    config = json.loads((folder / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    return model_class.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def logits(folder: Path, tokens_BS: Tensor) -> Tensor:
    return load(folder)(input_ids=tokens_BS, use_cache=False).logits


def random_tokens(seed: int = 1, length: int = 48) -> Tensor:
    return torch.randint(2, 256, (2, length), generator=generator(seed))


def random_transform(rank: int, pairs: int, seed: int) -> LayerTransform:
    """Far from the identity: a random rotation, scales and gains over a factor of 4, any angles."""
    draw = generator(seed)
    rotation, _ = torch.linalg.qr(torch.randn(rank, rank, generator=draw, dtype=torch.float64))
    scale, gain, angle = (
        torch.rand(n, generator=draw, dtype=torch.float64) for n in (rank, pairs, pairs)
    )
    return LayerTransform(
        ContentTransform(rotation, 0.5 * 4**scale),
        RopeTransform((2 * angle - 1) * torch.pi, 0.5 * 4**gain),
    )


def add_tokenizer(folder: Path) -> Path:
    """Gives a folder the tokenizer.json of a tiny model: one token per character; returns it.

    Ids are below the vocabulary of LATENT; characters outside ASCII are `<unk>`.
    """
    symbols = ["<s>", "<pad>", "<unk>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_text(path: Path, characters: int = 20_000) -> Path:
    """The beginning of the packaged calibration text as a file, which it returns."""
    path.write_text(read_text()[:characters], encoding="utf-8")
    return path


def rewrite_tensors(folder: Path, out: Path, change: Mapping[str, Tensor], **config: Any) -> Path:
    """A single-file copy of a checkpoint with tensors added or replaced and config keys set."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    out.mkdir()
    save_file(tensors | dict(change), out / "model.safetensors", metadata={"format": "pt"})
    old = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(old | config, indent=2) + "\n")
    return out
