"""The byte tables of docs/cache_layout.md are those of quant/layout.py."""

import make_tables


def test_tables_are_up_to_date():
    assert make_tables.PAGE.read_text(encoding="utf-8") == make_tables.render()


def test_sizes_that_the_documentation_states():
    text = make_tables.render()
    assert "| c4r4 | 20,480 | 320 | 3.60 |" in text
    assert "| c2r4 | 12,288 | 192 | 6.00 |" in text
