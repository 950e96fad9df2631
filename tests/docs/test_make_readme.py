"""README's table is what the newest result file says."""

import json

import make_readme
import pytest
from markers import replace_part

ROW = {
    "method": "quantmla",
    "format": "c4r4",
    "sinks": 0,
    "recent": None,
    "perplexity": 7.125,
    "kl_mean": 0.00537,
    "kl_p99": 0.0812,
    "top1": 0.9712,
    "recall": None,
    "tokens": 8192,
    "bytes_per_token": 880.0,
}
HEADER = {"versions": {"torch": "2.13.0", "quantmla": "0.1.0"}, "gpus": []}


def test_readme_is_up_to_date():
    assert make_readme.README.read_text(encoding="utf-8") == make_readme.render()


@pytest.fixture
def places(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("top\n<!-- results: generated -->\nold\n<!-- end of results -->\nend\n")
    return tmp_path, readme


def test_rows_of_the_newest_file_in_tables_by_format_and_protection(places):
    folder, readme = places
    rows = [ROW, {**ROW, "method": "rtn"}, {**ROW, "sinks": 4, "recent": 128, "recall": 1.0}]
    for date, content in (("20260101", [{**ROW, "method": "old"}]), ("20260203", rows)):
        path = folder / f"quality_nano_{date}.json"
        path.write_text(json.dumps({"header": HEADER, "rows": content}))
    lines = make_readme.render(folder, readme).splitlines()
    assert lines[0] == "top"
    assert lines[-1] == "end"
    assert "2026-02-03" in lines[2]
    assert "CPU" in lines[2]
    assert "| quantmla | 880 | 7.125 | 0.00537 | 0.081 | 97.1% | - |" in lines
    heads = [line for line in lines if line.startswith("**")]
    assert heads == [
        "**C4R4, unprotected**, 8,192 tokens of held-out text",
        "**C4R4, protected (4 + 128 tokens in bf16)**, 8,192 tokens of held-out text",
    ]
    assert not [line for line in lines if "old" in line]


def test_transforms_in_one_quantiser_are_a_line_for_each_format_and_protection(places):
    folder, readme = places
    (folder / "quality_nano_20260203.json").write_text(
        json.dumps({"header": HEADER, "rows": [ROW]})
    )
    readme.write_text(
        readme.read_text() + "<!-- quantisers: generated -->\n<!-- end of quantisers -->\n"
    )
    row = {"format": "c2r4", "protected": True, "windows": 16, "windows_below_ours": 15}
    rows = [
        row | {"transform": name, "kl_mean": kl, "kl_more_than_ours": kl - 0.01}
        for name, kl in (("paper", 0.0075), ("quantmla", 0.01))
    ]
    found = {"rows": [each | {"standard_error": 0.0006} for each in rows]}
    (folder / "quantisers_nano_20260204.json").write_text(json.dumps(found))
    lines = make_readme.render(folder, readme).splitlines()
    assert "| C2R4, protected | 0.00750 | 0.01000 | -0.00250 ± 0.00060 | 15 of 16 |" in lines


def test_without_a_file_no_figure_is_claimed(places):
    folder, readme = places
    assert "No result file yet" in make_readme.render(folder, readme)


def test_missing_markers_are_named(tmp_path):
    path = tmp_path / "x.md"
    path.write_text("nothing")
    with pytest.raises(ValueError, match="results: generated"):
        replace_part(path, "results", "body")
