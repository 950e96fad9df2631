"""HTML from plain function calls: everything is escaped unless it is Markup already.

A number that is rounded for the reader is a `<data>` element whose `value` is the exact one of
report.json, so that a reader, a script and a test see the same figure. A table's cell that holds
one such number has the value itself, as `data-x`.
"""

import html
import re
from collections.abc import Container, Iterable, Sequence

NONE = "–"
VOID = {"meta", "line", "rect", "circle", "path", "polyline", "polygon", "col"}
ENDED_BY_THE_NEXT = {"td", "th", "tr"}  # HTML needs no end tag there, and a page has thousands
ALONE = re.compile(r'<data value="([-+.\w]+)">([^<]*)</data>')


class Markup(str):
    """HTML that is written as it is."""

    __slots__ = ()


class Number(Markup):
    """A cell that is set to the right, in digits of equal width."""

    __slots__ = ()


def escape(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(html.escape(str(value), quote=True))


def el(tag: str, *children: object, **attributes: object) -> Markup:
    """One element. `class_` is class, `stroke_width` is stroke-width; None leaves one out."""
    words = [tag]
    for name, value in attributes.items():
        if value is not None:
            words.append(f'{name.rstrip("_").replace("_", "-")}="{escape(short(value))}"')
    if tag in VOID and not children:
        return Markup(f"<{' '.join(words)}/>")
    end = "" if tag in ENDED_BY_THE_NEXT else f"</{tag}>"
    return Markup(f"<{' '.join(words)}>{join(children)}{end}")


def short(value: object) -> object:
    """Coordinates need no more than one digit after the point."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def join(parts: Iterable[object]) -> Markup:
    return Markup("".join(escape(part) for part in parts if part is not None))


def plain(value: float | None, spec: str) -> str:
    """A number as text, such as `12.3%` for 0.123 and `.1%`."""
    return NONE if value is None else format(value, spec)


def number(value: float | None, spec: str) -> Markup:
    """The exact value for programs, the rounded one for people, unless they are the same."""
    if value is None:
        return Number(NONE)
    exact, shown = repr(value), plain(value, spec)
    same = shown.replace(",", "") == exact
    return Number(shown if same else el("data", shown, value=exact))


def numbers(*pairs: tuple[float | None, str], between: str = " ± ") -> Markup:
    """Several numbers in one cell, such as a score and its error."""
    shown = [number(value, spec) for value, spec in pairs if value is not None]
    return Number(escape(between).join(shown)) if shown else Number(NONE)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    caption: str,
    strong: Container[int] = (),
) -> Markup:
    """A table that scrolls sideways in itself; rows whose index is in `strong` stand out."""
    numeric = [bool(rows) and isinstance(cell, Number) for cell in (rows[0] if rows else head)]
    top = [
        el("th", name, scope="col", class_=None if right else "w")
        for name, right in zip(head, numeric, strict=True)
    ]
    body = [
        el("tr", *map(_cell, row), class_="own" if index in strong else None)
        for index, row in enumerate(rows)
    ]
    inner = el("table", el("caption", caption), el("thead", el("tr", *top)), el("tbody", *body))
    return el("div", inner, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _cell(value: object) -> Markup:
    """Of numbers, unless it says that it holds words."""
    if not isinstance(value, Number):
        return Markup(f"<td class=w>{escape(value)}")
    alone = ALONE.fullmatch(value)
    return Markup(f"<td data-x={alone[1]}>{alone[2]}") if alone else el("td", value)


def figure(title: str, drawing: Markup, *, how: Markup, note: str | None = None) -> Markup:
    """A drawing under its title, with how it was measured below."""
    words = None if note is None else el("p", note, class_="note")
    return el("figure", el("figcaption", title), words, drawing, how)


def figures(*items: Markup | None) -> Markup:
    return el("div", *items, class_="figures")
