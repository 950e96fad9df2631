"""Run folders: what is read, refused, averaged and gone on from."""

import json

import pytest

from quantmla.errors import QuantMLAError, UsageError
from quantmla.tasks.results import (
    averages,
    finished,
    item_path,
    read_run,
    start_run,
    summarize,
    write_json,
)

TASK = {"name": "piqa", "metric": "acc_norm"}
DOCUMENT = {
    "schema": "quantmla-tasks",
    "version": 1,
    "complete": False,
    "header": {"versions": {"quantmla": "1"}},
    "model": {"id": "x"},
    "settings": {"device": "cpu"},
    "variants": [{"name": "bf16"}, {"name": "rtn"}],
    "tasks": [TASK],
}


@pytest.fixture
def folder(tmp_path):
    """A run of one task through both variants."""
    for name, scores in (("bf16", [1.0, 1.0, 0.0, 1.0]), ("rtn", [1.0, 0.0, 0.0, 0.0])):
        items = [{"item": str(i), "score": s} for i, s in enumerate(scores)]
        part = {"task": TASK, "cost": {"seconds": 1.0}, "items": items}
        write_json(item_path(tmp_path, name, "piqa"), part)
    write_json(tmp_path / "tasks.json", summarize(tmp_path, DOCUMENT))
    return tmp_path


def test_results_recovery_and_comparison(folder):
    found = read_run(folder)
    assert found["complete"]
    bf16, rtn = found["results"]
    assert (bf16["score"], bf16["recovery"], bf16["items"]) == (0.75, 1.0, 4)
    assert bf16["stderr"] == pytest.approx(0.25)
    assert rtn["recovery"] == pytest.approx(1 / 3)
    assert rtn["seconds"] == 1.0
    (pair,) = found["comparisons"]
    assert (pair["a"], pair["b"], pair["only_a"], pair["only_b"]) == ("bf16", "rtn", 2, 0)
    assert (pair["difference"], pair["p"], pair["test"]) == (-0.5, 0.5, "mcnemar")


def test_a_run_without_all_variants_is_not_complete(folder):
    item_path(folder, "rtn", "piqa").unlink()
    found = summarize(folder, DOCUMENT)
    assert not found["complete"]
    assert [r["variant"] for r in found["results"]] == ["bf16"]
    assert found["comparisons"] == []


def changed(folder, **changes):
    path = folder / "tasks.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "has version 2, not 1"),
        ({"schema": "other"}, "has schema 'other'"),
        ({"results": []}, "is an empty run: no task has been finished"),
        ({"results": [5]}, "is damaged: it has something else under results"),
        ({"header": [], "complete": 1}, "is damaged: it has something else under header, compl"),
    ],
)
def test_runs_that_cannot_be_read(folder, changes, words):
    changed(folder, **changes)
    with pytest.raises(QuantMLAError, match=words):
        read_run(folder)


def test_what_is_no_run(tmp_path):
    with pytest.raises(UsageError, match=r"is not a run .* no tasks\.json"):
        read_run(tmp_path)
    (tmp_path / "tasks.json").write_text("{")
    with pytest.raises(QuantMLAError, match="cannot be read"):
        read_run(tmp_path)
    (tmp_path / "tasks.json").write_text('{"schema": "quantmla-tasks", "version": 1}')
    with pytest.raises(QuantMLAError, match="it lacks header, model"):
        read_run(tmp_path)


def test_going_on(folder):
    assert start_run(folder, {**DOCUMENT, "tasks": []}, resume=True)["tasks"] == [TASK]
    with pytest.raises(UsageError, match="holds a run: go on with --resume"):
        start_run(folder, DOCUMENT, resume=False)
    other = {**DOCUMENT, "model": {"id": "y"}, "header": {"versions": {"quantmla": "2"}}}
    with pytest.raises(UsageError, match="a run with other model, versions"):
        start_run(folder, other, resume=True)
    changed(folder, version=0)
    with pytest.raises(UsageError, match="written by another version"):
        start_run(folder, DOCUMENT, resume=True)


def test_a_folder_of_something_else(tmp_path):
    assert start_run(tmp_path / "new", DOCUMENT, resume=False) is DOCUMENT
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not a run"):
        start_run(tmp_path, DOCUMENT, resume=True)


def test_items_of_other_data_are_not_taken_over(folder):
    with pytest.raises(UsageError, match="of other data or settings of task piqa"):
        finished(folder, "rtn", {**TASK, "data_sha256": "z"})
    assert finished(folder, "rtn", {**TASK, "name": "boolq"}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"items": None},
        {"items": {}},
        {"items": [5]},
        {"items": [{"item": "0"}]},
        {"items": [{"item": "0", "score": "1"}]},
        {"cost": None},
        {"cost": [1.0]},
        {"cost": {"score": 1.0}},
    ],
)
def test_an_edited_item_is_named(folder, change):
    path = item_path(folder, "rtn", "piqa")
    whole = json.loads(path.read_text())
    (key,) = change
    for edit in (whole | change, {k: v for k, v in whole.items() if k != key}):
        path.write_text(json.dumps(edit))
        with pytest.raises(QuantMLAError, match=r"piqa\.json is damaged: remove this file to run"):
            summarize(folder, DOCUMENT)


def test_items_are_as_many_as_the_task_has(folder):
    task = {**TASK, "items": 5}
    path = item_path(folder, "rtn", "piqa")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task": task}))
    with pytest.raises(QuantMLAError, match=r"piqa\.json is damaged"):
        finished(folder, "rtn", task)


@pytest.mark.parametrize(
    "change",
    [{"header": None}, {"header": []}, {"tasks": None}, {"tasks": [5]}, {"tasks": [{"name": 5}]}],
)
def test_an_edited_run_is_named(folder, change):
    changed(folder, **change)
    with pytest.raises(QuantMLAError, match=r"tasks\.json is damaged"):
        start_run(folder, DOCUMENT, resume=True)


def test_averages_are_over_the_published_columns():
    five = ("hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande")
    score = {**{name: i / 10 for i, name in enumerate(five)}, "mmlu": 0.5, "gsm8k": 0.1}

    def results(tasks, variant, factor=1.0):
        return [{"task": t, "variant": variant, "score": factor * score[t]} for t in tasks]

    rows = results(score, "bf16") + results(score, "rtn", 0.5)
    general, _, reasoning, _ = averages(rows, ["bf16", "rtn"])
    assert general["tasks"] == ["CS", "mmlu", "gsm8k"]
    assert general["score"] == pytest.approx((0.2 + 0.5 + 0.1) / 3)
    assert reasoning["tasks"] == ["mmlu", "gsm8k"]
    assert averages(rows, ["bf16", "rtn"])[1]["recovery"] == pytest.approx(0.5)
    four = results(five[:4], "bf16")
    assert averages(four, ["bf16"]) == []
