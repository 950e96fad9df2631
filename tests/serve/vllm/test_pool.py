import pytest

from quantmla.errors import UsageError
from quantmla.quant.format import parse_format
from quantmla.serve.settings import MAX_DRAFTS
from quantmla.serve.vllm.pool import pool_layout, short_chunk


@pytest.mark.parametrize(
    ("name", "page_bytes", "window_page"),
    [("c4r4", 20_480, 16), ("c2r4", 12_288, 8), ("c8r8", 38_656, 32), ("c16r16", 73_728, 64)],
)
def test_both_groups_have_pages_of_the_same_bytes(name, page_bytes, window_page):
    layout = pool_layout(parse_format(name), 512, 64)
    assert (layout.page_bytes, layout.window_page_size) == (page_bytes, window_page)
    assert layout.page_bytes == 64 * layout.bytes_per_token
    row = 2 * (512 + 64)
    assert window_page * row <= page_bytes < 2 * window_page * row or window_page == 64


@pytest.mark.parametrize("window", [0, 1, 2, 63, 100, 128, 256])
def test_a_short_chunk_leaves_half_of_the_window(window):
    """And is taken by decode, moves the border by a page at most, and has all its window pages."""
    layout = pool_layout(parse_format("c4r4", recent_window=window), 512, 64)
    most, first_recent = short_chunk(window), layout.fmt.first_recent
    assert 1 <= most <= window + 1
    for before in range(700):
        for end in range(before + 1, before + most + 1):
            first = first_recent(end)
            assert first - first_recent(before) in (0, 64)
            assert before - first >= window - most or first == 0, "before the chunk's first query"
            assert before >= end - layout.kept_tokens - MAX_DRAFTS, "never taken"


@pytest.mark.parametrize("window", [100, 128, 130, 0])
def test_a_prefix_that_ends_on_a_border_has_whole_pages_in_its_window(window):
    layout = pool_layout(parse_format("c4r4", recent_window=window), 512, 64)
    for border in range(64, 1024, 64):
        assert max(0, border - layout.refreshed_tokens) == layout.fmt.first_recent(border)


def test_a_request_of_128k_takes_few_window_pages():
    layout = pool_layout(parse_format("c4r4"), 512, 64)
    pages = layout.packed_pages(131_072) + layout.window_pages(2, 131_072)
    assert pages == 2048 + 43
    assert 131_072 * 1152 / (pages * layout.page_bytes) > 3.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_sink_tokens": 17}, "17 sink tokens do not fit a window page of 16 tokens"),
        ({"recent_window": None, "num_sink_tokens": 0}, "unprotected"),
    ],
)
def test_what_no_pool_holds_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        pool_layout(parse_format("c4r4", **changes), 512, 64)
