import io
import json

from rich.console import Console

from quantmla.evaluate.table import Row, to_json, to_table

ROWS = [
    Row("bf16", "bf16", 0, None, 19.0, 0.0, 0.0, 0.0, 1.0, 0.98, 100, 384.0),
    Row("rtn", "c4r4", 4, 128, 20.5, 0.0123456, 0.3, 2.5, 0.912, None, 100, 110.0),
]


def test_json_has_exactly_these_keys():
    keys = [
        "method",
        "format",
        "sinks",
        "recent",
        "perplexity",
        "kl_mean",
        "kl_p99",
        "kl_max",
        "top1",
        "recall",
    ]
    rows = json.loads(to_json(ROWS))
    assert [list(row) for row in rows] == [[*keys, "tokens", "bytes_per_token", "by_context"]] * 2
    assert rows[1]["recent"] == 128
    assert rows[0]["recent"] is None


def test_the_table_shows_every_row():
    out = io.StringIO()
    Console(file=out, width=140).print(to_table(ROWS, title="nano"))
    shown = out.getvalue()
    for part in ("nano", "rtn", "4 + 128", "0.01235", "2.500", "91.20 %", "98.0 %", "110"):
        assert part in shown
