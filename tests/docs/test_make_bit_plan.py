"""The tables of docs/bit_plan.md are those of the newest result file, and bear out what it says."""

import json

import make_bit_plan


def result() -> dict:
    found: dict = json.loads(make_bit_plan.newest(make_bit_plan.RESULTS).read_text())
    return found


def test_the_page_is_up_to_date():
    assert make_bit_plan.PAGE.read_text(encoding="utf-8") == make_bit_plan.render()


def test_the_plan_beats_uniform_formats_of_the_same_bytes():
    for protected in (False, True):
        rows = {r["name"]: r for r in result()["rows"] if r["protected"] == protected}
        plan = rows["plan"]
        assert plan["bytes_per_token"] <= result()["header"]["budget"]
        for name in ("c3r4", "c4r2"):
            assert rows[name]["bytes_per_token"] >= plan["bytes_per_token"]
            assert plan["kl_mean"] < rows[name]["kl_mean"]


def test_a_line_of_each_table():
    row = {"name": "c9", "bytes_per_token": 94.0, "predicted_kl": 0.5, "kl_mean": 0.25}
    row |= {"kl_error": 0.125, "protected": False}
    shown = make_bit_plan.comparison([row, {**row, "protected": True, "kl_mean": 1.0}])
    assert (
        shown.splitlines()[2] == "| c9 | 94.0 | 0.50000 | 0.25000 ± 0.12500 | 1.00000 ± 0.12500 |"
    )
    cells = [
        {"layer": 0, "path": path, "bits": bits, "cost": bits / 1e4}
        for path in ("content", "rope")
        for bits in (2, 3, 4, 8)
    ]
    shown = make_bit_plan.costs(cells, {"0": "c2r3"})
    assert shown.splitlines()[2] == "| 0 | 2.00 | 3.00 | 4.00 | 2.00 | 3.00 | 4.00 | c2r3 |"
