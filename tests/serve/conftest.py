"""A tiny random DeepSeek-V3 model, and a smaller one that drafts for it."""

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


def config(layers: int) -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=8,
        first_k_dense_replace=layers,
        max_position_embeddings=512,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )


@pytest.fixture
def model():
    torch.manual_seed(5)
    return DeepseekV3ForCausalLM(config(2)).eval()


@pytest.fixture
def drafter():
    torch.manual_seed(6)
    return DeepseekV3ForCausalLM(config(1)).eval()
