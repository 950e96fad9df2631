"""Tiny random models of two families, which hand their rope keys over in different orders."""

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


@pytest.fixture(params=["v2", "v3"])
def model(request):
    torch.manual_seed(3)
    if request.param == "v2":
        built = DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES))
    else:
        built = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES))
    for name, weight in built.named_parameters():
        if name.endswith("kv_a_layernorm.weight"):
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    return built.eval()


class CharTokenizer:
    """One token per character; `begin` puts token 1 before every text."""

    def __init__(self, begin: bool = False):
        self.begin = begin

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        ids = [2 + ord(c) % 62 for c in text]
        return [1, *ids] if self.begin and add_special_tokens else ids


@pytest.fixture
def tokenizer():
    return CharTokenizer()


@pytest.fixture
def begin_tokenizer():
    return CharTokenizer(begin=True)
