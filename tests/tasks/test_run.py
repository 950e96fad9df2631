"""The whole stage on the packaged model and files that the tests make."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from killed import killed_before

from quantmla.cli import main
from quantmla.errors import QuantMLAError, UsageError
from quantmla.evaluate.variant import Variant
from quantmla.quant.format import parse_format
from quantmla.recipe import EvaluationRequest, TaskRequest
from quantmla.tasks import run as stage
from quantmla.tasks.results import read_run
from quantmla.tasks.run import evaluate_tasks

SCORED = ("hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "gpqa_diamond")
WRITTEN = ("gsm8k", "fda", "swde", "squad", "math500", "aime25", "humaneval", "livecodebench")


@pytest.fixture
def request_for(data, tmp_path):
    def asked(*tasks: str, model: str = "nano", limit: int = 1, **more) -> TaskRequest:
        evaluation = {k: more.pop(k) for k in ("methods", "format") if k in more}
        defaults = {"output": str(tmp_path / "run"), "data": str(data), "max_new_tokens": 4}
        return TaskRequest(
            evaluation=EvaluationRequest(model=model, limit=limit, device="cpu", **evaluation),
            tasks=tasks,
            **{**defaults, **more},
        )

    return asked


@pytest.mark.slow
def test_every_task_runs_offline(request_for, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", None)  # the hub is not asked
    names = (*SCORED, *WRITTEN, "niah_single_1@300")
    found = evaluate_tasks(request_for(*names, run_code=True), progress=False)
    assert found["complete"]
    assert [r["task"] for r in found["results"]] == list(names)
    assert {r["variant"] for r in found["results"]} == {"bf16"}
    assert all(r["items"] == 1 and r["stderr"] is None for r in found["results"])
    by_name = {task["name"]: task for task in found["tasks"]}
    assert by_name["gsm8k"]["shots"] == 5
    assert by_name["gsm8k"]["shots_from"] == "test, other items"
    assert by_name["hellaswag"]["definition"] == "lm-eval hellaswag 1.0"
    assert by_name["livecodebench"]["definition"] == "quantmla livecodebench 1.0"
    assert by_name["aime25"]["max_new_tokens"] == 4
    assert not by_name["aime25"]["chat"]  # nano has no template
    assert by_name["piqa"]["data"] == "llmfoundry_piqa.jsonl"
    assert by_name["piqa"]["items_in_all"] == 2


def test_methods_are_compared_on_the_same_items(request_for, tmp_path):
    request = request_for("mmlu", "fda", limit=3, methods=("rtn",), format="c2r2")
    found = evaluate_tasks(request, progress=False)
    assert read_run(tmp_path / "run") == json.loads(json.dumps(found))
    assert [(v["name"], v["format"]) for v in found["variants"]] == [
        ("bf16", "bf16"),
        ("rtn", "c2r2"),
    ]
    assert found["variants"][1]["bytes_per_token"] < found["variants"][0]["bytes_per_token"] / 4
    assert [(c["task"], c["a"], c["b"], c["items"]) for c in found["comparisons"]] == [
        ("mmlu", "bf16", "rtn", 3),
        ("fda", "bf16", "rtn", 1),
    ]
    items = [
        json.loads((tmp_path / "run/items" / name / "mmlu.json").read_text())["items"]
        for name in ("bf16", "rtn")
    ]
    assert [[i["item"] for i in part] for part in items] == [
        ["mmlu_anatomy/0", "mmlu_anatomy/1", "mmlu_virology/0"]
    ] * 2
    assert items[0] != items[1]  # log-likelihoods saw another cache


def test_a_16_bit_cache_agrees_exactly(request_for, tmp_path, monkeypatch):
    sixteen = Variant(name="rtn", fmt=parse_format("c16r16"))
    monkeypatch.setattr(stage, "fitted_variant", lambda *_: sixteen)
    names = ("piqa", "winogrande", "gsm8k", "swde", "niah_single_3@300")
    found = evaluate_tasks(
        request_for(*names, limit=2, methods=("rtn",), format="c16r16"), progress=False
    )
    assert {r["task"] for r in found["results"]} == set(names)
    for name in names:
        one, two = (
            json.loads((tmp_path / "run/items" / variant / f"{name}.json").read_text())["items"]
            for variant in ("bf16", "rtn")
        )
        assert one == two


def test_a_stopped_run_goes_on(request_for, monkeypatch, tmp_path):
    calls, score = [], stage.score_items

    def stopping(built, *rest):
        calls.append(built.asked.label)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(built, *rest)

    monkeypatch.setattr(stage, "score_items", stopping)
    request = request_for("piqa", "arc_easy")
    with pytest.raises(
        KeyboardInterrupt, match=r"finished tasks are in .*run: go on with --resume"
    ):
        evaluate_tasks(request, progress=False)
    half = read_run(tmp_path / "run")
    assert not half["complete"] or len(half["tasks"]) == 1
    with pytest.raises(UsageError, match="holds a run: go on with --resume"):
        evaluate_tasks(request, progress=False)
    found = evaluate_tasks(replace(request, resume=True), progress=False)
    assert calls == ["piqa", "arc_easy", "arc_easy"]
    assert found["complete"]
    assert found["results"][0] == half["results"][0]
    more = replace(request, resume=True, tasks=("winogrande",))
    assert len(evaluate_tasks(more, progress=False)["results"]) == 3
    other = replace(request.evaluation, limit=2)
    with pytest.raises(UsageError, match="other data or settings of task piqa"):
        evaluate_tasks(replace(request, resume=True, evaluation=other), progress=False)


@pytest.mark.slow
def test_a_run_that_was_killed_at_any_change_of_a_file_goes_on(request_for, monkeypatch, tmp_path):
    found, score, folder = {}, stage.score_items, tmp_path / "run"

    def once(built, *rest):
        label = built.asked.label
        if label not in found:
            found[label] = score(built, *rest)
        return found[label]

    monkeypatch.setattr(stage, "score_items", once)
    request = request_for("piqa", "arc_easy")
    whole = evaluate_tasks(replace(request, output=str(tmp_path / "whole")), progress=False)
    for change in range(100):
        killed = killed_before(change, folder, lambda: evaluate_tasks(request, progress=False))
        again = evaluate_tasks(replace(request, resume=True), progress=False)
        assert again["complete"], change
        assert [r["score"] for r in again["results"]] == [r["score"] for r in whole["results"]]
        if not killed:
            break
        shutil.rmtree(folder)
    assert change > 10


@pytest.mark.parametrize(
    ("tasks", "more", "words"),
    [
        (("humaneval",), {}, "add --run-code to agree"),
        (("paper-reasoning",), {}, "humaneval runs programs"),
        (("hellaswag", "nope"), {}, "unknown task 'nope'"),
        (("niah@8192",), {}, "longer than the model's 4096 positions"),
        (("piqa",), {"data": "absent"}, "--data 'absent' is not a folder"),
        (("piqa",), {"data": ""}, "--data '' is not a folder"),
        (("piqa",), {"engine": "vllm"}, "evaluates what quantize wrote"),
        (("piqa",), {"model": "absent"}, "no model at 'absent'"),
    ],
)
def test_what_is_refused_before_work(request_for, monkeypatch, tasks, more, words):
    monkeypatch.setattr(stage, "loaded_model", None)
    request = request_for(*tasks, **more)
    with pytest.raises(QuantMLAError, match=words):
        evaluate_tasks(request, progress=False)
    assert not Path(request.output).exists()


def test_a_folder_that_is_taken_is_found_before_models_are_loaded(request_for, monkeypatch):
    monkeypatch.setattr(stage, "loaded_model", None)
    monkeypatch.setattr(stage, "fitted_variant", None)
    request = request_for("piqa", methods=("rtn",))
    Path(request.output).mkdir()
    (Path(request.output) / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not a run"):
        evaluate_tasks(request, progress=False)
    with pytest.raises(UsageError, match="output /dev/null cannot be written"):
        evaluate_tasks(replace(request, output="/dev/null"), progress=False)


def test_methods_whose_names_would_clash(request_for):
    with pytest.raises(UsageError, match="--methods names rtn twice"):
        evaluate_tasks(request_for("piqa", methods=("rtn", "rtn")), progress=False)
    with pytest.raises(UsageError, match="unknown method 'nope'"):
        evaluate_tasks(request_for("piqa", methods=("nope",)), progress=False)


def test_a_task_without_data(request_for, tmp_path):
    with pytest.raises(UsageError, match=r"no data for task piqa in .* needs piqa\.jsonl or llm"):
        evaluate_tasks(request_for("piqa", data=str(tmp_path)), progress=False)


def test_without_lm_eval(request_for, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'quantmla\[eval\]'"):
        evaluate_tasks(request_for("piqa"), progress=False)


def test_on_the_command_line(data, tmp_path, capsys):
    run = tmp_path / "run"
    argv = ["eval", "nano", "--tasks", "piqa,arc_easy", "--data", str(data), "-o", str(run)]
    assert main([*argv, "--limit", "1", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == list(
        ("task", "variant", "metric", "score", "stderr", "recovery", "items")
    )
    assert [line.split()[0] for line in lines[1:3]] == ["piqa", "arc_easy"]
    assert read_run(run)["complete"]
