"""Where the planes of a page stand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_layer import GEOMETRY

from quantmla.errors import UnsupportedModel, UsageError
from quantmla.quant.format import BITS, CacheFormat, parse_format
from quantmla.quant.layout import ALIGNMENT, bf16_row_bytes, layout_for, page_layout


@given(
    st.sampled_from(BITS),
    st.sampled_from(BITS),
    st.sampled_from([64, 128, 256, 448, 512, 576]),
    st.sampled_from([0, 32, 64, 96]),
    st.sampled_from([32, 64]),
    st.sampled_from([16, 64, 128]),
)
def test_planes_are_disjoint_aligned_and_in_bounds(content, rope, rank, channels, group, page):
    fmt = parse_format(f"c{content}r{rope}", group_size=group, page_size=page)
    layout = page_layout(rank, channels, fmt)
    planes = [layout.content, layout.rope, layout.scales, layout.zero_points, layout.mean]
    at = 0
    for plane in planes:
        assert plane.start % ALIGNMENT == 0
        assert plane.start >= at
        at = plane.stop
    assert at <= layout.page_bytes
    assert layout.page_bytes % ALIGNMENT == 0
    groups = layout.content_groups + layout.rope_groups
    size = [p.stop - p.start for p in planes]
    assert size[0] * 8 == page * rank * content
    assert size[1] * 8 == page * channels * rope
    assert size[2] == 2 * size[3] == 2 * groups * page
    assert size[4] == (2 * channels if fmt.rope_centring == "page" else 0)


@pytest.mark.parametrize(
    ("name", "page_bytes"), [("c4r4", 20_480), ("c2r4", 12_288), ("c16r16", 73_728)]
)
def test_golden_page_bytes_of_512_plus_64(name, page_bytes):
    assert page_layout(512, 64, parse_format(name)).page_bytes == page_bytes


def test_golden_offsets_of_c4r4():
    layout = page_layout(512, 64, parse_format("c4r4"))
    starts = [p.start for p in layout[:5]]
    assert starts == [0, 16_384, 18_432, 19_712, 20_352]


def test_a_row_in_bf16():
    assert bf16_row_bytes(512, 64) == 1152


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(UnsupportedModel, match="kv_lora_rank 520 is not a multiple of group_size"):
        page_layout(520, 64, CacheFormat())
    with pytest.raises(UsageError, match="kv_lora_rank 512 is not a multiple of group_size 48"):
        page_layout(512, 64, CacheFormat(group_size=48))
    with pytest.raises(UnsupportedModel, match="kv_lora_rank 100 is not a multiple of 8"):
        page_layout(100, 64, parse_format("c16r4"))
    with pytest.raises(UsageError, match="qk_rope_head_dim 64 cannot be split into 5 bands"):
        page_layout(512, 64, CacheFormat(rope_bands=5))


def test_layout_for_takes_the_geometry():
    fmt = CacheFormat(group_size=16)
    assert layout_for(GEOMETRY, fmt) == page_layout(16, 8, fmt)
