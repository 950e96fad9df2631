"""What the command line's flags have in common: their types, their words, how they fail."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from quantmla.errors import QuantMLAError, UsageError

MODEL_HELP = "a checkpoint folder, a hub id, or 'nano', the packaged model"
RESULTS = ("rows", "results", "requests")  # a result file has a list under one of these
LARGEST_RESULT = 2**28  # bytes; what is larger, such as a shard of weights, is not read
DEVICE_HELP = "cpu, cuda, cuda:1, ... (default: a GPU where there is one)"


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong flag is one line like every other error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Knows every argument: a subcommand says itself what it does not take."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def run_script(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], object]
) -> None:
    """Parses and runs; a user's fault is one sentence and exit code 2, as a wrong flag is."""
    options = parser.parse_args()
    try:
        run(options)
    except QuantMLAError as error:
        parser.error(str(error))


def _whole(text: str, least: int) -> int:
    if re.fullmatch("[0-9]{1,18}", text) is None or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a whole number of at least {least} and at most 18 digits"
        )
    return int(text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def count(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def path(text: str) -> Path:
    """Of a file or folder; an empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' names no file or folder")
    return Path(text)


def amount(text: str, what: str = "a number") -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what} above 0")
    return value


def seconds(text: str) -> float:
    """A time above 0 that ends."""
    return amount(text, "a number of seconds")


def new_or_old_file(text: str) -> Path:
    """A file that can be written when the work is done: a new one, or an earlier result."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a file in a folder that exists")
    if not is_free(file, lambda data: any(isinstance(data.get(key), list) for key in RESULTS)):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is no earlier result: name another file")
    return file


def is_free(file: Path, ours: Callable[[Any], bool]) -> bool:
    """Whether a result may go there unasked: it replaces nothing, or JSON that `ours` knows."""
    if not file.exists():
        return True
    return (file.is_file() and file.stat().st_size == 0) or holds(file, ours)


def holds(file: Path, ours: Callable[[Any], bool]) -> bool:
    """Whether a file is JSON that `ours` knows; what fails there is not known."""
    try:
        if not file.is_file() or file.stat().st_size > LARGEST_RESULT:
            return False
        return bool(ours(json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def names(text: str) -> tuple[str, ...]:
    """`A,B` without repetitions."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names none: give them as A,B")
    return found
