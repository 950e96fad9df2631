"""What `quantize` writes beside the weights: the config key and the per-layer log."""

import csv
import io
from collections.abc import Container, Mapping, Sequence
from typing import Any

from quantmla import __version__
from quantmla.arch import Adapter
from quantmla.checkpoint.source import TensorSource, open_source
from quantmla.errors import QuantMLAError, UsageError, require
from quantmla.fuse.checkpoint import CONFIG_KEY
from quantmla.layer_log import LayerLog
from quantmla.mla.geometry import MlaGeometry
from quantmla.quant.format import CacheFormat
from quantmla.quant.layout import layout_for
from quantmla.quant.mixed import format_from_json, uniform_format
from quantmla.recipe import Recipe

VERSION = 1  # of what stands under that key


def manifest(
    source: TensorSource, adapter: Adapter, recipe: Recipe, fused: Container[str]
) -> dict[str, Any]:
    """The one key that config.json gains: what a reader of the packed cache needs.

    `fused` holds the prefixes of the attentions that have a transform; the others' caches stay
    bf16 and are named by cache index. Where layers differ in format, `format` has a key `layers`
    and the bytes are under `layouts`, by cache index.
    """
    fmt = recipe.format.cache_format()
    geometry = adapter.geometry(source.config)
    sites = adapter.sites(source.config, source.names)
    one = uniform_format(fmt)
    layouts = {
        str(s.cache_index): _layout(geometry, fmt.for_layer(s.cache_index))
        for s in sites
        if s.prefix in fused
    }
    return {
        "quant_method": "quantmla",
        "version": VERSION,
        "producer": {"name": "quantmla", "version": __version__},
        "format": fmt.to_json(),
        **({"layouts": layouts} if one is None else {"layout": _layout(geometry, one)}),
        "method": recipe.transform.method,
        "base_model": recipe.model.id,
        "base_sha256": source.digest(),
        "ignored_layers": [s.cache_index for s in sites if s.prefix not in fused and not s.mtp],
        "copied_layers": [s.prefix for s in sites if s.prefix not in fused],
    }


def _layout(geometry: MlaGeometry, fmt: CacheFormat) -> dict[str, Any]:
    """First and last byte of every plane of a page, and the page's size."""
    layout = layout_for(geometry, fmt)
    planes = ("content", "rope", "scales", "zero_points", "mean")
    ends = {name: [getattr(layout, name).start, getattr(layout, name).stop] for name in planes}
    return {**ends, "page_bytes": layout.page_bytes}


def read_manifest(config: Mapping[str, Any], folder: str) -> Mapping[str, Any]:
    """The manifest in the config.json of `folder`, which quantize wrote."""
    found = config.get(CONFIG_KEY)
    require(found is not None, f"{folder} was not written by quantmla: no {CONFIG_KEY}", UsageError)
    kinds = {"base_model": str, "base_sha256": str, "format": dict, "method": str}
    whole = isinstance(found, Mapping) and all(
        isinstance(found.get(key), kind) for key, kind in kinds.items()
    )
    require(whole, f"{CONFIG_KEY} in {folder} lacks one of {', '.join(kinds)}, or it is damaged")
    assert found is not None
    require(
        found.get("version") == VERSION,
        f"{CONFIG_KEY} in {folder} has version {found.get('version')!r}, not {VERSION}, the one "
        "this release reads",
    )
    try:
        format_from_json(found["format"])
    except UsageError as error:  # of a flag, but not here
        said = f"{CONFIG_KEY} in {folder} has a format that cannot be read: {error}"
        raise QuantMLAError(said) from None
    return dict(found)


def open_original(
    config: Mapping[str, Any], folder: str, given: str | None, flag: str
) -> TensorSource:
    """The checkpoint that `folder`, with this manifest, was made from; `given` with `flag` or not.

    Raises QuantMLAError where it is not found or is another one.
    """
    base = config["base_model"] if given is None else given
    try:
        source = open_source(base)
    except QuantMLAError as error:
        if given is not None:
            raise
        where = f"{base!r} is the base_model in config.json of {folder}, as it was called there"
        raise QuantMLAError(f"{error}; {where}: say with {flag} where it is now") from error
    require(
        source.digest() == config["base_sha256"],
        f"{base} is not the checkpoint that {folder} was made from: their hashes differ",
    )
    return source


def log_table(logs: Sequence[LayerLog]) -> str:
    """The per-layer log as CSV; errors are those of LayerLog."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    errors = ("content_output", "rope_output", "rope_scores")
    names = [f"{error}_{when}" for when in ("before", "after") for error in errors]
    table.writerow(["layer", *names, "seconds", "peak_bytes"])
    for log in logs:
        table.writerow([log.prefix, *log.before, *log.after, round(log.seconds, 2), log.peak_bytes])
    return text.getvalue()
