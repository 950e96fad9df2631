"""Small charts as SVG text, for light and dark pages: bars, points and a heat map.

Colours follow the reader's theme through `prefers-color-scheme`. Sizes are in pixels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-weight: 600 }
.axis { stroke: #999; stroke-width: 1 } .grid { stroke: #ddd; stroke-width: 1 }
.a { fill: #2f6fb0; stroke: #2f6fb0 } .b { fill: #d1702b; stroke: #d1702b }
.c { fill: #3f8f5b; stroke: #3f8f5b } .heat { fill: #2f6fb0 }
.line { fill: none; stroke-width: 1.8 }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .axis { stroke: #888 } .grid { stroke: #444 }
.a { fill: #6aa9e9; stroke: #6aa9e9 } .b { fill: #f0a061; stroke: #f0a061 }
.c { fill: #79c694; stroke: #79c694 } .heat { fill: #6aa9e9 } }
</style>"""
CLASSES = ("a", "b", "c")
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 52, 44
Scale = Callable[[float], float]


def number(value: float) -> str:
    return f"{value:.4g}"


@dataclass(frozen=True)
class Axis:
    """One direction of a chart: what it shows, its range, and whether it counts in decades."""

    label: str
    low: float
    high: float
    log: bool = False

    def scale(self, start: float, stop: float) -> Scale:
        turn = math.log10 if self.log else float
        low, high = turn(self.low), turn(self.high)
        return lambda value: start + (turn(value) - low) / (high - low) * (stop - start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**k for k in range(first, last + 1)]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
        while (self.high - self.low) / step > 6:
            step *= 2.5 if f"{step:e}"[0] == "2" else 2
        return [k * step for k in range(math.ceil(self.low / step), int(self.high / step) + 1)]


def _text(x: float, y: float, words: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{escape(words)}</text>'


def frame(title: str, size: tuple[int, int], body: Sequence[str], names: Sequence[str]) -> str:
    """A whole SVG with its title and the legend of its classes."""
    width, height = size
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        STYLE,
        _text(LEFT, 18, title, 'class="title"'),
    ]
    at = float(LEFT)
    for name, kind in zip(names, CLASSES, strict=False):
        parts.append(f'<rect x="{at:.0f}" y="27" width="10" height="10" class="{kind}"/>')
        parts.append(_text(at + 15, 36, name))
        at += 30 + 6.6 * len(name)
    return "\n".join([*parts, *body, "</svg>"]) + "\n"


def _vertical_axis(axis: Axis, size: tuple[int, int]) -> tuple[Scale, list[str]]:
    width, height = size
    scale = axis.scale(height - BOTTOM, TOP)
    parts = []
    for tick in axis.ticks():
        y = scale(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{width - RIGHT}" class="grid"/>')
        parts.append(_text(LEFT - 6, y + 4, number(tick), 'text-anchor="end"'))
    middle = (TOP + height - BOTTOM) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 14 {middle:.0f})"'
    return scale, [*parts, _text(14, middle, axis.label, turned)]


def _horizontal_label(label: str, size: tuple[int, int]) -> str:
    middle = (LEFT + size[0] - RIGHT) / 2
    return _text(middle, size[1] - 8, label, 'text-anchor="middle"')


def bars(
    title: str,
    axis: Axis,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    across: str,
) -> str:
    """Bars side by side for each group, from the axis' low end."""
    size = (640, 260)
    scale, parts = _vertical_axis(axis, size)
    room = (size[0] - LEFT - RIGHT) / len(groups)
    each = 0.8 * room / len(series)
    for g, group in enumerate(groups):
        start = LEFT + room * g + 0.1 * room
        for s, values in enumerate(series.values()):
            top, base = scale(min(max(values[g], axis.low), axis.high)), size[1] - BOTTOM
            parts.append(
                f'<rect x="{start + s * each:.1f}" y="{top:.1f}" width="{each - 1:.1f}" '
                f'height="{base - top:.1f}" class="{CLASSES[s]}"/>'
            )
        parts.append(
            _text(start + 0.4 * room, size[1] - BOTTOM + 16, group, 'text-anchor="middle"')
        )
    return frame(title, size, [*parts, _horizontal_label(across, size)], list(series))


def points(
    title: str,
    axes: tuple[Axis, Axis],
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    joined: bool,
) -> str:
    """Points, or lines through them; unjoined ones stand against the diagonal."""
    size = (640, 300)
    across, up = axes
    y_scale, parts = _vertical_axis(up, size)
    x_scale = across.scale(LEFT, size[0] - RIGHT)
    for tick in across.ticks():
        place = 'text-anchor="middle"'
        parts.append(_text(x_scale(tick), size[1] - BOTTOM + 16, number(tick), place))
    if not joined:
        low, high = max(across.low, up.low), min(across.high, up.high)
        parts.append(
            f'<path d="M{x_scale(low):.1f} {y_scale(low):.1f}L{x_scale(high):.1f} '
            f'{y_scale(high):.1f}" class="axis"/>'
        )
    for kind, values in zip(CLASSES, series.values(), strict=False):
        places = [(x_scale(x), y_scale(y)) for x, y in values]
        if joined:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(f'<path d="M{path}" class="{kind} line" style="fill:none"/>')
        else:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="{kind}"/>' for x, y in places
            ]
    return frame(title, size, [*parts, _horizontal_label(across.label, size)], list(series))


def heat_map(title: str, rows: Sequence[Sequence[float]], labels: tuple[str, str]) -> str:
    """Shares from 0 to 1 as squares; the first row is on top."""
    size = (640, TOP + BOTTOM + 20 * len(rows))
    wide = (size[0] - LEFT - RIGHT) / len(rows[0])
    parts = []
    for r, row in enumerate(rows):
        y = TOP + 20 * r
        parts.append(_text(LEFT - 6, y + 14, str(r), 'text-anchor="end"'))
        shape = f"h{wide:.1f}v19h-{wide:.1f}z"
        places: dict[str, list[str]] = {}  # of squares of one strength, which are one path
        for c, value in enumerate(row):
            places.setdefault(f"{value:.2f}", []).append(f"M{LEFT + wide * c:.1f} {y}{shape}")
        squares = "".join(
            f'<path d="{"".join(path)}" opacity="{strength}"/>' for strength, path in places.items()
        )
        parts.append(f'<g class="heat">{squares}</g>')
    for c in range(0, len(rows[0]), 4):
        x = LEFT + wide * (c + 0.5)
        parts.append(_text(x, size[1] - BOTTOM + 16, str(c), 'text-anchor="middle"'))
    middle = TOP + 10 * len(rows)
    turned = f'text-anchor="middle" transform="rotate(-90 14 {middle})"'
    parts += [_text(14, middle, labels[0], turned), _horizontal_label(labels[1], size)]
    return frame(title, size, parts, [])
