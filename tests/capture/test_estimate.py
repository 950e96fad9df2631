"""The forecast against what a capture takes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import random_tokens

from quantmla.arch import adapter_for
from quantmla.capture.estimate import capture_cost
from quantmla.capture.stream import CaptureSettings, captured_layers
from quantmla.checkpoint.source import open_source


@pytest.mark.parametrize("case", ["deepseek_v3", "longcat_flash"])
def test_disk_is_what_the_files_take(
    case: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = open_source(tiny_checkpoint(case))
    adapter = adapter_for(source.config)
    tokens = random_tokens()
    settings = CaptureSettings(workdir=tmp_path, memory_limit=0)
    largest = 0
    for _ in captured_layers(source, adapter, tokens, settings):
        files = [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.partial")]
        largest = max(largest, sum(f.stat().st_size for f in files))
    geometry = adapter.geometry(source.config)
    forecast = capture_cost(geometry, source.config, tokens.numel(), torch.float32).disk
    assert forecast <= largest + 4 * 1024
    assert largest <= forecast + 4096  # headers


def test_memory_of_a_large_mixture_of_experts() -> None:
    """DeepSeek-R1: 256 experts of 3 x 7168 x 2048 and a shared one, attention of 187 M."""
    config = json.loads(R1)
    geometry = adapter_for(config).geometry(config)
    cost = capture_cost(geometry, config, 1)
    experts = 257 * 3 * 7168 * 2048 + 256 * 7168 + 256 + 2 * 7168
    attention = (
        7168 * 1536
        + 1536
        + 1536 * 128 * 192
        + 7168 * 576
        + 512
        + 512 * 128 * 256
        + 128 * 128 * 7168
    )
    assert (
        cost.memory == 2 * 2 * (experts + attention) - 2 * 2 * 256
    )  # the router's bias is a buffer
    assert cost.disk == 2 * 7168 * 2 + 512 * 4 + 2 * (64 + 128 * 192)


R1 = """{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
"moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
"num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "kv_lora_rank": 512,
"q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
"first_k_dense_replace": 3, "vocab_size": 129280,
"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"""
