"""Every refusal is one sentence that names the flag, before anything is allocated."""

import json
from types import SimpleNamespace

import pytest
import torch

from quantmla.errors import UnsupportedModel, UsageError
from quantmla.quant.format import parse_format
from quantmla.serve.settings import SERVED_FAMILIES


@pytest.fixture
def start(cpu_vllm, tmp_path):
    """A valid start, as it is on a GPU; keywords change config.json."""
    from vllm_harness import model_config, vllm_config

    from quantmla.serve.vllm.engine import AttentionBackendEnum

    def make(**changes):
        config = vllm_config(model_config(tmp_path, parse_format("c4r4"), **changes))
        config.attention_config.backend = AttentionBackendEnum.CUSTOM
        return config

    return make


def test_a_plain_start_is_served(start):
    from quantmla.serve.vllm.layer import requested_layout

    layout = requested_layout(start())
    assert layout.fmt == parse_format("c4r4")
    assert (layout.kv_lora_rank, layout.qk_rope_head_dim) == (128, 32)


def test_the_checkpoint_leaves_the_cache_dtype_alone(start):
    assert start().cache_config.cache_dtype == "auto"


class Drafter(SimpleNamespace):
    pass


@pytest.mark.parametrize(
    ("part", "name", "value", "flag"),
    [
        ("cache_config", "cache_dtype", "fp8", "--kv-cache-dtype 'fp8'"),
        ("cache_config", "kv_cache_dtype_skip_layers", ["0"], "--kv-cache-dtype-skip-layers"),
        ("cache_config", "calculate_kv_scales", True, "--calculate-kv-scales"),
        ("model_config", "dtype", torch.float16, "--dtype torch.float16"),
        ("parallel_config", "decode_context_parallel_size", 2, "--decode-context-parallel-size 2"),
        ("parallel_config", "prefill_context_parallel_size", 2, "--prefill-context-parallel-size"),
        ("parallel_config", "pipeline_parallel_size", 2, "--pipeline-parallel-size 2"),
        ("parallel_config", "enable_dbo", True, "--enable-dbo"),
        ("model_config", "enable_sleep_mode", True, "--enable-sleep-mode"),
        ("scheduler_config", "policy", "priority", "--no-enable-prefix-caching"),
        ("", "kv_transfer_config", SimpleNamespace(), "--kv-transfer-config"),
        (
            "scheduler_config",
            "disable_hybrid_kv_cache_manager",
            True,
            "--disable-hybrid-kv-cache-manager",
        ),
        ("", "speculative_config", Drafter(method="mtp"), "--speculative-config method 'mtp'"),
        ("", "speculative_config", Drafter(method="eagle3"), "'eagle3'"),
        (
            "",
            "speculative_config",
            Drafter(method="ngram", num_speculative_tokens=16),
            "num_speculative_tokens 16 is more than 15",
        ),
        (
            "compilation_config.pass_config",
            "fuse_rope_kvcache_cat_mla",
            True,
            "fuse_rope_kvcache_cat_mla",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(start, part, name, value, flag):
    from quantmla.serve.vllm.support import served_layout

    config = start()
    owner = config
    for step in filter(None, part.split(".")):
        owner = getattr(owner, step)
    object.__setattr__(owner, name, value)
    with pytest.raises(UsageError) as caught:
        served_layout(config)
    assert flag in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_a_backend_of_the_kind_that_reads_no_packed_pages_is_refused(start):
    """vLLM takes the backend of a kind before the one for all."""
    from quantmla.serve.vllm.engine import AttentionBackendEnum
    from quantmla.serve.vllm.layer import requested_layout

    config = start()
    kinds = config.attention_config.backend_per_kind
    kinds["mla_attention"] = AttentionBackendEnum.FLASHMLA
    with pytest.raises(UsageError, match="--attention-config has backend FLASHMLA"):
        requested_layout(config)
    config.attention_config.backend = None
    assert requested_layout(config) is None
    kinds["mla_attention"] = AttentionBackendEnum.CUSTOM
    assert requested_layout(config) is not None


def test_a_family_that_was_not_tried_is_refused(start):
    from quantmla.serve.vllm.support import why_not

    config = start()
    config.model_config.hf_text_config.model_type = "axk1"
    assert "model_type 'axk1' in config.json is none of deepseek_v2, deepseek_v3" in why_not(config)


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_vllm_knows_the_served_families_by_the_names_that_are_checked(cpu_vllm, tmp_path, family):

    import serve_families
    from vllm.config import ModelConfig

    (tmp_path / "config.json").write_text(json.dumps(serve_families.config_of(family, "c4r4")))
    model = ModelConfig(model=str(tmp_path), tokenizer=str(tmp_path), skip_tokenizer_init=True)
    assert model.hf_text_config.model_type in SERVED_FAMILIES
    assert model.use_mla


def test_a_cache_update_inside_a_piecewise_graph_is_refused(start):
    from vllm.config import CUDAGraphMode

    from quantmla.serve.vllm.support import why_not

    config = start()
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    assert why_not(config) is None
    compilation.use_inductor_graph_partition = True
    compilation.splitting_ops = ["vllm::unified_mla_attention_with_output"]
    assert "piecewise CUDA graph" in why_not(config)
    compilation.cudagraph_mode = CUDAGraphMode.FULL
    assert why_not(config) is None  # attention is not split off as a whole
    compilation.splitting_ops = list(compilation._attention_ops)
    assert "piecewise CUDA graph" in why_not(config)
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    assert why_not(config) is None


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("split", ["all but the update", None])
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE"])
def test_what_is_let_through_resolves_to_graphs_without_the_update(start, mode, split, inductor):
    """vLLM changes the mode after our check; what it makes of it must still be allowed."""
    from vllm.config import CompilationConfig
    from vllm.config.compilation import CompilationMode

    from quantmla.serve.vllm.metadata import PackedBuilder
    from quantmla.serve.vllm.support import why_not

    config = start()
    found = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=mode,
        splitting_ops=list(CompilationConfig._attention_ops) if split else None,
        use_inductor_graph_partition=inductor,
        cudagraph_capture_sizes=[1, 2, 4, 8],
        max_cudagraph_capture_size=8,
    )
    found.set_splitting_ops_for_v1("naive")
    found.pass_config.fuse_rope_kvcache_cat_mla = False
    config.compilation_config = found
    reason = why_not(config)
    assert (reason is None) == (mode == "FULL_DECODE_ONLY" or not (split or inductor))
    if reason is None:
        found.resolve_cudagraph_mode_and_sizes(
            PackedBuilder._cudagraph_support,
            "QuantMLABackend",
            1,
            use_v2_model_runner=False,
            max_num_reqs=8,
        )
        assert why_not(config) is None


def test_another_block_size_is_refused(start):
    from quantmla.serve.vllm.support import served_layout

    config = start()
    config.cache_config.user_specified_block_size, config.cache_config.block_size = True, 128
    with pytest.raises(UsageError, match="--block-size 128 is not 64"):
        served_layout(config)


def test_more_drafts_than_the_recent_window_are_refused(start):
    from quantmla.serve.vllm.support import served_layout

    config = start(
        quantmla_config={
            "version": 1,
            "format": parse_format("c4r4", recent_window=3).to_json(),
            "ignored_layers": [],
        }
    )
    config.speculative_config = Drafter(method="ngram", num_speculative_tokens=3)
    assert served_layout(config).recent_window == 3
    config.speculative_config.num_speculative_tokens = 4
    with pytest.raises(UsageError, match="num_speculative_tokens 4 is more than the 3 tokens"):
        served_layout(config)


def test_a_checkpoint_that_is_not_fused_is_refused(start):
    from quantmla.serve.vllm.support import served_layout

    with pytest.raises(UsageError, match=r"--attention-backend CUSTOM .* has no quantmla_config"):
        served_layout(start(quantmla_config="-"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": 2}, UsageError, "version 2 is not 1"),
        ({"ignored_layers": [0]}, UnsupportedModel, r"caches of layers \[0\] in bf16"),
        (
            {"format": {**parse_format("c4r4").to_json(), "layers": {"0": {"content_bits": 2}}}},
            UnsupportedModel,
            "c2r4 in layer 0; c4r4 in all others.*one format for all layers",
        ),
    ],
)
def test_settings_that_are_not_read_are_refused(start, change, error, message):
    from quantmla.serve.vllm.support import served_layout

    settings = {"version": 1, "format": parse_format("c4r4").to_json(), "ignored_layers": []}
    with pytest.raises(error, match=message):
        served_layout(start(quantmla_config=settings | change))


def test_sparse_attention_is_refused(start):
    from quantmla.serve.vllm.support import served_layout

    with pytest.raises(UsageError, match="index_topk"):
        served_layout(start(index_topk=64))


def test_graphs_and_models_that_are_not_handled_are_refused(start, monkeypatch):
    from quantmla.serve.vllm import support

    config = start()
    monkeypatch.setattr(support, "is_breakable_cudagraph_enabled", lambda: True)
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" in support.why_not(config)
    monkeypatch.undo()
    assert support.why_not(config) is None
    monkeypatch.setattr(type(config.model_config), "is_hybrid", property(lambda _: True))
    assert "recurrent state" in support.why_not(config)


def test_what_vllm_itself_cannot_run_is_refused(start):
    from quantmla.serve.vllm.support import why_not

    config = start()
    config.model_config.hf_config.tie_word_embeddings = True
    assert "tie_word_embeddings in config.json" in why_not(config)
    config = start()
    config.model_config.hf_text_config.model_type = "longcat_flash"
    assert "cannot compile a longcat_flash" in why_not(config)
    config.model_config.enforce_eager = True
    assert why_not(config) is None


@pytest.mark.parametrize(
    ("capability", "refused"), [((9, 0), False), ((10, 0), True), (None, False)]
)
def test_gpus_other_than_hopper_are_refused(start, monkeypatch, capability, refused):
    from vllm.platforms.interface import DeviceCapability

    from quantmla.serve.vllm import support

    found = None if capability is None else DeviceCapability(*capability)
    gpu = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: found)
    monkeypatch.setattr(support, "current_platform", gpu)
    reason = support.why_not(start())
    assert (reason is not None) == refused
    assert not refused or "compute capability 10.0, and serving needs 9.0" in reason


def test_rope_in_halves_is_refused(cpu_vllm):
    from quantmla.serve.vllm.support import require_interleaved

    require_interleaved(SimpleNamespace(is_neox_style=False))
    with pytest.raises(UnsupportedModel, match="interleaved"):
        require_interleaved(SimpleNamespace(is_neox_style=True))
