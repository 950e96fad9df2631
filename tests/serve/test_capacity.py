"""Blocks of vLLM's pool: by walking over tokens, and against vLLM's own figures."""

import json
from types import SimpleNamespace

import pytest
from configs import DEEPSEEK_R1, DEEPSEEK_V2_LITE

from quantmla.estimate import Workload, estimate
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.serve.capacity import capacity, decoding_window_blocks
from quantmla.serve.vllm.pool import pool_layout


@pytest.mark.parametrize("name", ["c4r4", "c2r4", "c8r8"])
def test_window_blocks_in_decode_hold_every_bf16_token(name):
    """One step in flight reads what is read two tokens earlier; blocks come a page at a time."""
    layout, exact = pool_layout(parse_format(name), 512, 64), 0
    size = layout.window_page_size
    for tokens in range(1, 700):
        first = layout.fmt.first_recent(max(0, tokens - 2))
        page = -(-tokens // 64) * 64 if tokens > 64 else tokens
        end = max(tokens, min(page, first + 192))
        needed = len({t // size for t in range(first, end)} | {0})
        found = decoding_window_blocks(layout, tokens)
        assert needed <= found <= needed + 1
        exact = max(exact, needed)
    assert decoding_window_blocks(layout, 700) == exact


def test_a_pool_in_figures():
    """Requests of 131,072 + 1,024 tokens in 19.05 GiB: 17 where bf16 has 4."""
    layout = pool_layout(CacheFormat(), 512, 64)
    found = capacity(layout, layers=27, row_bytes=1152, budget=int(19.05 * 2**30), context=132_096)
    assert (found.blocks, found.tokens_in_window_block) == (36_991, 16)
    assert found.decoding_concurrency == 36_990 / (2064 + 14)
    # three steps' worth of the last 192 tokens and 15 drafts, the sinks, and the block of none
    assert found.maximum_concurrency == 36_991 / (2064 + 3 * 14 + 1 + 1)
    assert found.bf16_maximum_concurrency == 41_101 / 8256


@pytest.mark.parametrize("config", [DEEPSEEK_V2_LITE, DEEPSEEK_R1])
def test_the_pool_holds_three_and_a_half_times_the_tokens_at_128k(config):
    load = Workload(context=131_072, budget=100 * 2**30)
    found = estimate(config, CacheFormat(), load).vllm
    assert found.tokens / found.bf16_tokens >= 3.5


def test_no_figures_for_what_the_plugin_does_not_serve():
    load = Workload(budget=2**30)
    found = estimate(DEEPSEEK_V2_LITE, CacheFormat(page_size=48), load).vllm
    assert list(found) == ["not_served"]


@pytest.mark.parametrize("name", ["c4r4", "c2r4"])
@pytest.mark.parametrize("context", [300, 4096, 132_096])
@pytest.mark.parametrize("batched", [512, 8192])
def test_estimate_agrees_with_vllm(name, context, batched, vllm_capacity):
    """Tokens in the pool and maximum concurrency, from vLLM's own functions, to within a page."""
    budget = int(7.3 * 2**30)
    load = Workload(context=context, budget=budget)
    found = estimate(DEEPSEEK_V2_LITE, parse_format(name), load).vllm
    tokens, concurrency = vllm_capacity(name, context, batched, budget)
    assert abs(found.tokens - tokens) <= 64
    assert abs(found.maximum_concurrency - concurrency) * context <= 64
    tokens, concurrency = vllm_capacity("bf16", context, batched, budget)
    assert abs(found.bf16_tokens - tokens) <= 64
    assert abs(found.bf16_maximum_concurrency - concurrency) * context <= 64


@pytest.fixture(scope="module")
def vllm_capacity(tmp_path_factory):
    """(format or bf16, context, batched tokens, bytes) to vLLM's tokens and concurrency."""
    pytest.importorskip("vllm.v1.core.kv_cache_utils", reason="vllm is not installed")
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from quantmla.serve.vllm.layer import PackedAttention, WindowCache
    from quantmla.serve.vllm.plugin import install

    install()
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V2_LITE))
    model = ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16"
    )

    def specs(name, config):
        """What the layers of the model ask for."""
        if name == "bf16":
            spec = MLAAttentionSpec(
                block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
            )
            return {f"{i}": spec for i in range(27)}
        layer = SimpleNamespace(layout=pool_layout(parse_format(name), 512, 64))
        packed = PackedAttention.get_kv_cache_spec(SimpleNamespace(window=layer), config)
        window = WindowCache.get_kv_cache_spec(layer, config)
        return {f"{i}": packed for i in range(27)} | {f"{i}.window": window for i in range(27)}

    def figures(name, context, batched, budget):
        model.max_model_len = context
        scheduler = SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=batched,
            max_model_len=context,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=True,
        )
        config = VllmConfig(
            model_config=model,
            scheduler_config=scheduler,
            cache_config=CacheConfig(block_size=64),
            device_config=DeviceConfig(device="cpu"),
        )
        config.scheduler_config.disable_hybrid_kv_cache_manager = False  # as on a GPU
        (found,) = get_kv_cache_configs(config, [specs(name, config)], [budget])
        return get_kv_cache_capacity(config, found)

    return figures
