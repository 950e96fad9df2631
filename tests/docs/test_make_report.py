"""The published report is what the result files say."""

import make_report


def test_the_report_is_up_to_date():
    assert make_report.PAGE.read_text(encoding="utf-8") == make_report.render(), (
        "run `python docs/make_report.py`"
    )


def test_the_report_is_light():
    assert make_report.PAGE.stat().st_size <= 400_000
