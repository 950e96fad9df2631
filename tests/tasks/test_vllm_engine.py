"""What lm-eval's model of vLLM is told; no engine is started."""

import sys
import types
from pathlib import Path

from quantmla.tasks.vllm_engine import vllm_arguments, vllm_model


def test_arguments():
    packed = vllm_arguments(Path("out"), packed=True, positions=4096, engines=2)
    base = vllm_arguments(Path("base"), packed=False, positions=4096, engines=2)
    assert (packed["pretrained"], packed["attention_backend"]) == ("out", "CUSTOM")
    assert base["pretrained"] == "base"
    assert "attention_backend" not in base
    assert packed["kv_cache_dtype"] == base["kv_cache_dtype"] == "auto"
    assert packed["max_model_len"] == 4096
    assert packed["gpu_memory_utilization"] + base["gpu_memory_utilization"] <= 0.9


def test_they_go_to_lm_evals_model(monkeypatch):
    fake = types.ModuleType("lm_eval.models.vllm_causallms")
    fake.VLLM = lambda **arguments: arguments
    monkeypatch.setitem(sys.modules, "lm_eval.models.vllm_causallms", fake)
    assert vllm_model({"pretrained": "x"}) == {"pretrained": "x"}
