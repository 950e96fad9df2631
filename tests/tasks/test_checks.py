"""What is refused, with a sentence."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend

from quantmla.errors import UnsupportedModel, UsageError
from quantmla.manifest import CONFIG_KEY
from quantmla.mla.geometry import MlaGeometry
from quantmla.quant.format import parse_format
from quantmla.recipe import EvaluationRequest, TaskRequest
from quantmla.serving import command as serving
from quantmla.tasks import checks
from quantmla.tasks.checks import check_engine
from quantmla.tasks.registry import asked_tasks

V2_LITE = MlaGeometry(
    hidden_size=2048,
    num_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    q_lora_rank=None,
    norm_eps=1e-6,
    softmax_scale=1.0,
)


def check(*tasks, fused=True, geometry=V2_LITE, **given):
    evaluation = EvaluationRequest(**{"model": "out"} | given)
    request = TaskRequest(evaluation=evaluation, tasks=tasks, output="run", engine="vllm")
    check_engine(asked_tasks(tasks, 4096), request, geometry, fused=fused)


def test_vllm_scores_no_given_texts(monkeypatch):
    monkeypatch.setattr(checks, "check_checkpoint", lambda model: "deepseek_v3")
    monkeypatch.setattr(checks, "check_machine", lambda: None)
    check("gsm8k", "niah")
    with pytest.raises(UsageError, match="says nothing about piqa, mmlu"):
        check("gsm8k", "piqa", "mmlu")
    with pytest.raises(UsageError, match="evaluates what quantize wrote"):
        check("gsm8k", fused=False)
    with pytest.raises(UsageError, match="and no --methods"):
        check("gsm8k", methods=("rtn",))
    with pytest.raises(UsageError, match="serves the folder's own format"):
        check("gsm8k", sinks=0)
    with pytest.raises(UsageError, match="drop --device cuda:1"):
        check("gsm8k", device="cuda:1")
    nano = replace(V2_LITE, kv_lora_rank=128, qk_nope_head_dim=64, v_head_dim=64)
    with pytest.raises(UnsupportedModel, match=r"128 \+ 64 channels .* 64 \+ 64 and values of 64"):
        check("gsm8k", geometry=nano)
    with pytest.raises(UnsupportedModel, match="vLLM's own attention does not take"):
        check("gsm8k", geometry=replace(nano, kv_lora_rank=512))
    check("gsm8k", geometry=replace(nano, kv_lora_rank=512, v_head_dim=128))


def test_vllm_still_takes_what_is_taken_here():
    """From its sources: without a GPU its FlashAttention cannot be imported."""
    root = Path(find_spec("vllm").submodule_search_locations[0])
    prefill = (root / "v1/attention/backends/mla/prefill/flash_attn.py").read_text()
    sizes = re.findall(
        r"MLADimensions\(\s*qk_nope_head_dim=(\d+),\s*qk_rope_head_dim=(\d+),\s*v_head_dim=(\d+)",
        prefill,
    )
    assert {tuple(map(int, size)) for size in sizes} == set(checks.HEAD_SIZES)
    assert tuple(MLACommonBackend.get_supported_head_sizes()) == checks.LATENT_CHANNELS


def test_vllm_is_asked_before_work_whether_it_can_serve_the_folder(monkeypatch, tmp_path):
    format_c4r4 = parse_format("c4r4").to_json()
    manifest = {"version": 1, "base_model": "x", "base_sha256": "0", "method": "rtn"}
    config = {"model_type": "minicpm3", CONFIG_KEY: manifest | {"format": format_c4r4}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="is a minicpm3, and the plugin serves deepseek_v2"):
        check("gsm8k", model=str(tmp_path))
    path.write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    monkeypatch.setattr(serving, "versions", lambda: {"vllm": "0.26.0"})
    monkeypatch.setattr(serving, "gpus", lambda: [])
    with pytest.raises(UsageError, match="serving needs GPUs of compute capability 9"):
        check("gsm8k", model=str(tmp_path))
    monkeypatch.setattr(serving, "gpus", lambda: [{"capability": "9.0"}])
    check("gsm8k", model=str(tmp_path))
