"""What is refused, with a sentence."""

import json

import pytest

from quantmla.errors import UnsupportedModel, UsageError
from quantmla.manifest import CONFIG_KEY
from quantmla.quant.format import parse_format
from quantmla.recipe import EvaluationRequest, TaskRequest
from quantmla.serving import command as serving
from quantmla.tasks import checks
from quantmla.tasks.checks import check_engine
from quantmla.tasks.registry import asked_tasks


def check(*tasks, fused=True, **given):
    evaluation = EvaluationRequest(**{"model": "out"} | given)
    request = TaskRequest(evaluation=evaluation, tasks=tasks, output="run", engine="vllm")
    check_engine(asked_tasks(tasks, 4096), request, fused=fused)


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
