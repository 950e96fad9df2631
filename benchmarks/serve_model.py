"""DeepSeek-V2-Lite's shape as a model without weights, and how its engines are started."""

from typing import Any

from quantmla.quant.format import parse_format

BATCHED_TOKENS = 8192  # of a step
MAX_SEQUENCES = 64


def model_config(layers: int, variant: str | None) -> dict[str, Any]:
    """config.json for `layers` layers; a packed variant's has the format of its cache."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    yarn |= {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
    config: dict[str, Any] = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163_840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": layers,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": yarn,
        "rope_theta": 10_000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 102_400,
    }
    if variant not in (None, "bf16"):
        fmt = parse_format(str(variant)).to_json()
        config["quantmla_config"] = {"version": 1, "format": fmt, "ignored_layers": []}
    return config
