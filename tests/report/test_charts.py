from xml.etree import ElementTree

import pytest

from quantmla.report.charts import (
    Axis,
    Cell,
    Dot,
    Series,
    Stack,
    dots,
    heat,
    lines,
    points,
    profiles,
    stacks,
)

X, Y = Axis(label="x in tokens", log=True), Axis(label="y in nats", log=True)
SERIES = [
    Series(name="a", colour="quantmla", points=[(1, 0.5), (10, 2.0)], tips=["one", "ten"]),
    Series(name="b <c>", colour="rtn", points=[(1, 0.6), (10, 2.1)], tips=["1", "10"]),
]
DOTS = [
    Dot(label="m", value=0.5, text="0.50", colour="rtn", interval=(0.4, 0.6)),
    Dot(label="n", value=2.0, text="2.00", colour="paper", shape="diamond"),
]
CELLS = [("row", [Cell(value=1.0, text="1", tip="t"), Cell(value=None, text="", tip="none")])]
DRAWN = {
    "dots": dots(DOTS, X, "label", reference=1.0),
    "stacks": stacks([Stack(label="s", parts=[("p", 3.0, "rope")], text="3")], X, "label"),
    "lines": lines(SERIES, X, Y, "label"),
    "points": points(SERIES, X, Y, "label"),
    "heat": heat(CELLS, ["0", "1"], "x in tokens", "label"),
    "profiles": profiles([("p", SERIES)], X, "label"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_well_formed_and_says_what_it_shows(name):
    root = ElementTree.fromstring(DRAWN[name])
    assert root.tag == "svg"
    assert root.get("role") == "img"
    assert root.get("aria-label") == "label"
    texts = [node.text for node in root.iter("text")]
    assert any("x in tokens" in text for text in texts if text)


@pytest.mark.parametrize("name", DRAWN)
def test_colours_come_from_classes_alone(name):
    assert "#" not in DRAWN[name]
    assert "fill=" not in DRAWN[name]


def xs(drawing, tag, key):
    return [float(node.get(key)) for node in ElementTree.fromstring(drawing).iter(tag)]


def test_a_larger_value_lies_further_right():
    first, second = (
        p for p in ElementTree.fromstring(DRAWN["dots"]).iter() if p.tag in ("circle", "path")
    )
    assert float(first.get("cx")) < float(second.get("d").split()[0].removeprefix("M"))


def test_values_of_one_label_share_a_row():
    pair = [Dot(label="m", value=v, text=str(v), colour="rope") for v in (1.0, 2.0)]
    heights = xs(dots(pair, X, "label"), "circle", "cy")
    assert len(set(heights)) == 1
    assert "1.0 · 2.0" in dots(pair, X, "label")


def test_a_long_name_is_cut_and_its_tip_is_whole():
    name = "a job with a very long name indeed"
    drawn = dots([Dot(label=name, value=1.0, text="1", colour="rope")], X, "label")
    assert f"<title>{name}</title>a job with" in drawn
    assert "…</text>" in drawn


def test_intervals_of_one_row_lie_apart():
    pair = [
        Dot(label="m", value=v, text=str(v), colour="rope", interval=(v / 2, 2 * v))
        for v in (1.0, 2.0)
    ]
    first, second = xs(dots(pair, X, "label"), "circle", "cy")
    assert second - first == 8


def test_a_stronger_cell_is_larger():
    row = [Cell(value=v, text="", tip="t") for v in (1.0, 10.0, 100.0)]
    strength = xs(heat([("r", row)], ["a", "b", "c"], "w", "l"), "path", "fill-opacity")
    assert strength == sorted(strength)
    assert strength[-1] == 1.0


def test_shares_are_not_stretched():
    row = [Cell(value=v, text="", tip="t") for v in (0.5, 0.5)]
    strength = xs(heat([("r", row)], ["a", "b"], "w", "l", share=True), "path", "fill-opacity")
    assert strength == [0.52, 0.52]


def test_a_text_too_wide_for_its_cell_is_left_to_the_tip():
    row = [Cell(value=1.0, text="0.001", tip="tip") for _ in range(60)]
    drawn = heat([("r", row)], [str(i) for i in range(60)], "w", "l")
    assert "0.001" not in drawn
    assert drawn.count("<title>tip</title>") == 60


def test_every_mark_has_a_tip():
    for name in ("dots", "lines", "points"):
        root = ElementTree.fromstring(DRAWN[name])
        for node in root.iter():
            if node.tag in ("circle", "polygon", "polyline"):
                assert node.find("title").text
