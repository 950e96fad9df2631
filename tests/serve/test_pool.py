"""Blocks of vLLM's pool: by walking over tokens, and against vLLM's own figures."""

import json
from dataclasses import dataclass, replace

import pytest
from configs import DEEPSEEK_V2_LITE
from hypothesis import given
from hypothesis import strategies as st

from quantmla.errors import UsageError
from quantmla.estimate import Workload, estimate
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.serve.pool import Pool, pool_of, report, window_block_tokens

POOL = Pool(layers=27, page_bytes=20_480, row_bytes=1152, page_size=64, window=192, sink_blocks=1)


@pytest.mark.parametrize(
    ("page_bytes", "row_bytes", "tokens"),
    [(20_480, 1152, 16), (12_288, 1152, 8), (73_728, 1152, 64), (7040, 384, 16), (4992, 384, 8)],
)
def test_window_blocks_are_the_largest_power_of_two_that_fits(page_bytes, row_bytes, tokens):
    assert window_block_tokens(page_bytes, row_bytes) == tokens
    assert tokens * row_bytes <= page_bytes < 2 * tokens * row_bytes


def test_a_page_smaller_than_a_row_is_refused():
    with pytest.raises(UsageError, match="a page of 512 bytes does not hold one bf16 row of 1152"):
        window_block_tokens(512, 1152)


def test_an_unprotected_format_is_refused():
    with pytest.raises(UsageError, match="unprotected"):
        pool_of(CacheFormat().unprotected(), layers=1, page_bytes=20_480, row_bytes=1152)


@given(st.integers(1, 3000), st.sampled_from([8, 16, 64]))
def test_window_blocks_in_decode_hold_every_bf16_token(length, rows):
    """By walking over the tokens that a request of this length may still need in bf16."""
    pool = replace(POOL, page_bytes=rows * 1152)
    kept = {t // rows for t in range(length) if t >= length - (pool.window - 1)} | {0}
    most = pool.window_blocks_decoding(length)
    assert len(kept) <= most <= len(kept) + 1  # a window may begin anywhere in a block


def test_a_pool_in_figures():
    """5 requests of 131,072 + 1,024 tokens in 19.05 GiB: 17 where bf16 has 4."""
    found = report(POOL, int(19.05 * 2**30), 132_096, 8192)
    assert found.blocks == 36_991
    assert found.decoding_concurrency == 36_990 / (2064 + 14)
    assert found.maximum_concurrency == 36_991 / (2064 + 1036 + 1 + 1)
    assert found.bf16_maximum_concurrency == 41_101 / 8256


@pytest.mark.parametrize("name", ["c4r4", "c2r4"])
@pytest.mark.parametrize("context", [300, 4096, 132_096])
@pytest.mark.parametrize("batched", [512, 8192])
@pytest.mark.parametrize("gib", [7.3, 19.05])
def test_r34_estimate_agrees_with_vllm(name, context, batched, gib, vllm_capacity):
    """Tokens in the pool and maximum concurrency, from vLLM's own functions, to within a page."""
    budget = int(gib * 2**30)
    load = Workload(context=context, budget=budget, batched_tokens=batched)
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
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    @dataclass(frozen=True, kw_only=True)
    class Packed(MLAAttentionSpec):
        page_bytes: int = 0

        @property
        def real_page_size_bytes(self):
            return self.page_bytes

        @classmethod
        def merge(cls, specs):
            assert all(spec == specs[0] for spec in specs)
            return replace(specs[0])

    @dataclass(frozen=True, kw_only=True)
    class Hot(SlidingWindowMLASpec):
        def max_admission_blocks_per_request(self, *args, **kwargs):
            return super().max_admission_blocks_per_request(*args, **kwargs) + 1

        @classmethod
        def merge(cls, specs):
            assert all(spec == specs[0] for spec in specs)
            return replace(specs[0])

    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        Packed, FullAttentionManager, uniform_type_base_spec=FullAttentionSpec
    )
    KVCacheSpecRegistry.register(Hot, SlidingWindowManager, uniform_type_base_spec=Hot)
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V2_LITE))
    model = ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16"
    )

    def specs(name):
        shape = {"num_kv_heads": 1, "head_size": 576}
        bf16 = shape | {"dtype": torch.bfloat16}
        if name == "bf16":
            return {f"{i}": MLAAttentionSpec(block_size=16, **bf16) for i in range(27)}
        page, rows = {"c4r4": (20_480, 16), "c2r4": (12_288, 8)}[name]
        packed = Packed(block_size=64, dtype=torch.uint8, page_bytes=page, **shape)
        hot = Hot(block_size=rows, sliding_window=192, page_size_padded=page, **bf16)
        return {f"{i}": packed for i in range(27)} | {f"{i}.hot": hot for i in range(27)}

    def capacity(name, context, batched, budget):
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
        (found,) = get_kv_cache_configs(config, [specs(name)], [budget])
        return get_kv_cache_capacity(config, found)

    return capacity
