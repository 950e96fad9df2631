"""Names of formats, what each implies, and which token is read how."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmla.errors import UsageError
from quantmla.quant.format import BITS, VERSION, CacheFormat, paper_format, parse_format


@pytest.mark.parametrize("name", ["c4r4", "C4R4", "quantmla_c4r4", "QuantMLA-C4R4", " c4r4 "])
def test_spellings_are_one_format(name):
    assert parse_format(name) == CacheFormat()


@pytest.mark.parametrize("name", ["", "c4", "c5r4", "c4r1", "int4", "c4r4x", "fp8"])
def test_unknown_names_are_refused_with_the_allowed_ones(name):
    with pytest.raises(UsageError, match="c4r4") as caught:
        parse_format(name)
    assert repr(name) in str(caught.value)
    assert str(BITS) in str(caught.value)


@pytest.mark.parametrize("content", BITS)
@pytest.mark.parametrize("rope", BITS)
def test_centring_is_for_rope_keys_of_few_bits(content, rope):
    fmt = parse_format(f"c{content}r{rope}")
    assert fmt.name == f"c{content}r{rope}"
    assert (fmt.rope_centring, fmt.rope_bands) == (("page", 2) if rope <= 4 else ("none", 1))


def test_the_published_quantiser():
    fmt = paper_format("c4r4")
    assert (fmt.rope_centring, fmt.rope_bands, fmt.range_rule) == ("none", 1, "paper")
    assert paper_format("c2r2").content_clip == paper_format("c2r2").rope_clip == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"content_bits": 5},
        {"rope_bits": 1},
        {"group_size": 0},
        {"rope_bands": 0},
        {"rope_centring": "token"},
        {"range_rule": "minmax"},
        {"content_clip": 0.0},
        {"rope_clip": 1.5},
        {"page_size": 0},
        {"num_sink_tokens": -1},
        {"recent_window": -1},
        {"recent_window": None},  # sinks would be left
        {"version": VERSION + 1},
    ],
)
def test_bad_values_are_named(change):
    with pytest.raises(UsageError, match=r"\S") as caught:
        replace(CacheFormat(), **change)
    value = next(iter(change.values()))
    assert value is None or str(value) in str(caught.value)


def test_json_round_trip_and_unknown_keys():
    for fmt in (CacheFormat(), paper_format("c2r4"), CacheFormat().unprotected()):
        assert CacheFormat.from_json(fmt.to_json()) == fmt
    with pytest.raises(UsageError, match="bits"):
        CacheFormat.from_json({"bits": 4})
    with pytest.raises(UsageError, match="lacks content_bits, rope_bits, group_size, rope_bands, "):
        CacheFormat.from_json({})
    whole = CacheFormat().to_json()
    for name in whole:
        with pytest.raises(UsageError, match=f"the cache format lacks {name}$"):
            CacheFormat.from_json({key: value for key, value in whole.items() if key != name})


@given(st.integers(0, 3000), st.integers(0, 300), st.sampled_from([1, 16, 64]))
def test_the_window_holds_at_least_the_recent_tokens_and_whole_pages_are_packed(
    length, recent, page
):
    fmt = CacheFormat(recent_window=recent, page_size=page)
    first = fmt.first_recent(length)
    assert 0 <= first <= length
    assert first % page == 0
    assert length - first >= min(recent, length)
    assert length - first < recent + page or first == 0
    assert fmt.first_recent(length + 1) >= first  # a packed page never comes back


def test_an_unprotected_cache_has_neither_sinks_nor_window():
    fmt = CacheFormat().unprotected()
    assert fmt.num_sink_tokens == 0
    assert fmt.first_recent(1000) == 1000


@pytest.mark.parametrize(
    "change",
    [
        {"recent_window": 1.5},
        {"recent_window": 2**31},
        {"num_sink_tokens": True},
        {"group_size": "a"},
        {"page_size": None},
        {"content_clip": "x"},
        {"content_bits": [4]},
    ],
)
def test_values_of_another_type_are_named(change):
    (name,) = change
    with pytest.raises(UsageError, match=name):
        CacheFormat.from_json(CacheFormat().to_json() | change)
