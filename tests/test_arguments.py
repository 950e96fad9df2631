"""Types of flags."""

import argparse

import pytest

from quantmla.arguments import Parser, count, names, positive
from quantmla.errors import UsageError


def test_whole_numbers():
    assert (positive("1"), count("0"), positive("9" * 18)) == (1, 0, 10**18 - 1)


@pytest.mark.parametrize("text", ["-1", "1.5", "", "x", "9" * 19, "\u0663", " 1"])
def test_what_is_no_whole_number(text: str):
    for kind in (positive, count):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
            kind(text)


def test_names_are_split_stripped_and_said_once():
    assert names(" a,b ,,a") == ("a", "b")
    with pytest.raises(argparse.ArgumentTypeError, match="names none"):
        names(" , ")


def test_a_wrong_flag_is_an_error_of_ours():
    with pytest.raises(UsageError, match="see tool --help"):
        Parser(prog="tool").parse_args(["--bogus"])
