from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from quantmla.arch.families import FAMILIES
from quantmla.errors import UnsupportedModel
from quantmla.evaluate.teacher_forced import teacher_forced
from quantmla.mla.rope import to_interleaved
from quantmla.quant.format import parse_format
from quantmla.serve.families import CACHED_ROPE_ORDER, cached_rope_order
from quantmla.serve.transformers import QuantMLACache

SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (DeepseekV2Config(**SIZES), DeepseekV2ForCausalLM),
        (DeepseekV3Config(**SIZES), DeepseekV3ForCausalLM),
    ],
    ids=["v2", "v3"],
)
def test_the_stated_order_keeps_the_length_of_every_pair(config, family):
    torch.manual_seed(0)
    model = family(config)
    fmt = parse_format("c16r16", group_size=16)
    ids = torch.full((1, 9), 3)  # one token at nine positions: pairs turn, their lengths stay
    cache = QuantMLACache(config, fmt)
    with torch.inference_mode():
        model(ids, past_key_values=cache, use_cache=True)
    stored = cache.layers[0].paged.sequences[0].k_rope_TE.float()
    lengths = stored.unflatten(-1, (-1, 2)).norm(dim=-1)
    spread = (lengths.amax(0) - lengths.amin(0)) / lengths.mean(0)
    assert spread.max() < 0.02  # bf16
    other = to_interleaved(stored, "half").unflatten(-1, (-1, 2)).norm(dim=-1)
    assert ((other.amax(0) - other.amin(0)) / other.mean(0)).max() > 0.2


def test_an_unknown_family_is_refused():
    with pytest.raises(UnsupportedModel, match="'gpt2'"):
        cached_rope_order(SimpleNamespace(model_type="gpt2"))


def test_the_orders_are_those_of_the_adapters():
    assert {name: family.cache_rope_order for name, family in FAMILIES.items()} == CACHED_ROPE_ORDER


def test_a_model_that_vllm_has_renamed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM, given a Kimi K2, sets this on the class, for every DeepSeek-V3 of the process.
    monkeypatch.setattr(DeepseekV3Config, "model_type", "kimi_k2")
    assert cached_rope_order(DeepseekV3Config(**SIZES)) == "half"


@pytest.mark.parametrize("case", tiny.CASES)
def test_every_family_decodes_what_teacher_forcing_says(case, tiny_checkpoint):
    model = tiny.load(tiny_checkpoint(case)).double()
    model.set_experts_implementation("eager")  # the grouped products know no float64
    ids = tiny.random_tokens(length=40)[:1]
    fmt = parse_format("c4r4", group_size=16, page_size=8, recent_window=16)
    cache, steps = QuantMLACache(model.config, fmt), []
    with torch.inference_mode():
        plain = model(ids, use_cache=False).logits
        with teacher_forced(model, fmt):
            want = model(ids, use_cache=False).logits
        for t in range(ids.shape[1]):
            out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            steps.append(out.logits)
    assert cache.get_seq_length() == 40
    assert (want - plain).abs().max() > 1e-3
    # norms, routers and linear attention compute in float32 whatever the model's dtype
    torch.testing.assert_close(torch.cat(steps, dim=1), want, rtol=0, atol=1e-4)
