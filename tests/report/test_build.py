import json
import shlex

import pytest
from report_samples import evaluated, files_of, write_run

from quantmla.cli import build_parser
from quantmla.errors import QuantMLAError
from quantmla.report.build import build, comparison, rounded
from quantmla.report.collect import collect
from quantmla.report.sections import SECTIONS, section


def built(*folders):
    return build([collect(str(folder)) for folder in folders])


def test_a_run_with_everything_has_every_section(tmp_path):
    run = built(write_run(tmp_path / "a"))["runs"][0]
    assert set(run["sections"]) == set(SECTIONS)
    assert run["facts"]["model"] == "nano"
    assert run["facts"]["format"] == "c4r4"


def test_the_report_is_json_and_survives_it(tmp_path):
    report = built(write_run(tmp_path / "a"))
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_sections_without_data_are_left_out(tmp_path):
    one = {"calibration.json": files_of()["calibration.json"]}
    assert set(built(write_run(tmp_path / "a", one))["runs"][0]["sections"]) == {"cost"}
    one = {"eval.json": evaluated()}
    found = set(built(write_run(tmp_path / "b", one))["runs"][0]["sections"])
    assert found == {"capacity", "quality", "context"}


@pytest.mark.parametrize("key", SECTIONS)
def test_every_section_says_how_to_make_its_data(key):
    part = section(key)
    assert part.TITLE
    command = part.COMMAND.removesuffix("; done").split("; do ")[-1].split(" > ")[0]
    program, *arguments = shlex.split(command)
    assert program in ("quantmla", "python")
    if program == "quantmla":
        build_parser().parse_args(arguments)  # exits where a flag or an argument is wrong
    assert part.__doc__


def test_runs_are_compared_with_the_first(tmp_path):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", files_of(scale=2.0))
    rows = {row["label"]: row for row in built(a, b)["comparison"]}
    kl = rows["KL mean (c4r4, unprotected)"]
    assert kl["values"] == [0.0031, 0.0062]
    assert kl["changes"] == [1.0]
    assert kl["verdicts"] == ["worse"]
    assert rows["bytes per token and layer"]["verdicts"] == ["same"]


def test_better_depends_on_the_figure():
    line = {"section": "s", "label": "x", "spec": ".1f"}
    parts = [{"headlines": [line | {"better": "higher", "value": v}]} for v in (2.0, 3.0, 1.0)]
    (row,) = comparison(parts)
    assert row["verdicts"] == ["better", "worse"]
    assert row["changes"] == [0.5, -0.5]


def test_what_one_run_lacks_is_compared_with_nothing():
    line = {"section": "s", "label": "x", "spec": ".1f", "better": "lower", "value": 2.0}
    (row,) = comparison([{"headlines": []}, {"headlines": [line]}])
    assert row["values"] == [None, 2.0]
    assert row["changes"] == [None]
    assert row["verdicts"] == ["alone"]


def test_no_change_is_claimed_between_figures_that_are_shown_alike():
    line = {"section": "s", "label": "seconds", "spec": ",.0f", "better": "lower"}
    parts = [{"headlines": [line | {"value": v}]} for v in (0.03, 0.02, 0.6)]
    (row,) = comparison(parts)
    assert row["verdicts"] == ["same", "worse"]
    assert row["changes"] == [0.0, pytest.approx(19.0)]


def test_equal_zeros_are_the_same():
    line = {"section": "s", "label": "violations", "spec": "d", "better": "lower", "value": 0}
    (row,) = comparison([{"headlines": [line]}, {"headlines": [line]}])
    assert row["verdicts"] == ["same"]


def test_runs_of_one_name_are_told_apart(tmp_path):
    a, b = write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run")
    assert [run["name"] for run in built(a, b)["runs"]] == ["run (1)", "run (2)"]


def test_a_damaged_file_is_named(tmp_path):
    data = evaluated()
    del data["rows"][1]["perplexity"]
    folder = write_run(tmp_path / "a", {"eval.json": data})
    with pytest.raises(QuantMLAError, match=r": eval\.json is damaged.*'Quality'.*'perplexity' is"):
        built(folder)
    data = evaluated()
    data["rows"][1]["perplexity"] = "<b>"
    folder = write_run(tmp_path / "b", {"a.json": data, "b.json": data})
    said = r"one of a\.json, b\.json is damaged.* made: an entry has a value of the wrong kind$"
    with pytest.raises(QuantMLAError, match=said):
        built(folder)


def test_numbers_keep_six_digits_and_are_finite():
    found = rounded({"a": [1.23456789, float("nan")], "b": (1, "x", True)})
    assert found == {"a": [1.23457, None], "b": [1, "x", True]}


def test_files_that_no_section_shows_are_marked(tmp_path):
    folder = write_run(tmp_path / "a", {"e.json": evaluated(), "t.json": {"rows": [{"trial": 1}]}})
    used = {file["name"]: file["used"] for file in built(folder)["runs"][0]["files"]}
    assert used == {"e.json": True, "t.json": False}
