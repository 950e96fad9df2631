"""Sizes from configs alone, against figures worked out by hand and published ones."""

import json

import pytest
from configs import DEEPSEEK_R1, DEEPSEEK_V2_LITE, KIMI_LINEAR, LONGCAT_FLASH
from hypothesis import given
from hypothesis import strategies as st

from quantmla.errors import UnsupportedModel, UsageError
from quantmla.estimate import (
    Workload,
    cached_layers,
    chosen_format,
    estimate,
    parse_size,
    request_bytes,
)
from quantmla.inspection import inspect_model
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.quant.mixed import MixedFormat

C4R4 = parse_format("c4r4")


def test_deepseek_r1():
    found = estimate(DEEPSEEK_R1, C4R4, Workload(context=131_072))
    assert found.cached_layers == 61
    assert found.page_bytes == 20_480
    assert found.bytes_per_token_and_layer == 320
    assert found.bytes_per_token == 19_520
    assert found.bf16_bytes_per_token == 70_272
    # 131,072 tokens: 2,046 packed pages, a window of 128 and 4 sinks, per layer
    assert found.request_bytes == 61 * (2046 * 20_480 + 132 * 1152)
    assert found.bf16_total_bytes == 61 * 131_072 * 1152
    assert round(found.ratio, 2) == 3.59


def test_deepseek_v2_lite():
    found = estimate(DEEPSEEK_V2_LITE, C4R4, Workload(context=4096))
    assert (found.cached_layers, found.bf16_bytes_per_token) == (27, 31_104)
    assert found.bytes_per_token == 27 * 320


def test_c2r4_is_six_times_smaller():
    found = estimate(DEEPSEEK_R1, parse_format("c2r4"), Workload())
    assert found.bytes_per_token_and_layer == 192
    assert found.bf16_bytes_per_token / found.bytes_per_token == 6.0


def test_longcat_has_two_attentions_per_layer():
    assert cached_layers(LONGCAT_FLASH) == list(range(56))


def test_kimi_linear_caches_its_full_attention_layers_only():
    assert cached_layers(KIMI_LINEAR) == [3, 7, 11, 15, 19, 23, 26]
    with pytest.raises(UnsupportedModel, match="full_attn_layers"):
        cached_layers({**KIMI_LINEAR, "linear_attn_config": None})
    for layers in ([], [0], [-1], [True], [4, 4], [28], [4.0], 4, "4"):
        with pytest.raises(UnsupportedModel, match=r"full_attn_layers = .*; they must be"):
            cached_layers({**KIMI_LINEAR, "linear_attn_config": {"full_attn_layers": layers}})


def test_budget_and_concurrency():
    load = Workload(context=131_072, batch=4, budget=parse_size("100GiB"))
    found = estimate(DEEPSEEK_R1, C4R4, load)
    assert found.total_bytes == 4 * found.request_bytes
    assert found.tokens_in_budget == 100 * 2**30 // 19_520
    assert found.bf16_tokens_in_budget == 100 * 2**30 // 70_272
    assert found.concurrency == 100 * 2**30 // found.request_bytes == 41
    assert found.bf16_concurrency == 11


@pytest.mark.parametrize(
    ("changes", "fmt", "words"),
    [
        ({"model_type": "minicpm3"}, C4R4, "the model is a minicpm3, and the plugin serves deep"),
        ({"tie_word_embeddings": True}, C4R4, "the model ties its head to its embeddings"),
        ({}, parse_format("c8r8"), "in c8r8, and the GPU kernels read c4r4 and c2r4"),
        ({}, parse_format("c4r4", num_sink_tokens=17), "17 sink tokens do not fit"),
        ({}, MixedFormat(default=C4R4, layers={0: parse_format("c2r4")}), "formats of their own"),
    ],
    ids=["family", "tied", "format", "sinks", "mixed"],
)
def test_of_a_model_that_serve_refuses_vllm_has_the_reason_alone(changes, fmt, words):
    found = estimate(DEEPSEEK_R1 | changes, fmt, Workload(budget=2**35))
    assert list(found.to_json()["vllm"]) == ["not_served"]
    assert words in found.vllm["not_served"]


