import yaml
from report_samples import files_of, write_run

from quantmla.report.build import build
from quantmla.report.collect import collect
from quantmla.report.summary import markdown_table, model_card, summary


def report(*folders):
    return build([collect(str(folder)) for folder in folders])


def test_a_summary_has_headlines_and_quality(tmp_path):
    text = summary(report(write_run(tmp_path / "run")))
    assert text.startswith("# QuantMLA: run\n")
    assert "| KL mean (c4r4, unprotected) | 0.00310 |" in text
    assert "**C4R4, unprotected**" in text
    assert "Not measured" not in text


def test_a_summary_names_what_is_missing(tmp_path):
    one = {"calibration.json": files_of()["calibration.json"]}
    text = summary(report(write_run(tmp_path / "run", one)))
    assert "- Quality: `quantmla eval OUT --unprotected" in text


def test_runs_have_a_column_each(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", files_of(2.0))
    text = summary(report(a, b))
    assert "| figure | a | b |" in text
    assert "| KL mean (c4r4, unprotected) | 0.00310 | 0.00620 (+100.0%) |" in text


def test_a_card_has_front_matter_and_results(tmp_path):
    text = model_card(report(write_run(tmp_path / "run"))["runs"][0])
    _, front, body = text.split("---\n", 2)
    found = yaml.safe_load(front)
    assert found["base_model"] == "nano"
    assert found["model-index"][0]["results"][0]["metrics"] == [{"type": "acc", "value": 0.5}]
    for heading in ("Overview", "Optimizations", "Deployment", "Creation", "Evaluation"):
        assert f"## {heading}\n" in body


def test_a_card_makes_any_checkpoint_again_by_its_recipe(tmp_path):
    run = report(write_run(tmp_path / "run"))["runs"][0]
    mixed = {**run["facts"], "method": "rtn", "format": "c4r4, mixed"}
    text = model_card({**run, "facts": mixed})
    assert "\n    quantmla quantize --recipe recipe.yaml -o OUT\n" in text
    assert "--format" not in text


def test_a_bar_in_a_cell_is_escaped():
    assert "a\\|b" in markdown_table(["h"], [["a|b"]])
