"""Charts are well-formed, self-contained, and put things where their values are."""

import math
import xml.etree.ElementTree as ElementTree

import pytest
from charts import Axis, bars, heat_map, points

NAMESPACE = "{http://www.w3.org/2000/svg}"


def parts(svg: str, tag: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f"{NAMESPACE}{tag}")


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis("", 0.01, 10, log=True), [0.01, 0.1, 1, 10]),
        (Axis("", 0, 31), [0, 10, 20, 30]),
        (Axis("", -2.5, 2.6), [-2, -1, 0, 1, 2]),
        (Axis("", 0, 1.3), [0, 0.5, 1.0]),
    ],
)
def test_ticks_are_round_and_within(axis: Axis, ticks: list[float]):
    found = axis.ticks()
    assert 2 <= len(found) <= 7
    assert all(axis.low - 1e-9 <= t <= axis.high + 1e-9 for t in found)
    assert set(map(float, ticks)) & set(found)


def test_scales_map_ends_to_ends():
    scale = Axis("", 0.1, 1000, log=True).scale(200, 0)
    assert (scale(0.1), scale(1000)) == pytest.approx((200, 0))
    assert scale(10) == pytest.approx(100)


def test_bars_grow_with_values():
    svg = bars("t & t", Axis("y", 0, 4), ["0", "1"], {"one": [1.0, 2.0], "two": [4.0, 9.0]}, "x")
    heights = [float(r.get("height")) for r in parts(svg, "rect") if float(r.get("height")) != 10]
    assert heights[0] * 2 == pytest.approx(heights[2], abs=0.2)
    assert heights[1] == heights[3]  # beyond the axis: cut off at its end
    assert "prefers-color-scheme: dark" in svg
    assert "t &amp; t" in svg
    assert "http" not in svg.replace(NAMESPACE[1:-1], "")


def test_points_and_lines():
    axes = (Axis("x", 0, 10), Axis("y", 0, 10))
    dots = parts(points("t", axes, {"a": [(1.0, 1.0), (9.0, 2.0)]}, joined=False), "circle")
    assert float(dots[0].get("cx")) < float(dots[1].get("cx"))
    assert float(dots[0].get("cy")) > float(dots[1].get("cy"))
    lines = parts(points("t", axes, {"a": [(1.0, 1.0), (9.0, 2.0)]}, joined=True), "path")
    assert any("line" in line.get("class") for line in lines)


def test_heat_maps_have_a_square_for_each_value():
    svg = heat_map("t", [[0.0, 0.5], [1.0, 0.25]], ("row", "column"))
    squares = [square for row in parts(svg, "g") for square in row]
    opacities = [float(square.get("opacity")) for square in squares]
    assert opacities == [0.0, 0.5, 1.0, 0.25]
    assert math.isfinite(sum(opacities))
