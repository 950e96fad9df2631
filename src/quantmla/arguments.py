"""Types and words that several subcommands' flags share."""

import argparse
import re

MODEL_HELP = "a checkpoint folder, a hub id, or 'nano', the packaged model"
DEVICE_HELP = "cpu, cuda, cuda:1, ... (default: a GPU where there is one)"


def whole(text: str, least: int) -> int:
    """A number of at most 18 digits."""
    if re.fullmatch("[0-9]{1,18}", text) is None or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a whole number of at least {least} and at most 18 digits"
        )
    return int(text)


def positive(text: str) -> int:
    """At least 1."""
    return whole(text, 1)


def count(text: str) -> int:
    """At least 0."""
    return whole(text, 0)


def names(text: str) -> tuple[str, ...]:
    """A,B,... without repetitions."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names none: give them as A,B")
    return found
