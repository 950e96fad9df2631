"""`vllm serve --config FILE`: the settings of a YAML file as the flags that vLLM makes of them."""

import json
from collections.abc import Mapping, Sequence
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
    settings = _read(arguments[at + 1])
    made = [word for name, value in settings.items() for word in _flag(str(name), value)]
    return [*made, *arguments[:at], *arguments[at + 2 :]]


def _read(file: str) -> Mapping[Any, Any]:
    said = f"{FLAG} {file}"
    require(file.endswith((".yaml", ".yml")), f"{said}: must be a .yaml or .yml file", UsageError)
    try:
        found = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{said} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{said} is not valid YAML: {one_line(error)}") from None
    require(isinstance(found, dict), f"{said} holds no settings by name", UsageError)
    return dict(found)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)] if value else []
    return [f"--{name}", json.dumps(value, default=str) if isinstance(value, dict) else str(value)]
