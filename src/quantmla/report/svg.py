"""The parts of a drawing: scales, ticks, axes, marks. Sizes are in CSS pixels at full width.

Drawings are WIDTH wide at most, so that text keeps its size on a phone; colours are CSS classes
(`c-quantmla`, `c-content`, ...), so that one drawing serves the light and the dark theme.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quantmla.report.markup import Markup, el, short

WIDTH = 384
CHAR = 6.6  # mean width of a character of the labels
MARKS = ("circle", "square", "triangle", "diamond")


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels, linearly or by logarithm."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, v = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, v = math.log(low), math.log(high), math.log(v)
        return self.begin + (v - low) / (high - low) * (self.end - self.begin)

    def ticks(self, most: int = 5) -> list[float]:
        return log_ticks(self.low, self.high, most) if self.log else even(self.low, self.high, most)


def even(low: float, high: float, most: int = 5) -> list[float]:
    """Round values within the range, 1, 2 or 5 times a power of ten apart, `most` at most."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Powers of ten; with 2 and 5 times them where there are few; even steps within a decade."""
    if high / low < 8:
        return even(low, high, most)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps: tuple[int, ...] = (1, 2, 5) if last - first <= 2 else (1,)
    found = [m * 10.0**p for p in range(first, last + 1) for m in steps]
    inside = [v for v in found if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
    return inside[:: max(1, math.ceil(len(inside) / (most + 1)))]


def span(values: Sequence[float], *, log: bool = False, zero: bool = False) -> tuple[float, float]:
    """A range around the values; a single one gets room on both sides."""
    if log:
        positive = [v for v in values if v > 0] or [1.0]
        low, high = min(positive), max(positive)
        return low / 1.25, high * 1.25
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (low if zero and low == 0 else low - room), (high if zero and high == 0 else high + room)


def tick_text(value: float) -> str:
    """As short as can be: 0.001, 1e-05, 20k."""
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:g}"


def text(x: float, y: float, words: str, cls: str = "", anchor: str = "start") -> Markup:
    found = None if anchor == "start" else anchor
    return el("text", words, x=float(x), y=float(y), class_=cls or None, text_anchor=found)


def line(x1: float, y1: float, x2: float, y2: float, cls: str) -> Markup:
    return el("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=cls)


def rect(box: tuple[float, float, float, float], cls: str, tip: str | None = None) -> Markup:
    """`box` is x, y, width, height."""
    x, y, width, height = (float(v) for v in box)
    inner = [] if tip is None else [el("title", tip)]
    return el("rect", *inner, x=x, y=y, width=max(width, 0.0), height=height, class_=cls)


def mark(x: float, y: float, kind: str, tip: str) -> Markup:
    """A point whose shape tells as much as its colour, which is that of `marks` around it."""
    if kind == "circle":
        return el("circle", el("title", tip), cx=float(x), cy=float(y), r=4.0)
    dx, dy, outline = {
        "square": (-3.6, -3.6, "h7.2v7.2h-7.2z"),
        "triangle": (0.0, -4.8, "l4.6 8.4h-9.2z"),
        "diamond": (0.0, -5.0, "l5 5l-5 5l-5-5z"),
    }[kind]
    return el("path", el("title", tip), d=f"M{short(x + dx)} {short(y + dy)}{outline}")


def marks(colour: str, parts: Iterable[Markup]) -> Markup:
    return el("g", *parts, class_=f"mark c-{colour}")


def polyline(points: Sequence[tuple[float, float]], cls: str, tip: str) -> Markup:
    return el(
        "polyline",
        el("title", tip),
        points=" ".join(f"{short(x)},{short(y)}" for x, y in points),
        class_=cls,
    )


def svg(height: float, label: str, *children: object) -> Markup:
    """The drawing; `label` says to a screen reader what it shows."""
    size = f"0 0 {WIDTH} {math.ceil(height)}"
    style = f"max-width:{WIDTH * 1.3:.0f}px"
    return el("svg", *children, viewBox=size, role="img", aria_label=label, style=style)


def x_axis(scale: Scale, y: float, label: str, top: float | None = None) -> Markup:
    """Ticks below y with grid lines up to `top`, and what is measured, in which unit."""
    parts: list[Markup] = []
    for value in scale.ticks():
        x = scale(value)
        if top is not None:
            parts.append(line(x, top, x, y, "grid"))
        parts.append(text(x, y + 15, tick_text(value), "tick", "middle"))
    parts.append(line(scale.begin, y, scale.end, y, "axis"))
    parts.append(text((scale.begin + scale.end) / 2, y + 31, label, "label", "middle"))
    return el("g", *parts)


def y_axis(scale: Scale, x: float, label: str, right: float) -> Markup:
    """Ticks to the left of x with grid lines to `right`; the label stands above."""
    parts: list[Markup] = []
    for value in scale.ticks():
        y = scale(value)
        parts += [line(x, y, right, y, "grid"), text(x - 6, y + 4, tick_text(value), "tick", "end")]
    parts.append(text(0, min(scale.begin, scale.end) - 10, label, "label"))
    return el("g", *parts)


def apart(places: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Label positions, moved as little as needed to lie `least` apart between low and high."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    found = list(places)
    for before, after in pairwise(order):
        found[after] = max(found[after], found[before] + least)
    over = max((found[i] for i in order), default=high) - high
    if over > 0 and order:
        found[order[-1]] = max(low, high)
        for after, before in pairwise(reversed(order)):
            found[before] = min(found[before], found[after] - least)
    return found
