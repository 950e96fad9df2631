"""From what a user calls a model to a folder on this machine."""

import json
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

from quantmla.checkpoint.config import check_config
from quantmla.errors import QuantMLAError, UsageError, require

PACKAGED = ("nano",)  # models that ship inside the package
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Other copies of the same weights, which nobody reads here.
OTHER_FORMATS = [
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.onnx",
    "*.h5",
    "*.msgpack",
    "consolidated*",
    "original/*",
]


def locate(model: str | Path, revision: str | None = None, *, config_only: bool = False) -> Path:
    """The folder of `model`: a packaged name, a local folder, or a hub id that is then downloaded.

    A packaged name wins over a folder of the same name in the working directory: write `./nano` for
    the latter. `config_only` downloads config.json alone. UsageError for a revision of what is not
    on a hub.
    """
    here = model in PACKAGED or os.path.isdir(model)  # no, without an error, for what is no path
    require(
        revision is None or not here,
        f"revision {revision!r} is of a hub id, and {str(model)!r} is on this machine: give none",
        UsageError,
    )
    if model in PACKAGED:
        path = Path(str(resources.files("quantmla"))) / "assets" / str(model)
        require(
            path.is_dir(), f"the packaged model {model!r} is missing from this installation: {path}"
        )
        return path
    if here:
        return Path(model)
    require(
        isinstance(model, str)
        and HUB_ID.fullmatch(model) is not None
        and not model.startswith("."),
        f"no model at {str(model)!r}: give a checkpoint folder, a hub id such as owner/name, "
        f"or one of {PACKAGED}",
    )
    return _download(str(model), revision, config_only)


def _download(hub_id: str, revision: str | None, config_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=["config.json"] if config_only else None,
            ignore_patterns=OTHER_FORMATS,
        )
    except Exception as error:  # the hub client raises many kinds, all of which end here
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise QuantMLAError(
            f"no folder {hub_id!r} here, and the hub did not give a model of that name: {reason}"
        ) from error
    return Path(found)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; a sentence when it is missing or is none."""
    require(path.is_file(), f"{path} does not exist")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise QuantMLAError(f"{path} is not valid JSON: {error}") from error
    require(isinstance(data, dict), f"{path} holds a {type(data).__name__}, not a JSON object")
    return data


def read_config(model: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """config.json of a model, without its weights; `model` may also be the JSON file itself."""
    if Path(model).suffix == ".json" and os.path.isfile(model):
        return model_config(Path(model))
    return model_config(locate(model, revision, config_only=True) / "config.json")


def model_config(path: Path) -> dict[str, Any]:
    """A config.json; a sentence when a key that we read holds what it cannot."""
    config = read_json(path)
    check_config(config, str(path))
    return config
