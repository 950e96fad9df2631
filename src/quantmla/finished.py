"""Whether an output folder is what a run would write: then the run was killed after it, or ended.

The folder appears whole or not at all, so one that says of itself that this run made it is whole,
whatever is left of the run's work folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmla.arch import Adapter
from quantmla.checkpoint.source import TensorSource
from quantmla.errors import QuantMLAError
from quantmla.fuse.checkpoint import CONFIG_KEY
from quantmla.layer_log import Learned, log_from_json
from quantmla.manifest import manifest
from quantmla.recipe import Recipe
from quantmla.run_record import FILE_NAME as RUN
from quantmla.transform.store import FILE_NAME as TRANSFORMS
from quantmla.transform.store import transforms_from_file

LOG = "quantmla_log.json"


def finished_output(
    source: TensorSource, adapter: Adapter, recipe: Recipe, run: Mapping[str, Any]
) -> Learned | None:
    """What the recipe's output folder was made of by the run of that fingerprint.

    None where there is none, or where it is another run's.
    """
    assert recipe.output.folder is not None
    folder = Path(recipe.output.folder)
    prefixes = [s.prefix for s in adapter.sites(source.config, source.names) if not s.mtp]
    try:
        made = _read(folder / "config.json")[CONFIG_KEY], _read(folder / RUN)["run"]
        logs = tuple(log_from_json(entry) for entry in _read(folder / LOG))
        stored = transforms_from_file(folder / TRANSFORMS)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, QuantMLAError):
        return None
    wanted = manifest(source, adapter, recipe, prefixes), dict(run)
    if made != tuple(json.loads(json.dumps(part)) for part in wanted):
        return None
    if [log.prefix for log in logs] != prefixes or set(stored) != set(prefixes):
        return None
    return Learned({prefix: stored[prefix] for prefix in prefixes}, logs)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
