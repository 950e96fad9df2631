"""`vllm serve --config FILE`: the settings of a YAML file as the flags that vLLM makes of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from quantmla.errors import UsageError, one_line, require

FLAG = "--config"


def with_config_file(arguments: Sequence[str]) -> list[str]:
    """All flags that vLLM sees: those of the file first, so that flags given beside it win.

    UsageError for a file that vLLM could not read.
    """
    if FLAG not in arguments:
        return list(arguments)
    require(arguments.count(FLAG) == 1, f"{FLAG} is given more than once", UsageError)
    at = arguments.index(FLAG)
    require(at + 1 < len(arguments), f"{FLAG} needs a value: a .yaml file", UsageError)
    made = _flags_of(arguments[at + 1])
    return [*made, *arguments[:at], *arguments[at + 2 :]]


def _flags_of(file: str) -> list[str]:
    said = f"{FLAG} {file}"
    known = file.split(".")[-1] in ("yaml", "yml")
    require(known, f"{said}: must be a .yaml or .yml file", UsageError)
    try:
        require(Path(file).is_file() or not Path(file).exists(), f"{said} is no file", UsageError)
        found = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{said} cannot be read: {error.strerror}") from None
    except UsageError:
        raise
    except Exception as error:  # constructors of YAML's own types fail in many ways
        raise UsageError(f"{said} is not valid YAML: {one_line(error)}") from None
    by_name = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    require(by_name, f"{said} holds no settings by name", UsageError)
    require(FLAG[2:] not in found, f"{said} names a file itself, which vLLM ignores", UsageError)
    try:
        return [word for name, value in found.items() for word in _flag(name, value)]
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{said} holds what is no setting: {one_line(error)}") from None


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)] if value else []
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
