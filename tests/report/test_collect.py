"""Runs are read from any folder; what is wrong with one is a sentence that names it."""

import json

import pytest
from report_samples import analysis, evaluated, files_of, tasks, write_run

from quantmla.errors import QuantMLAError, UsageError
from quantmla.report.collect import KINDS, collect


def test_every_kind_is_known_by_its_content(tmp_path):
    found = collect(str(write_run(tmp_path / "run")))
    assert {record.kind for record in found.records} == set(KINDS)
    assert found.name == "run"


def test_the_newest_file_of_a_kind_counts(tmp_path):
    older, newer = evaluated(), evaluated()
    newer["rows"][0]["tokens"] = 7
    write_run(tmp_path, {"quality_20260102.json": newer, "quality_20260101.json": older})
    assert collect(str(tmp_path)).newest("eval").data["rows"][0]["tokens"] == 7


def test_of_one_date_the_larger_file_counts(tmp_path):
    """A part of it may have been measured again; other names of an older date come later."""
    row, files = evaluated()["rows"][0], {}
    for name, tokens in (("a_20260102", [1, 1]), ("a_20260102_2", [2]), ("b_20260101", [3] * 3)):
        rows = [row | {"tokens": number} for number in tokens]
        files[f"{name}.json"] = evaluated() | {"rows": rows}
    write_run(tmp_path, files)
    assert collect(str(tmp_path)).newest("eval").name == "a_20260102.json"


def test_files_of_others_are_left_alone(tmp_path):
    write_run(tmp_path, {"eval.json": evaluated(), "training.json": {"steps": 3}})
    (tmp_path / "tokenizer.json").write_text("not JSON")
    assert [r.name for r in collect(str(tmp_path)).records] == ["eval.json"]


def test_rows_that_no_section_knows_are_named_in_the_sources(tmp_path):
    write_run(tmp_path, {"eval.json": evaluated(), "trials.json": {"rows": [{"trial": 1}]}})
    assert collect(str(tmp_path)).of("unknown")[0].name == "trials.json"


def test_no_folder(tmp_path):
    with pytest.raises(UsageError, match=r"nothing does not exist"):
        collect(str(tmp_path / "nothing"))


def test_a_file_is_no_run(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UsageError, match=r"x\.json is not a folder"):
        collect(str(tmp_path / "x.json"))


def test_an_empty_run(tmp_path):
    with pytest.raises(UsageError, match=r"is empty: it holds no results of quantize"):
        collect(str(tmp_path))


def test_tasks_without_a_result(tmp_path):
    write_run(tmp_path, {"tasks.json": tasks() | {"results": []}})
    with pytest.raises(QuantMLAError, match=r"tasks\.json is an empty run"):
        collect(str(tmp_path))


@pytest.mark.parametrize("name", ["eval.json", "quantmla_log.json"])
def test_our_own_broken_json(tmp_path, name):
    (tmp_path / name).write_text('{"header": {"versions": {"quantmla": "0"')
    with pytest.raises(QuantMLAError, match=rf"{name} is damaged: it is not JSON"):
        collect(str(tmp_path))


def test_broken_json_of_others_is_left_out_and_named(tmp_path, capsys):
    write_run(tmp_path, {"eval.json": evaluated(), "other.json": {"rows": [1], "header": "x"}})
    (tmp_path / "notes.json").write_text("{'a': ")
    assert [r.name for r in collect(str(tmp_path)).records] == ["eval.json"]
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" is left out: it ")[0] for line in said] == [
        str(tmp_path / name) for name in ("notes.json", "other.json")
    ]


@pytest.mark.parametrize(("name", "data"), [("analysis", analysis()), ("tasks", tasks())])
def test_results_of_another_version(tmp_path, name, data):
    write_run(tmp_path, {f"{name}.json": data | {"version": 2}})
    with pytest.raises(QuantMLAError, match=rf"{name}\.json has version 2, not 1"):
        collect(str(tmp_path))


def test_a_checkpoint_of_another_version(tmp_path):
    config = files_of()["out/config.json"]
    config["quantmla_config"]["version"] = 9
    write_run(tmp_path, {"config.json": config})
    with pytest.raises(QuantMLAError, match="has version 9, not 1"):
        collect(str(tmp_path))


def test_an_earlier_report_in_the_folder_is_no_result(tmp_path):
    write_run(tmp_path, {"eval.json": evaluated(), "report.json": {"schema": "quantmla-report"}})
    assert len(collect(str(tmp_path)).records) == 1


def test_inputs_are_not_touched(tmp_path):
    write_run(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.json")}
    collect(str(tmp_path))
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert json.loads(before[tmp_path / "eval.json"])["rows"]
