"""Reports as text: what a person reads."""

import os

import pytest

from quantmla.present import show, show_rows, write_rows


def test_text_of_a_report(capsys):
    report = {
        "total_bytes": 3 * 2**30,
        "ratio": 3.5903,
        "gpus": [],
        "layers": [
            {"prefix": "model.layers.9", "mtp": False, "fold_error": 1.5e-3},
            {"prefix": "model.layers.10", "mtp": True, "fold_error": 12.0},
        ],
        "sizes": {"rotated": True, "rank": 1024},
        "absent": None,
    }
    show(report, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "total bytes  3,221,225,472 (3.00 GiB)",
        "ratio        3.59",
        "gpus         none",
        "layers",
        "  prefix           mtp  fold error",
        "  model.layers.9    no      0.0015",
        "  model.layers.10  yes          12",
        "sizes",
        "  rotated    yes",
        "  rank       1,024",
    ]


def test_large_figures_are_not_in_powers_of_ten(capsys):
    show({"concurrency": 12345.6, "tokens": 1425.44, "inf": float("inf")}, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["12,345.6", "1,425.4", "inf"]


def test_rows_have_a_heading(capsys):
    show_rows([{"method": "rtn", "kl": 0.5}, {"method": "none", "kl": None}])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["method", "kl"], ["rtn", "0.5"], ["none", "-"]]


def test_tables_within_rows_are_left_to_json(capsys):
    show_rows([{"method": "rtn", "by_context": ({"first": 0},), "kl": 1.0}])
    assert [x.split() for x in capsys.readouterr().out.splitlines()] == [
        ["method", "kl"],
        ["rtn", "1"],
    ]


def test_no_rows_print_nothing_much(capsys):
    show_rows([])
    assert capsys.readouterr().out.strip() == ""


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_rows(path, [{"a": 1}])
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]


def test_results_are_readable_as_the_user_s_mask_says(tmp_path):
    before = os.umask(0o022)
    try:
        write_rows(tmp_path / "rows.json", [{"a": 1}])
    finally:
        os.umask(before)
    assert (tmp_path / "rows.json").stat().st_mode & 0o777 == 0o644


def test_no_digit_is_lost_where_there_is_no_terminal(capsys):
    names = [f"a_long_column_{i}" for i in range(11)]
    show_rows([{name: 0.1234 + i / 1000 for i, name in enumerate(names)}])
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == names
    assert line.split() == [f"{0.1234 + i / 1000:.4g}" for i in range(11)]
