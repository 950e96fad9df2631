"""Replaces generated parts of Markdown files, which stand between two marker lines."""

from collections.abc import Mapping
from pathlib import Path


def replace_part(path: Path, name: str, body: str) -> str:
    """The file's text with `body` between its markers; ValueError where they are not there once."""
    return replace_parts(path, {name: body})


def replace_parts(path: Path, bodies: Mapping[str, str]) -> str:
    """The same for several parts, by name."""
    text = path.read_text(encoding="utf-8")
    for name, body in bodies.items():
        text = _replaced(text, path, name, body)
    return text


def _replaced(text: str, path: Path, name: str, body: str) -> str:
    start, end = f"<!-- {name}: generated -->\n", f"<!-- end of {name} -->\n"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"{path} needs one line {start.strip()!r} and one {end.strip()!r}")
    before, rest = text.split(start)
    return before + start + body.rstrip("\n") + "\n" + end + rest.split(end)[1]
