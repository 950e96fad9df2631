"""Formats by layer: what readers of one layer and of all layers get."""

import pytest

from quantmla.errors import UsageError
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.quant.mixed import (
    MixedFormat,
    describe,
    distinct_formats,
    each_layer,
    format_from_json,
    model_format,
    require_layers,
    uniform_format,
)

C4R4, C2R4, C8R8 = (parse_format(name) for name in ("c4r4", "c2r4", "c8r8"))
MIXED = MixedFormat(default=C4R4, layers={1: C2R4, 5: C8R8})


def test_each_layer_has_its_own_format():
    assert [MIXED.for_layer(i).name for i in (0, 1, 2, 5)] == ["c4r4", "c2r4", "c4r4", "c8r8"]
    assert C2R4.for_layer(3) is C2R4


def test_an_engine_with_one_format_for_all_can_tell():
    assert uniform_format(C2R4) is C2R4
    assert uniform_format(MIXED) is None
    assert uniform_format(model_format(C4R4, {0: C4R4})) == C4R4


@pytest.mark.parametrize("fmt", [C4R4, C8R8, MIXED])
def test_json_round_trip(fmt):
    assert format_from_json(fmt.to_json()) == fmt


def test_a_reader_that_knows_one_format_refuses_several():
    assert "layers" not in C2R4.to_json()
    with pytest.raises(UsageError, match="'layers'"):
        CacheFormat.from_json(MIXED.to_json())


def test_what_is_written_of_a_layer_is_what_differs():
    changed = MIXED.to_json()["layers"]
    assert changed["1"] == {"content_bits": 2, "content_clip": C2R4.content_clip}
    assert set(changed["5"]) == {"content_bits", "rope_bits", "rope_bands", "rope_centring"}


def test_a_change_reaches_every_layer_and_differences_that_vanish_are_gone():
    bare = each_layer(MIXED, CacheFormat.unprotected)
    assert [f.recent_window for f in distinct_formats(bare)] == [None] * 3
    assert bare.recent_window is None
    assert bare.name == "mixed"
    assert each_layer(MIXED, lambda fmt: C4R4) == C4R4


def test_the_window_is_that_of_all_layers():
    assert (MIXED.page_size, MIXED.num_sink_tokens, MIXED.recent_window) == (64, 4, 128)
    for length in (0, 128, 191, 192, 1000):
        assert MIXED.first_recent(length) == C2R4.first_recent(length)


@pytest.mark.parametrize(
    "changes", [{"page_size": 32}, {"num_sink_tokens": 0}, {"recent_window": 64}], ids=str
)
def test_what_layers_share_cannot_differ(changes):
    (name,) = changes
    with pytest.raises(UsageError, match=f"{name}.*layer 7"):
        MixedFormat(default=C4R4, layers={7: parse_format("c2r4", **changes)})


def test_a_layer_that_the_model_lacks_is_named():
    require_layers(MIXED, range(6))
    require_layers(C4R4, [])
    with pytest.raises(UsageError, match=r"\[5\].*\[0, 1, 2\]"):
        require_layers(MIXED, range(3))


def test_in_words():
    assert describe(C4R4) == "c4r4"
    two = MixedFormat(default=C4R4, layers={1: C2R4, 3: C2R4, 5: C8R8})
    assert describe(two) == "mixed (c2r4 in layers 1, 3; c8r8 in layer 5; c4r4 in all others)"


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([1], "not formats by layer"),
        ({"one": {}}, "not formats by layer"),
        ({"1": "c2r4"}, "not formats by layer"),
        ({"1": {"bits": 2}}, "unknown keys"),
        ({"1": {"content_bits": 5}}, "content_bits 5"),
        ({"1": {"recent_window": 0}}, "recent_window 0 of layer 1"),
    ],
    ids=str,
)
def test_damaged_json_is_refused(layers, words):
    with pytest.raises(UsageError, match=words):
        format_from_json({**C4R4.to_json(), "layers": layers})


@pytest.mark.parametrize("data", [None, 5, "c4r4", [], {}])
def test_what_is_no_whole_format_is_refused(data):
    with pytest.raises(UsageError, match=r"the cache format (is .*, not a mapping|lacks)"):
        format_from_json(data)
