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
        for kind in ("signs", "isotropic"):
            of = found["summary"]["interventions"][path_name][kind]
            assert (of["mean"] > 1) == (of["expected"] > 1)


def test_every_figure_is_shown_on_the_page():
    text = make_analysis.PAGE.read_text(encoding="utf-8")
    for path in make_analysis.FIGURES.glob("analysis_*.svg"):
        assert f"figures/{path.name}" in text
