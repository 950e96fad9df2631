"""analysis.json as text."""

import json
from collections.abc import Mapping
from typing import Any

DIGITS = 5  # significant ones of every number


def rounded(value: Any) -> Any:
    """Every float to DIGITS significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return value


def as_text(found: Mapping[str, Any]) -> str:
    """JSON with one line for each key, and one for each layer."""

    def compact(value: Any) -> str:
        return json.dumps(rounded(value), allow_nan=False, separators=(", ", ": "))

    lines = []
    for key, value in found.items():
        body = compact(value)
        if key == "layers":
            body = "[\n" + ",\n".join(map(compact, value)) + "\n]"
        lines.append(f"{json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
