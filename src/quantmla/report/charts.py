"""The kinds of drawings that sections use, each a pure function of its values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from quantmla.report.markup import Markup, el, join, short
from quantmla.report.svg import (
    CHAR,
    MARKS,
    WIDTH,
    Scale,
    apart,
    line,
    mark,
    marks,
    polyline,
    rect,
    span,
    svg,
    text,
    x_axis,
    y_axis,
)

ROW, DENSE_ROW = 24, 15  # heights of a row with its gap: of few rows, of many
MANY = 20
LABEL_ROOM = 156.0  # left of the axis
APART = 8.0  # between intervals on one row
DARK_FROM = 0.64  # a cell at least so strong carries light text


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What is measured, in which unit; `low`/`high` of None are taken from the values."""

    label: str
    log: bool = False
    zero: bool = False
    low: float | None = None
    high: float | None = None

    def scale(self, values: Sequence[float], begin: float, end: float) -> Scale:
        low, high = span(values, log=self.log, zero=self.zero)
        low = low if self.low is None else self.low
        high = high if self.high is None else self.high
        return Scale(low, high if high > low else low + 1.0, begin, end, self.log)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One value on a row, with an interval where there is one."""

    label: str
    value: float
    text: str
    colour: str
    interval: tuple[float, float] | None = None
    shape: str = "circle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: points from left to right."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    tips: Sequence[str] = field(default=())


def _left(labels: Sequence[str]) -> float:
    """Room for row names: at most LABEL_ROOM."""
    return min(LABEL_ROOM, 10 + CHAR * max(map(len, labels), default=0))


def _name(x: float, y: float, words: str) -> Markup:
    """A row's name, cut to its room; the tip has it whole."""
    most = int((LABEL_ROOM - 10) / CHAR)
    whole = len(words) <= most
    shown = words if whole else words[: most - 1] + "…"
    tip = None if whole else el("title", words)
    return el("text", tip, shown, x=x, y=y, class_="name")


def dots(rows: Sequence[Dot], axis: Axis, label: str, reference: float | None = None) -> Markup:
    """Values on one axis; neighbours of one label share a row; `reference` is a line."""
    groups = [list(members) for _, members in groupby(rows, key=lambda row: row.label)]
    left = _left([row.label for row in rows])
    shown = [" · ".join(row.text for row in members) for members in groups]
    right = WIDTH - 20 - CHAR * max(map(len, shown))
    ends = [v for row in rows for v in (row.value, *(row.interval or ()))]
    scale = axis.scale(ends if reference is None else [*ends, reference], left + 8, right)
    height = ROW if len(groups) <= MANY else DENSE_ROW
    bottom = 8.0 + height * len(groups)
    parts: list[Markup] = [x_axis(scale, bottom, axis.label, 4)]
    if reference is not None:
        parts.append(line(scale(reference), 4, scale(reference), bottom, "reference"))
    for index, members in enumerate(groups):
        y = 8 + height * (index + 0.5)
        parts.append(_name(left, y + 4, members[0].label))
        apart_by = APART if any(row.interval for row in members) else 0.0
        middle = (len(members) - 1) / 2
        parts += [_dot(row, scale, y + apart_by * (i - middle)) for i, row in enumerate(members)]
        parts.append(text(right + 10, y + 4, shown[index], "value"))
    return svg(bottom + 38, label, *parts)


