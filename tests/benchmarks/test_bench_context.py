"""The script writes what the published file holds, in its form."""

import json

import bench_context

from quantmla.method import METHODS

RESULTS = bench_context.ROOT / "benchmarks" / "results"


def test_the_published_file_is_in_the_scripts_form():
    path = max(RESULTS.glob("context_nano_*.json"))
    text = path.read_text()
    found = json.loads(text)
    assert bench_context.as_text(found) == text
    rows = {(row["method"], row["format"], row["recent"]) for row in found["rows"]}
    assert rows == {("bf16", "bf16", None)} | {
        (method, name, recent)
        for method in METHODS
        for name in bench_context.FORMATS
        for recent in (None, 128)
    }


def test_figures_keep_eight_digits():
    kept = json.loads(bench_context.as_text({"rows": [{"kl": 0.0287154248442, "n": 123456789}]}))
    assert kept == {"rows": [{"kl": 0.028715425, "n": 123456789}]}
