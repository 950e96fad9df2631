"""What a cache holds: bits of both paths, grouping, centring, and which tokens stay in bf16."""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from quantmla.errors import UsageError, require

BITS = (2, 3, 4, 8, 16)
RopeCentring = Literal["page", "none"]
RangeRule = Literal["hold_zero", "paper"]
VERSION = 1
MOST_TOKENS = 2**31 - 1  # lengths are int32

# Share of a group's min-max range that the codes span. Few codes gain from clipping; learned groups
# want less of it than normal ones, and from 4 bits on hardly any (docs/maths.md).
CLIP_BY_BITS = {2: 0.85, 3: 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """Everything a reader needs to interpret a page; stored in the checkpoint's config.json.

    16 bits means bf16 as it is. Content groups are contiguous channels of the stored latent; rope
    bands are contiguous interleaved channels, that is, frequency bands.
    """

    content_bits: int = 4
    rope_bits: int = 4
    group_size: int = 64  # content channels that share a scale
    rope_bands: int = 2  # groups of the rope key
    rope_centring: RopeCentring = "page"
    range_rule: RangeRule = "hold_zero"
    content_clip: float = 1.0  # share of a group's range that the codes span, set when writing
    rope_clip: float = 1.0
    page_size: int = 64  # tokens
    num_sink_tokens: int = 4  # first tokens kept in bf16
    recent_window: int | None = 128  # at least so many last tokens in bf16; None: see unprotected()
    version: int = VERSION

    def __post_init__(self) -> None:
        for name in ("content_bits", "rope_bits"):
            self._one_of(name, BITS)
        self._one_of("rope_centring", get_args(RopeCentring))
        self._one_of("range_rule", get_args(RangeRule))
        for name in ("group_size", "rope_bands", "page_size"):
            self._whole(name, least=1)
        self._whole("num_sink_tokens", least=0)
        if self.recent_window is not None:
            self._whole("recent_window", least=0)
        for name in ("content_clip", "rope_clip"):
            value = getattr(self, name)
            fits = isinstance(value, int | float) and 0 < value <= 1
            require(fits, f"{name} {value!r} is not in (0, 1]", UsageError)
        require(
            self.recent_window is not None or self.num_sink_tokens == 0,
            "an unprotected cache has no sinks: num_sink_tokens must be 0",
            UsageError,
        )
        require(
            self.version == VERSION,
            f"cache format version {self.version} is not {VERSION}, the one this release reads",
            UsageError,
        )

    def _one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        require(value in allowed, f"{name} {value!r} is not one of {allowed}", UsageError)

    def _whole(self, name: str, *, least: int) -> None:
        value = getattr(self, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        require(
            whole and least <= value <= MOST_TOKENS,
            f"{name} {value!r} must be a whole number of at least {least} and at most "
            f"{MOST_TOKENS}",
            UsageError,
        )

    @property
    def name(self) -> str:
        """Short name of the bits, such as `c4r4`."""
        return f"c{self.content_bits}r{self.rope_bits}"

    def for_layer(self, cache_index: int) -> "CacheFormat":
        """This format: one for all layers (quant/mixed.py has one for each)."""
        del cache_index
        return self

    def unprotected(self) -> "CacheFormat":
        """Every token, the unfinished page too, is read in its quantised form (evaluation only)."""
        return replace(self, num_sink_tokens=0, recent_window=None)

    def first_recent(self, length: int) -> int:
        """First token that is still in the bf16 window when `length` tokens are cached.

        Pages are packed whole: the window holds everything after the last page of which every
        token is older than the last `recent_window`.
        """
        if self.recent_window is None:
            return length
        return max(0, length - self.recent_window) // self.page_size * self.page_size

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "CacheFormat":
        """What to_json wrote: every key, since a default may not be what the pages have."""
        known = set(CacheFormat.__dataclass_fields__)
        unknown = sorted(set(data) - known)
        require(
            not unknown,
            f"unknown keys in the cache format: {unknown}; known: {sorted(known)}",
            UsageError,
        )
        missing = ", ".join(name for name in CacheFormat.__dataclass_fields__ if name not in data)
        require(not missing, f"the cache format lacks {missing}", UsageError)
        try:
            return CacheFormat(**data)
        except TypeError as error:
            raise UsageError(f"cache format {data}: {error}") from None


def parse_format(name: str, **changes: Any) -> CacheFormat:
    """`c4r4`, `C4R4` or `quantmla_c4r4` to a format; rope keys of 4 bits or less are centred."""
    match = re.fullmatch(r"(?:quantmla[_-])?c([0-9]+)r([0-9]+)", name.strip().lower())
    allowed = f"c<bits>r<bits> with bits of {BITS}, for example c4r4"
    require(match is not None, f"unknown cache format {name!r}: use {allowed}", UsageError)
    assert match is not None
    content, rope = int(match[1]), int(match[2])
    require(
        content in BITS and rope in BITS,
        f"unknown cache format {name!r}: use {allowed}",
        UsageError,
    )
    centred = rope <= 4
    defaults: dict[str, Any] = {
        "content_bits": content,
        "rope_bits": rope,
        "rope_centring": "page" if centred else "none",
        "rope_bands": 2 if centred else 1,
        "content_clip": CLIP_BY_BITS.get(content, 1.0),
        "rope_clip": CLIP_BY_BITS.get(rope, 1.0),
    }
    return CacheFormat(**(defaults | changes))


def paper_format(name: str, **changes: Any) -> CacheFormat:
    """The published quantiser: one rope group, no centring or clipping, ranges need not hold 0."""
    paper: dict[str, Any] = {
        "rope_centring": "none",
        "rope_bands": 1,
        "range_rule": "paper",
        "content_clip": 1.0,
        "rope_clip": 1.0,
    }
    return parse_format(name, **(paper | changes))
