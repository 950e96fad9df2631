"""Writes docs/nano_report.html, the report of nano: `python docs/make_report.py`.

From the files in benchmarks/results, as `quantmla report benchmarks/results` does. `make report`
makes the files of one run of `quantize` anew first.
"""

from dataclasses import replace
from pathlib import Path

from quantmla.report.build import build
from quantmla.report.collect import collect
from quantmla.report.page import page

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = Path(__file__).with_name("nano_report.html")


def render(folder: Path = RESULTS) -> str:
    """The page as it should be."""
    return page(build([replace(collect(str(folder)), name="nano")]))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
