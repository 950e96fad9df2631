"""Rows of an earlier result file: taken over, or the file is named."""

import json
from pathlib import Path

import pytest

from quantmla.bench.results import read_rows, write
from quantmla.errors import UsageError

ROWS = [{"backend": "x", "us": 1.5}, {"backend": "y", "us": 2.5}]


def test_rows_are_read_as_written(tmp_path: Path):
    path = tmp_path / "decode.json"
    assert read_rows(path) == []
    write(path, ROWS)
    assert read_rows(path) == ROWS


@pytest.mark.parametrize(
    "change", [{"rows": 5}, {"rows": ["abc"]}, {"rows": [5]}, {"environment": []}, {"rows": None}]
)
def test_an_edited_file_is_named(change, tmp_path: Path):
    path = tmp_path / "decode.json"
    write(path, ROWS)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=r"decode\.json (is not a result|was measured with other)"):
        read_rows(path)
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"decode\.json is not a result file"):
        read_rows(path)