@pytest.mark.parametrize(
    ("key", "size", "words"),
    [
        *(("kv_lora_rank", n, "is not a multiple of group_size 64") for n in (32, 96, 100, 104)),
        *(("qk_rope_head_dim", n, "is not a multiple of 8") for n in (2, 12)),
    ],
)
def test_sizes_that_no_cache_holds_are_refused_as_inspect_does(key, size, words, tmp_path):
    config = DEEPSEEK_R1 | {key: size}
    with pytest.raises(UnsupportedModel, match=f"{key} {size} {words}"):
        estimate(config, C4R4, Workload())
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect_model(str(tmp_path / "config.json"))
    assert (found.supported, found.reason) == (False, f"{key} {size} {words}")
    assert found.attention[key] == size


def test_without_a_budget_nothing_is_said_about_one():
    found = estimate(DEEPSEEK_R1, C4R4, Workload())
    assert found.tokens_in_budget is found.concurrency is None


@given(st.integers(1, 2000))
def test_request_bytes_count_every_token_once(context):
    """By walking over the tokens: each is in a page or in the window; old sinks are kept twice."""
    fmt = CacheFormat()
    first = fmt.first_recent(context)
    packed = [t for t in range(context) if t < first]
    rows = [t for t in range(context) if t >= first or t < fmt.num_sink_tokens]
    assert request_bytes(fmt, context, 20_480, 1152) == len(packed) * 320 + len(rows) * 1152


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("141GiB", 141 * 2**30),
        ("80GB", 80 * 10**9),
        ("24G", 24 * 2**30),
        ("1.5 TiB", 3 * 2**39),
        ("512mib", 2**29),
        ("4096", 4096),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_memory_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-1GiB", "0", "1e9", "80GBs"])
def test_bad_memory_sizes_are_named(text):
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("context", 0), ("batch", 0)])
def test_bad_workloads_are_named(key, value):
    with pytest.raises(UsageError, match=f"{key} {value} must be at least 1"):
        Workload(**{key: value})


def test_more_layers_than_any_model_has_are_refused_without_a_list_of_them():
    many = DEEPSEEK_R1 | {"num_hidden_layers": 10**12}
    with pytest.raises(UnsupportedModel, match=r"num_hidden_layers = 10{12}; no model has more"):
        estimate(many, parse_format("c4r4"), Workload())


def test_a_model_without_latent_attention_is_refused():
    with pytest.raises(UnsupportedModel, match="llama"):
        estimate({"model_type": "llama", "hidden_size": 64}, C4R4, Workload())


def test_layers_of_different_formats_are_added_up():
    mixed = MixedFormat(default=C4R4, layers={0: parse_format("c2r4"), 26: parse_format("c8r8")})
    found = estimate(DEEPSEEK_V2_LITE, mixed, Workload(context=131_072))
    per_token = 25 * 320 + 192 + 604
    assert found.format == "mixed"
    assert found.bytes_per_token == per_token
    assert found.bytes_per_token_and_layer == per_token / 27
    assert found.page_bytes is None
    assert found.request_bytes == 2046 * 64 * per_token + 27 * 132 * 1152
    with pytest.raises(UsageError, match="27"):
        estimate(
            DEEPSEEK_V2_LITE,
            MixedFormat(default=C4R4, layers={27: parse_format("c2r4")}),
            Workload(),
        )


def test_without_a_name_the_format_is_the_recorded_one():
    assert chosen_format(DEEPSEEK_V2_LITE, "x", None) == C4R4
    kept = {"base_model": "m", "base_sha256": "", "method": "rtn", "version": 1}
    fmt = parse_format("c2r4")
    fused = {**DEEPSEEK_V2_LITE, "quantmla_config": {**kept, "format": fmt.to_json()}}
    assert chosen_format(fused, "x", None) == fmt
    assert chosen_format(fused, "x", "c8r8") == parse_format("c8r8")
