import json
import os
from pathlib import Path

import pytest
from report_samples import evaluated, write_run

from quantmla.cli import main
from quantmla.errors import QuantMLAError, UsageError
from quantmla.report.collect import SCHEMA
from quantmla.report.page import page
from quantmla.report.write import write_report


def test_the_page_is_written_from_the_saved_numbers(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    out = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert page(found) == out.read_text()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run", "report.html", "report.json", "summary.md", "model_card.md"}
    assert "report.html" in capsys.readouterr().out


def test_reports_in_one_folder_leave_one_another_alone(tmp_path):
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    kept = {}
    for run, page_name in zip((*runs, runs[0]), ("report", "a", "b"), strict=True):
        found = write_report([run], str(tmp_path / f"{page_name}.html"), overwrite=False)
        assert not set(found["written"]) & set(kept)
        kept |= {path: Path(path).read_text() for path in found["written"]}
    assert kept == {path: Path(path).read_text() for path in kept}
    names = {Path(path).name for path in kept}
    assert {"summary.md", "a_summary.md", "b_summary.md", "a_model_card.md", "a.json"} <= names
    assert len(names) == 3 * 4


def test_several_runs_have_no_card(tmp_path):
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    write_report(runs, str(tmp_path / "report.html"), overwrite=False)
    assert not (tmp_path / "model_card.md").exists()


def test_a_run_without_a_checkpoint_has_no_card(tmp_path):
    run = str(write_run(tmp_path / "run", {"eval.json": evaluated()}))
    found = write_report([run], str(tmp_path / "report.html"), overwrite=False)
    assert not (tmp_path / "model_card.md").exists()
    assert not any("model_card" in path for path in found["written"])


def test_a_comparison_does_not_claim_to_replace_a_card(tmp_path):
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    for name in ("summary.md", "model_card.md"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=r"summary\.md would be replaced") as refused:
        write_report(runs, str(tmp_path / "report.html"), overwrite=False)
    assert "model_card" not in str(refused.value)


@pytest.mark.parametrize("runs", [[], {}, [5], [{"files": [{}]}], [{}, {}], None])
def test_numbers_that_are_no_whole_report_s_say_nothing_of_a_card(runs, tmp_path):
    run = str(write_run(tmp_path / "run"))
    earlier = {"schema": SCHEMA} if runs is None else {"schema": SCHEMA, "runs": runs}
    (tmp_path / "report.json").write_text(json.dumps(earlier))
    (tmp_path / "model_card.md").write_text("mine")
    with pytest.raises(UsageError, match=r"model_card\.md would be replaced"):
        write_report([run], str(tmp_path / "report.html"), overwrite=False)


def test_a_card_that_no_report_wrote_is_not_replaced(tmp_path):
    """A comparison wrote the other files, and none."""
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    (tmp_path / "model_card.md").write_text("mine")
    write_report(runs, str(tmp_path / "report.html"), overwrite=False)
    with pytest.raises(UsageError, match=r"^\S*model_card\.md would be replaced"):
        write_report(runs[:1], str(tmp_path / "report.html"), overwrite=False)
    assert (tmp_path / "model_card.md").read_text() == "mine"


@pytest.mark.parametrize("folder", [b"caf\xe9", b"plain"])
def test_names_and_texts_that_are_no_utf8_are_shown_escaped(folder, tmp_path):
    rows = evaluated()
    rows["header"]["versions"]["torch"] = "\ud800"
    run = write_run(tmp_path / os.fsdecode(folder), {"eval.json": rows})
    write_report([str(run)], str(tmp_path / "report.html"), overwrite=False)
    json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert "\\ud800" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_number_that_no_page_can_show_is_damage(tmp_path):
    rows = evaluated()
    for row in rows["rows"]:
        row["bytes_per_token"] = 10**400  # no float holds it
    run = write_run(tmp_path / "run", {"eval.json": rows})
    with pytest.raises(QuantMLAError, match=r"eval\.json is damaged"):
        write_report([str(run)], str(tmp_path / "report.html"), overwrite=False)
    assert not (tmp_path / "report.html").exists()


def test_an_earlier_report_is_replaced_other_files_are_not(tmp_path):
    run = str(write_run(tmp_path / "run", {"eval.json": evaluated()}))
    out = tmp_path / "report.html"
    write_report([run], str(out), overwrite=False)
    write_report([run], str(out), overwrite=False)
    other = tmp_path / "other"
    other.mkdir()
    (other / "summary.md").write_text("mine")
    with pytest.raises(UsageError, match=r"summary\.md would be replaced"):
        write_report([run], str(other / "report.html"), overwrite=False)
    assert (other / "summary.md").read_text() == "mine"
    write_report([run], str(other / "report.html"), overwrite=True)
    assert (other / "summary.md").read_text() != "mine"


@pytest.mark.parametrize(
    ("output", "words"),
    [("report.txt", "must be a file that ends in .html"), ("no/report.html", "does not exist")],
)
def test_an_output_that_cannot_be_meant(tmp_path, output, words):
    run = str(write_run(tmp_path / "run", {"eval.json": evaluated()}))
    with pytest.raises(UsageError, match=words):
        write_report([run], str(tmp_path / output), overwrite=False)


def test_a_damaged_run_leaves_nothing_behind(tmp_path):
    run = write_run(tmp_path / "run", {"eval.json": evaluated()})
    (run / "eval.json").write_text("{")
    with pytest.raises(QuantMLAError):
        write_report([str(run)], str(tmp_path / "report.html"), overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_wrong_run_is_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none"), "-o", str(tmp_path / "r.html")]) == 2
    assert capsys.readouterr().err == f"quantmla: error: run {tmp_path / 'none'} does not exist\n"
