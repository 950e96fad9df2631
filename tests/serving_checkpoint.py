"""A config.json of a quantised checkpoint, which is all that `quantmla serve` looks at."""

import json
from pathlib import Path
from typing import Any

from quantmla.quant.format import parse_format

MANIFEST: dict[str, Any] = {
    "version": 1,
    "base_model": "nano",
    "base_sha256": "0",
    "method": "quantmla",
    "format": parse_format("c4r4").to_json(),
    "ignored_layers": [],
}


def checkpoint(folder: Path, manifest: dict[str, Any] | None = MANIFEST) -> str:
    """The folder with such a file in it; None for a checkpoint that is not quantised."""
    config: dict[str, Any] = {"model_type": "deepseek_v3"}
    if manifest is not None:
        config["quantmla_config"] = manifest
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
