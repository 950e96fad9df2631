"""The page in a real browser: `make browser-test`, which needs chromium on the PATH."""

import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest
from report_samples import files_of, write_run

from quantmla.report.build import build
from quantmla.report.collect import collect
from quantmla.report.page import page

pytestmark = pytest.mark.browser
PHONE, DESK = 390, 1120

# Runs inside the page's frame; what it returns is written where --dump-dom shows it.
PROBE = """
const frame = document.getElementById("page");
frame.addEventListener("load", () => {
  const inner = frame.contentDocument, view = frame.contentWindow;
  const colour = () => view.getComputedStyle(inner.body).backgroundColor;
  const out = [...inner.querySelectorAll("svg")].flatMap(drawing => {
    const box = drawing.viewBox.baseVal;
    return [...drawing.querySelectorAll("text")].filter(text => {
      const b = text.getBBox();
      const right = b.x + b.width - box.width, below = b.y + b.height - box.height;
      return b.x < -1 || b.y < -2 || right > 1 || below > 2;
    }).map(text => `${drawing.getAttribute("aria-label")}: ${text.textContent}`);
  });
  const before = colour();
  inner.getElementById("theme").click();
  const after = colour();
  inner.getElementById("theme").click();
  document.getElementById("found").textContent = JSON.stringify({
    wide: inner.documentElement.scrollWidth, out, themes: [before, after, colour()],
    loaded: view.performance.getEntriesByType("resource").length,
    drawings: [...inner.querySelectorAll("svg")].filter(s => s.getBoundingClientRect().height > 20)
      .length,
  });
});
"""


@pytest.fixture(scope="module")
def chromium():
    found = shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "no chromium on the PATH: apt-get install chromium"
    return found


def looked_at(chromium, text, width, folder):
    """What the probe sees with the page in a frame of `width` pixels."""
    host = folder / f"host{width}.html"
    frame = f'<iframe id="page" width="{width}" height="900" srcdoc="{escape(text)}"></iframe>'
    host.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><pre id="found"></pre>{frame}'
        f"<script>{PROBE}</script>"
    )
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000"]
    done = subprocess.run(
        [*command, host.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr
    return json.loads(unescape(found[1]))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "a"), write_run(folder / "b", files_of(2.0))]
    collected = [collect(str(run)) for run in runs]
    return {"one": page(build(collected[:1])), "two": page(build(collected))}


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("which", ["one", "two"])
def test_nothing_overflows_loads_or_is_cut_off(chromium, pages, tmp_path, which, width):
    found = looked_at(chromium, pages[which], width, tmp_path)
    assert found["wide"] <= width
    assert found["out"] == []
    assert found["loaded"] == 0
    assert found["drawings"] >= 15


def test_the_button_changes_the_theme_and_back(chromium, pages, tmp_path):
    first, second, third = looked_at(chromium, pages["one"], DESK, tmp_path)["themes"]
    assert {first, second} == {"rgb(255, 255, 255)", "rgb(18, 22, 27)"}
    assert third == first


def test_the_probe_sees_what_is_wrong(chromium, tmp_path):
    bad = (
        '<body style="margin:0"><button id="theme">t</button><div style="width:900px">x</div>'
        '<svg viewBox="0 0 100 50" aria-label="d"><text x="90" y="20">too long a label</text></svg>'
    )
    found = looked_at(chromium, bad, PHONE, tmp_path)
    assert found["wide"] >= 900
    assert found["out"] == ["d: too long a label"]
