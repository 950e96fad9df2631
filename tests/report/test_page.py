"""The page is well-formed, loads nothing, and shows the numbers of report.json and no others."""

import re
from html.parser import HTMLParser

import pytest
from report_samples import files_of, write_run

from quantmla.report.build import build
from quantmla.report.collect import collect
from quantmla.report.page import page
from quantmla.report.sections import SECTIONS, section

CELLS = ("td", "th")
ROWS = (*CELLS, "tr")
VOID = {"meta", "br", "hr", "img", "input", "link", "col"}


class Reader(HTMLParser):
    """Checks the nesting, and keeps cells, data elements, ids and attributes."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.attributes, self.data, self.cells = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.end(CELLS if tag in CELLS else ROWS if tag == "tr" else ())
        found = dict(attrs)
        self.attributes += [(tag, *pair) for pair in attrs]
        self.ids += [found["id"]] if "id" in found else []
        if tag == "data" or "data-x" in found:
            self.data.append([float(found.get("value") or found["data-x"]), ""])
        if tag == "td":
            self.cells.append(["x" if "data-x" in found else found.get("class"), ""])
        if tag not in VOID:
            self.open.append(tag)

    def end(self, tags):
        """Of elements that the next one ends."""
        while self.open and self.open[-1] in tags:
            self.open.pop()

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        self.end(ROWS if tag in ("thead", "tbody") else ())
        assert self.open.pop() == tag

    def handle_data(self, data):
        exact = self.open[-1:] == ["td"] and self.cells[-1][0] == "x"
        if exact or self.open[-1:] == ["data"]:
            self.data[-1][1] += data
        elif "td" in self.open:
            self.cells[-1][1] += data


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader


def numbers_in(value):
    if isinstance(value, dict):
        return {n for v in value.values() for n in numbers_in(v)}
    if isinstance(value, list):
        return {n for v in value for n in numbers_in(v)}
    return {float(value)} if isinstance(value, int | float) else set()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return build([collect(str(write_run(tmp_path_factory.mktemp("one") / "run")))])


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    less = {k: v for k, v in files_of(2.0).items() if k != "serve.json"}
    runs = [write_run(folder / "a"), write_run(folder / "b", less)]
    return build([collect(str(run)) for run in runs])


def test_the_page_is_well_formed(report, compared):
    for one in (report, compared):
        found = read(page(one))
        assert len(found.ids) == len(set(found.ids))


def test_the_same_report_gives_the_same_page(report):
    assert page(report) == page(report)


def test_nothing_is_loaded_from_anywhere(report, compared):
    for text in (page(report), page(compared)):
        assert not re.search(r"https?:|//[a-z]|@import|url\(|<link|<img|<iframe", text)
        assert text.count("<script>") == 1
        sources = [v for _, name, v in read(text).attributes if name in ("src", "href")]
        assert all(v.startswith("#") for v in sources)


def test_every_link_has_its_place(report, compared):
    for one in (report, compared):
        found = read(page(one))
        links = {value[1:] for _, name, value in found.attributes if name == "href"}
        assert links <= set(found.ids)


def test_every_number_of_a_table_is_one_of_the_report(report, compared):
    for one in (report, compared):
        found = read(page(one))
        known = numbers_in(one)
        assert len(found.data) > 150
        assert {value for value, _ in found.data} <= known
        # a numeric cell has no digit that is not in a data element, or is the exact value
        bare = [text for cls, text in found.cells if cls is None and re.search(r"\d", text)]
        numbers = [
            float(n) for text in bare for n in re.findall(r"-?\d[\d.e-]*", text.replace(",", ""))
        ]
        assert len(numbers) > 20
        assert set(numbers) <= known


def test_what_is_shown_is_the_exact_value_rounded(report):
    for value, text in read(page(report)).data:
        shown = text.replace(",", "").lstrip("+")
        scale = 100 if shown.endswith("%") else 1
        digits = shown.rstrip("%")
        assert float(digits) == pytest.approx(scale * value, rel=0.5, abs=0.51), (value, text)


def test_a_number_changed_in_the_report_changes_the_page(report):
    row = report["runs"][0]["sections"]["quality"]["groups"][0]["rows"][-1]
    before = row["kl_mean"]
    try:
        row["kl_mean"] = 0.12345
        assert "0.12345" in page(report)
    finally:
        row["kl_mean"] = before
    assert "0.12345" not in page(report)


def test_every_figure_says_how_it_was_measured(report):
    text = page(report)
    figures = re.findall(r"<figure>.*?</figure>", text, re.S)
    assert len(figures) > 12
    for figure in figures:
        assert 'class="how"' in figure
        assert ".json" in figure
        assert 'aria-label="' in figure


def test_missing_sections_are_one_line_with_the_command(tmp_path):
    one = {"calibration.json": files_of()["calibration.json"]}
    text = page(build([collect(str(write_run(tmp_path / "run", one)))]))
    for key in SECTIONS:
        if key != "cost":
            assert f"<li>{section(key).TITLE}: <code>" in text
            assert f'id="{key}"' not in text


def test_compared_runs_stand_side_by_side(compared):
    text = page(compared)
    assert '<th scope="col">b</thead>' in text
    assert "▼ <data value=" in text
    assert text.count('class="none"') == 1  # the second run has no serving results


def test_names_are_escaped(tmp_path):
    run = write_run(tmp_path / "<b>run", {"calibration.json": files_of()["calibration.json"]})
    text = page(build([collect(str(run))]))
    assert "<b>run" not in text
    assert "&lt;b&gt;run" in text
    read(text)


def test_the_page_stays_small(compared):
    assert len(page(compared).encode()) < 500_000
