"""Replaces generated parts of Markdown files, which stand between two marker lines."""

from pathlib import Path


def replace_part(path: Path, name: str, body: str) -> str:
    """The file's text with `body` between its markers; ValueError where they are not there once."""
    return replace_in(path.read_text(encoding="utf-8"), name, body, str(path))


def replace_in(text: str, name: str, body: str, path: str = "the text") -> str:
    """The same for a text."""
    start, end = f"<!-- {name}: generated -->\n", f"<!-- end of {name} -->\n"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"{path} needs one line {start.strip()!r} and one {end.strip()!r}")
    before, rest = text.split(start)
    return before + start + body.rstrip("\n") + "\n" + end + rest.split(end)[1]
