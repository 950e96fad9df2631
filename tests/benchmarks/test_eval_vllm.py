"""Both engines are asked the same, and their items are compared one by one."""

import argparse
import json
from pathlib import Path

import eval_vllm
import pytest

from quantmla.cli import main
from quantmla.method import options_for
from quantmla.tasks import run as stage
from quantmla.tasks.results import FILE, SCHEMA, VERSION, item_path, write_json

OPTIONS = argparse.Namespace(
    tasks=("niah@1024", "gsm8k"), data=Path("data"), limit=7, max_new_tokens=5, device="auto"
)


def test_quantize_gets_a_recipe_that_it_takes(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(eval_vllm.pipeline, "quantize", lambda recipe, **_: asked.append(recipe))
    monkeypatch.setattr(eval_vllm, "write_wide_nano", lambda out: out.mkdir())
    base, out = eval_vllm.make_model(tmp_path, "cpu")
    (recipe,) = asked
    assert (recipe.model.id, recipe.output.folder) == (str(base), str(out))
    assert options_for(recipe.transform.method, recipe.transform.options).steps < 300


def test_the_command_asks_what_this_process_asks(monkeypatch):
    asked = []

    def evaluate(request, progress):
        asked.append(request)
        return {"results": [], "averages": [], "comparisons": []}

    monkeypatch.setattr(stage, "evaluate_tasks", evaluate)
    paths = (Path("base"), Path("out"), Path("run"))
    _, *module = eval_vllm.vllm_command(*paths, OPTIONS)
    assert module[:2] == ["-m", "quantmla"]
    assert main(module[2:]) == 0
    assert asked == [eval_vllm.task_request(*paths, OPTIONS, engine="vllm")]


def written(folder, answers):
    """A run of one task with two items through each variant."""
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "complete": True,
        "header": {},
        "model": {},
        "settings": {},
        "variants": [{"name": "bf16", "format": "bf16"}, {"name": "rtn", "format": "c4r4"}],
        "tasks": [{"name": "gsm8k", "max_new_tokens": 5}],
        "results": [],
    }
    for variant, pairs in answers.items():
        items = [{"score": score, "answer": [text]} for score, text in pairs]
        write_json(item_path(folder, variant, "gsm8k"), {"items": items})
        score = sum(score for score, _ in pairs) / 2
        result = {"task": "gsm8k", "variant": variant, "score": score, "stderr": 0.1, "items": 2}
        document["results"].append(result)
    write_json(folder / FILE, document)
    return folder


def test_rows_tell_how_many_items_agree(tmp_path):
    theirs = {"bf16": [(1.0, " 5"), (0.0, "no")], "rtn": [(1.0, " 5"), (1.0, "6")]}
    ours = {"bf16": [(1.0, "5 "), (0.0, "nay")], "rtn": [(0.0, "4"), (1.0, "6")]}
    runs = {
        "transformers": written(tmp_path / "a", theirs),
        "vllm": written(tmp_path / "b", ours),
    }
    rows = {(row["engine"], row["variant"]): row for row in eval_vllm.collected(runs)}
    assert len(rows) == 4
    assert rows["vllm", "rtn"]["format"] == "c4r4"
    found = {v: (rows["vllm", v]["same_score"], rows["vllm", v]["same_answer"]) for v in theirs}
    assert found == {"bf16": (2, 1), "rtn": (1, 1)}
    assert "same_score" not in rows["transformers", "rtn"]
    json.dumps(list(rows.values()))


def test_other_numbers_of_items_are_not_compared():
    with pytest.raises(ValueError, match="shorter"):
        eval_vllm.agreement([(1.0, "a")], [])
