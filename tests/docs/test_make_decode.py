"""The decode tables of docs/kernels.md are those of the newest result file."""

import json

import make_decode
import pytest


def rows() -> list[dict]:
    found: list[dict] = json.loads(make_decode.newest(make_decode.RESULTS).read_text())["rows"]
    return found


def test_the_page_is_up_to_date():
    assert make_decode.PAGE.read_text(encoding="utf-8") == make_decode.render()


@pytest.mark.parametrize("goal", make_decode.GOALS)
def test_goals_are_met(goal):
    ratio = make_decode.ratio(make_decode.find(rows(), goal))
    assert ratio >= goal.must
    assert ratio > 1 or goal.heads == 128


def test_a_missed_goal_is_marked():
    row = {"heads": 16, "query_len": 1, "us": 100.0, "baseline": "fa3_mla", "baseline_us": 179.0}
    row |= {"ratio": 1.79, "dequantize_then_attend_us": 1000.0}
    all_rows = [
        {**row, "heads": g.heads, "context": g.context, "batch": g.batch, "format": g.format}
        for g in make_decode.GOALS
    ]
    shown = make_decode.goals(all_rows).splitlines()
    assert shown[2] == (
        "| 16 | 1 | 32K x 32 | C4R4 | 100.0 | 179.0 (fa3_mla) | 1.79 | 1000 | 1.8 (missed) | 2.6 |"
    )
    assert "missed" not in shown[5]
