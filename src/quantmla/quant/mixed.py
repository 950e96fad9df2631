"""The format of a whole model's cache: one for all layers, or one for each.

Layers are named by cache index, the number that transformers hands to its cache. Whatever reads one
layer asks `for_layer`; whatever can only serve one format for all asks `uniform_format`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantmla.errors import UsageError, require
from quantmla.quant.format import CacheFormat

SHARED = ("page_size", "num_sink_tokens", "recent_window", "range_rule", "version")
LAYERS_KEY = "layers"  # of a mixed format's JSON; readers that know one format only refuse it


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedFormat:
    """Layers of different widths; pages, protection and range rule are those of all."""

    default: CacheFormat  # of every layer that is not named
    layers: Mapping[int, CacheFormat]  # by cache index

    def __post_init__(self) -> None:
        for index, fmt in self.layers.items():
            for name in SHARED:
                mine, common = getattr(fmt, name), getattr(self.default, name)
                require(
                    mine == common,
                    f"{name} {mine!r} of layer {index} is not {common!r}: it must be the same in "
                    "every layer",
                    UsageError,
                )

    def for_layer(self, cache_index: int) -> CacheFormat:
        """The format of one layer's cache."""
        return self.layers.get(cache_index, self.default)

    @property
    def name(self) -> str:
        return "mixed"

    @property
    def page_size(self) -> int:
        return self.default.page_size

    @property
    def num_sink_tokens(self) -> int:
        return self.default.num_sink_tokens

    @property
    def recent_window(self) -> int | None:
        return self.default.recent_window

    def first_recent(self, length: int) -> int:
        """As CacheFormat's: every layer has the same window."""
        return self.default.first_recent(length)

    def to_json(self) -> dict[str, Any]:
        """The default's keys, and under `layers` what differs from them, by layer."""
        common = self.default.to_json()
        changed = {
            str(index): {k: v for k, v in fmt.to_json().items() if v != common[k]}
            for index, fmt in sorted(self.layers.items())
        }
        return {**common, LAYERS_KEY: changed}


ModelFormat = CacheFormat | MixedFormat


def model_format(default: CacheFormat, layers: Mapping[int, CacheFormat]) -> ModelFormat:
    """A plain CacheFormat unless some layer differs from the default."""
    different = {index: fmt for index, fmt in sorted(layers.items()) if fmt != default}
    return MixedFormat(default=default, layers=different) if different else default


def uniform_format(fmt: ModelFormat) -> CacheFormat | None:
    """The one format of every layer, or None where layers differ."""
    return fmt if isinstance(fmt, CacheFormat) else None


def require_format(fmt: Any) -> None:
    """Refuses what a caller may take for a format, such as its name."""
    require(
        isinstance(fmt, ModelFormat),
        f"the cache format is {fmt!r:.80}, not a CacheFormat: make one with parse_format('c4r4')",
        UsageError,
    )


def distinct_formats(fmt: ModelFormat) -> tuple[CacheFormat, ...]:
    """Every format that some layer may have, the default first."""
    require_format(fmt)
    if isinstance(fmt, CacheFormat):
        return (fmt,)
    return tuple(dict.fromkeys((fmt.default, *fmt.layers.values())))


def each_layer(fmt: ModelFormat, change: Callable[[CacheFormat], CacheFormat]) -> ModelFormat:
    """The same change to every layer's format."""
    require_format(fmt)
    if isinstance(fmt, CacheFormat):
        return change(fmt)
    return model_format(change(fmt.default), {i: change(f) for i, f in fmt.layers.items()})


def require_layers(fmt: ModelFormat, indices: Iterable[int]) -> None:
    """Refuses a format that names a layer which is not among the cache's `indices`."""
    if isinstance(fmt, CacheFormat):
        return
    known = sorted(indices)
    unknown = sorted(set(fmt.layers) - set(known))
    require(
        not unknown,
        f"the cache format names layers {unknown}; the model's latent layers are {known}",
        UsageError,
    )


def describe(fmt: ModelFormat) -> str:
    """`c4r4`, or `mixed (c2r4 in layers 1, 3; c4r4 in all others)`."""
    if isinstance(fmt, CacheFormat):
        return fmt.name
    named: dict[str, list[str]] = {}
    for index, own in sorted(fmt.layers.items()):
        named.setdefault(own.name, []).append(str(index))
    parts = [
        f"{name} in layer{'s' if len(indices) > 1 else ''} {', '.join(indices)}"
        for name, indices in named.items()
    ]
    return f"mixed ({'; '.join(parts)}; {fmt.default.name} in all others)"


def format_from_json(data: Any) -> ModelFormat:
    """The format that a checkpoint's config records. UsageError for what cannot be one."""
    require(isinstance(data, Mapping), f"the cache format is {data!r}, not a mapping", UsageError)
    common = {key: value for key, value in data.items() if key != LAYERS_KEY}
    default = CacheFormat.from_json(common)
    layers = data.get(LAYERS_KEY, {})
    shaped = isinstance(layers, Mapping) and all(
        str(index).isdecimal() and isinstance(changes, Mapping) for index, changes in layers.items()
    )
    require(
        shaped, f"the cache format's {LAYERS_KEY} are {layers!r}, not formats by layer", UsageError
    )
    return model_format(
        default,
        {int(i): CacheFormat.from_json({**common, **changes}) for i, changes in layers.items()},
    )
