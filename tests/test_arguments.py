"""Types of flags."""

import argparse

import pytest

from quantmla.arguments import Parser, amount, count, names, new_or_old_file, positive, seconds
from quantmla.errors import UsageError


def test_whole_numbers():
    assert (positive("1"), count("0"), positive("9" * 18)) == (1, 0, 10**18 - 1)


@pytest.mark.parametrize("text", ["-1", "1.5", "", "x", "9" * 19, "\u0663", " 1"])
def test_what_is_no_whole_number(text: str):
    for kind in (positive, count):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
            kind(text)


@pytest.mark.parametrize("text", ["nan", "-1", "0", "inf", "x", ""])
def test_what_is_no_time(text: str):
    assert seconds("1.5") == amount("1.5") == 1.5
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of seconds above 0"):
        seconds(text)
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number above 0"):
        amount(text)


def test_a_file_is_in_a_folder_that_exists(tmp_path):
    (tmp_path / "old").write_text("")
    for name in ("old", "new"):
        assert new_or_old_file(str(tmp_path / name)) == tmp_path / name
    for path in (tmp_path, tmp_path / "none" / "new", tmp_path / "old" / "new"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a file in a folder"):
            new_or_old_file(str(path))


def test_only_an_earlier_result_is_replaced(tmp_path, monkeypatch):
    file = tmp_path / "file"
    for text in ('{"environment": {}, "rows": []}', '{"results": [1]}', '{"requests": []}'):
        file.write_text(text)
        assert new_or_old_file(str(file)) == file
    monkeypatch.setattr("quantmla.arguments.LARGEST_RESULT", 100)
    large = '{"rows": [' + "0, " * 100 + "0]}"
    for text in ('{"rows": 1}', "[]", "{", "\0\1", "[" * 90, large):
        file.write_text(text)
        with pytest.raises(argparse.ArgumentTypeError, match="is no earlier result"):
            new_or_old_file(str(file))
    with pytest.raises(argparse.ArgumentTypeError, match="is no earlier result"):
        new_or_old_file("/dev/null")


def test_names_are_split_stripped_and_said_once():
    assert names(" a,b ,,a") == ("a", "b")
    with pytest.raises(argparse.ArgumentTypeError, match="names none"):
        names(" , ")


def test_a_wrong_flag_is_an_error_of_ours():
    with pytest.raises(UsageError, match="see tool --help"):
        Parser(prog="tool").parse_args(["--bogus"])