def _dot(row: Dot, scale: Scale, y: float) -> Markup:
    parts = []
    if row.interval is not None:
        low, high = (scale(v) for v in row.interval)
        parts.append(line(low, y, high, y, f"whisker c-{row.colour}"))
    point = mark(scale(row.value), y, row.shape, f"{row.label}: {row.text}")
    return join([*parts, marks(row.colour, [point])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A bar of parts, each with its name, size and colour."""

    label: str
    parts: Sequence[tuple[str, float, str]]
    text: str


def stacks(rows: Sequence[Stack], axis: Axis, label: str) -> Markup:
    """Bars of parts from zero; gaps of two pixels between the parts."""
    left, right = _left([row.label for row in rows]), WIDTH - 62.0
    totals = [sum(size for _, size, _ in row.parts) for row in rows]
    scale = axis.scale([0.0, *totals], left + 8, right)
    bottom = 8.0 + 30 * len(rows)
    drawn: list[Markup] = [x_axis(scale, bottom, axis.label, 4)]
    for index, row in enumerate(rows):
        y, done = 8 + 30.0 * index + 5, 0.0
        drawn.append(_name(left, y + 14, row.label))
        for name, size, colour in row.parts:
            begin, end = scale(done), scale(done + size)
            box = (begin, y, end - begin - (2 if end - begin > 4 else 0), 20)
            drawn.append(rect(box, f"fill c-{colour}", f"{row.label}, {name}: {size:g}"))
            done += size
        drawn.append(text(scale(done) + 6, y + 14, row.text, "value"))
    return svg(bottom + 38, label, *drawn)


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Names beside swatches, as HTML that wraps."""
    keys = [el("span", el("i", class_=f"fill c-{colour}"), name) for name, colour in entries]
    return el("p", *keys, class_="legend")


def lines(series: Sequence[Series], x: Axis, y: Axis, label: str) -> Markup:
    """Lines with marks, named at their right ends."""
    longest = max(len(s.name) for s in series)
    left, right, top, bottom = 46.0, WIDTH - 14 - CHAR * longest, 28.0, 222.0
    xs = x.scale([p[0] for s in series for p in s.points], left + 6, right - 6)
    ys = y.scale([p[1] for s in series for p in s.points], bottom, top)
    parts = [y_axis(ys, left, y.label, right), x_axis(xs, bottom, x.label)]
    places = apart([ys(s.points[-1][1]) for s in series], 14, top, bottom)
    for index, one in enumerate(series):
        points = [(xs(a), ys(b)) for a, b in one.points]
        parts.append(polyline(points, f"line c-{one.colour}", one.name))
        shape = MARKS[index % len(MARKS)]
        tipped = zip(points, one.tips, strict=bool(one.tips))
        parts.append(
            marks(
                one.colour, (mark(px, py, shape, f"{one.name}: {tip}") for (px, py), tip in tipped)
            )
        )
        parts.append(text(right + 6, places[index] + 4, one.name, f"value ink c-{one.colour}"))
    return svg(bottom + 38, label, *parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of a heat map; a value of None is left empty."""

    value: float | None
    text: str
    tip: str


def _strength(values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    if high <= low:
        low, high = low / 2, high * 2
    return Scale(low, high, 0.06, 1.0, log=True)


def heat(
    rows: Sequence[tuple[str, Sequence[Cell]]],
    columns: Sequence[str],
    words: str,
    label: str,
    *,
    share: bool = False,
) -> Markup:
    """A map whose stronger cells are larger: by logarithm, or linearly from 0 to 1 for a `share`.

    `words` names the value and its unit, and what the columns are.
    """
    values = [c.value for _, cells in rows for c in cells if c.value is not None and c.value > 0]
    strength = Scale(0.0, 1.0, 0.04, 1.0) if share else _strength(values or [1.0])
    left, top = _left([name for name, _ in rows]), 22.0
    width = (WIDTH - left - 8 - CHAR) / len(columns)
    height = 26.0 if len(columns) <= 12 else 20.0
    every = max(1, math.ceil(CHAR * max(map(len, columns)) / width))
    parts = [
        text(left + 8 + width * (i + 0.5), top - 7, name, "tick", "middle")
        for i, name in enumerate(columns)
        if i % every == 0
    ]
    shapes = []
    for r, (name, cells) in enumerate(rows):
        y = top + height * r
        parts.append(_name(left, y + height / 2 + 4, name))
        for i, cell in enumerate(cells):
            x, value = left + 8 + width * i, cell.value
            if value is None:
                parts.append(rect((x, y, width - 1, height - 1), "empty", cell.tip))
                continue
            opacity = strength(value) if value > 0 else strength.begin
            shapes.append(_heat_shape(x, y, width - 1, height - 1, opacity, cell.tip))
            if cell.text and CHAR * 0.9 * len(cell.text) <= width - 3:
                cls = "cell inverse" if opacity >= DARK_FROM else "cell"
                across, down = x + (width - 1) / 2, y + (height - 1) / 2 + 4
                parts.append(text(across, down, cell.text, cls, "middle"))
    bottom = top + height * len(rows)
    parts.append(text(0, bottom + 18, words, "label"))
    return svg(bottom + 26, label, el("g", *shapes, class_="heat"), *parts)


def _heat_shape(
    x: float, y: float, width: float, height: float, opacity: float, tip: str
) -> Markup:
    """A path, which is shorter than a rect: a map may have hundreds."""
    outline = f"M{short(x)} {short(y)}h{short(width)}v{short(height)}h-{short(width)}z"
    return el("path", el("title", tip), d=outline, fill_opacity=f"{opacity:.2g}")


def points(groups: Sequence[Series], x: Axis, y: Axis, label: str) -> Markup:
    """A scatter with the line on which both are equal; groups differ in shape, too."""
    left, right, top, bottom = 46.0, WIDTH - 14.0, 28.0, 260.0
    xs_all = [p[0] for g in groups for p in g.points]
    ys_all = [p[1] for g in groups for p in g.points]
    xs, ys = x.scale(xs_all, left + 6, right), y.scale(ys_all, bottom, top)
    low, high = max(xs.low, ys.low), min(xs.high, ys.high)
    parts = [y_axis(ys, left, y.label, right), x_axis(xs, bottom, x.label)]
    if high > low:
        parts.append(line(xs(low), ys(low), xs(high), ys(high), "reference"))
    for index, group in enumerate(groups):
        tipped = zip(group.points, group.tips, strict=True)
        shown = (mark(xs(a), ys(b), MARKS[index], tip) for (a, b), tip in tipped)
        parts.append(marks(group.colour, shown))
    return svg(bottom + 38, label, *parts)


def profiles(panels: Sequence[tuple[str, Sequence[Series]]], y: Axis, label: str) -> Markup:
    """Small drawings in two columns that share one vertical axis; one line per series."""
    across, height, left = 2, 92.0, 40.0
    width = (WIDTH - left - 12) / across
    values = [p[1] for _, series in panels for s in series for p in s.points]
    parts: list[Markup] = []
    for index, (name, series) in enumerate(panels):
        x0, y0 = left + (index % across) * (width + 12), 24 + (index // across) * (height + 22)
        ys = y.scale(values, y0 + height, y0 + 6)
        last = max(p[0] for s in series for p in s.points)
        xs = Scale(0.0, max(last, 1.0), x0, x0 + width)
        for tick in ys.ticks(3):
            parts.append(line(x0, ys(tick), x0 + width, ys(tick), "grid"))
            if index % across == 0:
                parts.append(text(x0 - 5, ys(tick) + 4, f"{tick:g}", "tick", "end"))
        parts.append(text(x0, y0 - 1, name, "tick"))
        for one in series:
            shape = [(xs(a), ys(b)) for a, b in one.points]
            parts.append(polyline(shape, f"line thin c-{one.colour}", f"{name}: {one.name}"))
    bottom = 24 + math.ceil(len(panels) / across) * (height + 22)
    parts.append(text(0, bottom + 4, y.label, "label"))
    return svg(bottom + 12, label, *parts)
