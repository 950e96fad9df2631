"""What is known of a learned layer, and the finished layers of a work folder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantmla.arch.adapter import AttentionSite
from quantmla.kept import read_kept, tensors_of, write_kept
from quantmla.method.layer import PathErrors
from quantmla.method.spread import Spread
from quantmla.transform.layer import LayerTransform
from quantmla.transform.store import transforms_from_file, transforms_to_bytes
from quantmla.workdir import is_workdir


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLog:
    """How one layer went. Errors are on held-out text, each path alone, nothing protected."""

    prefix: str
    before: PathErrors  # the checkpoint as it is, in the same format
    after: PathErrors
    seconds: float
    peak_bytes: int  # of device memory on a GPU, else of the process
    history: tuple[tuple[str, int, float], ...]  # path, step, held-out objective
    spread: Mapping[str, Spread] = field(default_factory=dict)  # before and after


@dataclass(frozen=True, slots=True)
class Learned:
    """All layers, in the model's order."""

    transforms: Mapping[str, LayerTransform]  # by attention prefix
    logs: tuple[LayerLog, ...]


def layer_line(log: LayerLog, number: int, total: int) -> str:
    """What is shown when a layer is finished."""

    def change(before: float, after: float) -> str:
        share = f" ({after / before - 1:+.0%})" if before > 0 else ""
        return f"{before:.2e} -> {after:.2e}{share}"

    return (
        f"layer {number}/{total} {log.prefix}: content output error "
        f"{change(log.before.content_output, log.after.content_output)}, rope score error "
        f"{change(log.before.rope_scores, log.after.rope_scores)}, {log.seconds:.1f} s, "
        f"peak {log.peak_bytes / 2**30:.2f} GiB"
    )


def save_layer(
    workdir: Path, site: AttentionSite, transform: LayerTransform, log: LayerLog
) -> None:
    path = workdir / f"layer_{site.cache_index:04d}.json"
    write_kept(path, asdict(log), transforms_to_bytes({site.prefix: transform}))


def finished_layers(workdir: Path) -> Learned:
    """Those in a work folder, in order; none where it is none. QuantMLAError for a damaged one."""
    found = {}
    for path in sorted(workdir.glob("layer_*.json")) if is_workdir(workdir) else []:
        log = log_from_json(read_kept(path))
        found[log.prefix] = (transforms_from_file(tensors_of(path))[log.prefix], log)
    return Learned(
        {prefix: transform for prefix, (transform, _) in found.items()},
        tuple(log for _, log in found.values()),
    )


def log_from_json(data: Mapping[str, Any]) -> LayerLog:
    """The inverse of asdict. ValueError, TypeError or KeyError for what is none."""
    errors = {when: PathErrors(*map(float, data[when])) for when in ("before", "after")}
    history = tuple(_step(*step) for step in data["history"])
    return LayerLog(**{**data, **errors, "history": history})


def _step(path: str, step: int, value: float) -> tuple[str, int, float]:
    return path, step, value
