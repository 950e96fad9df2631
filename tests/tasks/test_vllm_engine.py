"""What lm-eval's model of vLLM is told; no engine is started."""

import sys
import types
from pathlib import Path

import pytest

from quantmla.errors import UsageError
from quantmla.quant.format import parse_format
from quantmla.quant.mixed import model_format
from quantmla.tasks.vllm_engine import vllm_arguments, vllm_model


def test_arguments():
    c2r4 = vllm_arguments(Path("out"), parse_format("c2r4"), positions=4096, engines=2)
    base = vllm_arguments(Path("base"), None, positions=4096, engines=2)
    assert (c2r4["pretrained"], c2r4["kv_cache_dtype"]) == ("out", "quantmla_c2r4")
    assert (base["pretrained"], base["kv_cache_dtype"]) == ("base", "auto")
    assert c2r4["max_model_len"] == 4096
    assert c2r4["gpu_memory_utilization"] + base["gpu_memory_utilization"] <= 0.9
    assert set(c2r4) == set(base)


def test_layers_of_different_formats_are_refused():
    mixed = model_format(parse_format("c4r4"), {1: parse_format("c2r4")})
    with pytest.raises(UsageError, match="takes one format for all layers"):
        vllm_arguments(Path("out"), mixed, positions=4096, engines=2)


def test_they_go_to_lm_evals_model(monkeypatch):
    fake = types.ModuleType("lm_eval.models.vllm_causallms")
    fake.VLLM = lambda **arguments: arguments
    monkeypatch.setitem(sys.modules, "lm_eval.models.vllm_causallms", fake)
    assert vllm_model({"pretrained": "x"}) == {"pretrained": "x"}
