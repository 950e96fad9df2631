"""Text and marks can be told from what is behind them, in both themes."""

import re
from importlib.resources import files

import pytest

CSS = (files("quantmla.report") / "page.css").read_text()
SERIES = ("bf16", "quantmla", "paper", "quarot", "smoothquant", "rtn", "other")
TEXT = ("ink", "soft", "link", "good", "bad")


def themes():
    blocks = re.findall(r"\{([^{}]*--page:[^{}]*)\}", CSS)
    found = [dict(re.findall(r"--([\w]+): (#[0-9a-f]{6})", block)) for block in blocks]
    return [theme for theme in found if "ink" in theme]


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def mixed(top, bottom, share):
    parts = (
        round(share * int(top[i : i + 2], 16) + (1 - share) * int(bottom[i : i + 2], 16))
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{p:02x}" for p in parts)


def test_both_ways_to_the_dark_theme_have_the_same_colours():
    light, by_system, by_hand = themes()
    assert by_system == by_hand
    assert set(light) == set(by_hand)


def test_a_dark_page_is_printed_light():
    outside = CSS[: CSS.index("@media")] + CSS[CSS.index("@media print") :]
    assert "data-theme" not in outside
    assert re.findall(r"@media screen[^{]*", CSS) == [
        *("@media screen and (prefers-color-scheme: dark) ", "@media screen ")
    ]


@pytest.mark.parametrize("theme", themes()[:2], ids=["light", "dark"])
def test_contrast(theme):
    for ground in ("page", "panel"):
        for name in TEXT:
            assert contrast(theme[name], theme[ground]) >= 4.5, (name, ground)
        for name in SERIES:
            assert contrast(theme[name], theme[ground]) >= 3, (name, ground)


@pytest.mark.parametrize("theme", themes()[:2], ids=["light", "dark"])
def test_text_on_a_heat_map_can_be_read(theme):
    for percent in range(6, 101):
        ground = mixed(theme["heat"], theme["panel"], percent / 100)
        ink = theme["inverse"] if percent >= 64 else theme["ink"]
        assert contrast(ink, ground) >= 3, percent


def test_every_colour_class_has_a_colour():
    used = {"bf16", "quantmla", "paper", "quarot", "smoothquant", "rtn", "identity", "other"}
    used |= {"content", "rope", "before", "after", "plain", "centred", "banded", "fitted", "judged"}
    used |= {"matching", "aggregation", "interaction", "plane-content", "plane-padding"}
    for name in used:
        assert re.search(rf"\.c-{name}\b[^{{]*\{{ --c:", CSS), name
