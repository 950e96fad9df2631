"""The table of docs/maths.md is that of the newest result file, and bears out what it says."""

import json

import make_maths


def rows() -> dict:
    data = json.loads(make_maths.newest(make_maths.RESULTS).read_text())
    return {(row["format"], row["choice"]): row for row in data["rows"]}


def test_the_page_is_up_to_date():
    assert make_maths.PAGE.read_text(encoding="utf-8") == make_maths.render()


def test_counting_what_is_read_packed_is_worth_something_in_both_formats():
    for name in ("c4r4", "c2r4"):
        found = rows()[name, "H of all tokens"]["protected"]
        assert found["more"] > 2 * found["more_error"]


def test_no_choice_beats_the_method_by_three_standard_errors():
    for row in rows().values():
        for setting in make_maths.SETTINGS:
            assert row[setting]["more"] >= -3 * row[setting]["more_error"]


def test_a_line_of_the_table():
    def part(mean: float, more: float, error: float) -> dict:
        return {"kl_mean": mean, "more": more, "more_error": error}

    usual = {"protected": part(0.5, 0, 0), "unprotected": part(0.25, 0, 0)}
    other = {"protected": part(0.55, 0.1, 0.02), "unprotected": part(0.2, -0.2, 0.05)}
    found = {("c4r4", "as it is"): usual, ("c2r4", "as it is"): usual, ("c2r4", "x"): other}
    shown = make_maths.table(found).splitlines()
    assert shown[2] == "| as it is | 0.50000 | 0.25000 | 0.50000 | 0.25000 |"
    assert shown[3] == "| x | - | - | +10.0 ± 2.0 % | -20.0 ± 5.0 % |"
