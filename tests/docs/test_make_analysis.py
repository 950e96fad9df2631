"""docs/analysis.md and its figures are what the newest result file says."""

import json

import make_analysis


def test_page_and_figures_are_up_to_date():
    for path, text in make_analysis.render().items():
        assert path.read_text(encoding="utf-8") == text, path


def test_what_the_published_analysis_of_nano_shows():
    path = make_analysis.newest()
    assert path.stat().st_size < 100_000
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["model"] == "nano"
    assert found["bound_violations"] == 0
    assert found["predictor_spearman"] >= 0.9
    gain = found["summary"]["gain"]
    assert not set(gain["fitted_on"]) & set(gain["judged_on"])
    low, high = found["rope_content_ratio_interval"]
    assert 0 < low <= found["rope_content_ratio"] <= high
    for path_name in ("content", "rope"):
        for kind in make_analysis.KINDS:
            of = found["summary"]["interventions"][path_name][kind]
            assert (of["mean"] > 1) == (of["expected"] > 1)
            assert of["agree"] == of["layers"] == len(found["layers"])


def test_every_figure_is_shown_on_the_page():
    text = make_analysis.PAGE.read_text(encoding="utf-8")
    for path in make_analysis.FIGURES.glob("analysis_*.svg"):
        assert f"figures/{path.name}" in text


def test_a_layer_of_a_large_model_takes_less_than_a_minute():
    path = make_analysis.newest(make_analysis.TIMES)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {(row["shape"], row["preset"]) for row in found["rows"]} == {
        ("DeepSeek-V2-Lite", "paper")
    }
    seconds = {row["study"]: row["seconds"] for row in found["rows"]}
    assert 0 < seconds["matched_error"] + seconds["gain"] < 60
    shown = make_analysis.PAGE.read_text(encoding="utf-8")
    for study, value in seconds.items():
        assert f"| {study} | {value:.3f} |" in shown
    assert f"**{sum(seconds.values()):.1f}**" in shown
    assert all(name in shown for name in (*found["header"]["gpus"], path.name))


def test_the_times_shown_are_those_of_the_newest_file(tmp_path):
    for day, seconds in (("20260101", 1.25), ("20260202", 2.5)):
        row = {"shape": "S", "preset": "quick", "study": "gain", "sequences": 2, "tokens": 1024}
        row |= {"seconds": seconds, "peak_gib": 0.5}
        header = {"versions": {"torch": "3.0", "transformers": "6.0"}, "gpus": ["A GPU"]}
        text = json.dumps({"header": header, "rows": [row]})
        (tmp_path / f"analysis_h200_{day}.json").write_text(text)
    shown = make_analysis.layer_time(make_analysis.newest(make_analysis.TIMES, tmp_path))
    assert "| gain | 2.500 | 0.50 |" in shown
    assert "2 sequences, 1,024 tokens. A GPU, 2026-02-02, torch 3.0" in shown
    assert "1.25" not in shown
