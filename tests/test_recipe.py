"""Recipes: YAML both ways, and one-line errors for what cannot be meant."""

import pytest

from quantmla.errors import UsageError
from quantmla.quant.format import CacheFormat, parse_format
from quantmla.recipe import Recipe, decided, load_recipe, recipe_from, to_yaml, with_changes


def test_yaml_round_trip(tmp_path):
    recipe = recipe_from(
        {
            "model": {"id": "some/model", "revision": "abc"},
            "calibration": {"text": "book.txt", "num_sequences": 4, "seed": 7},
            "format": {"name": "C2R4", "group_size": 32, "recent": 256},
            "transform": {"method": "quantmla", "options": {"steps": 10, "rate": 1e-3}},
            "output": {"folder": "out"},
        }
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(recipe))
    assert load_recipe(path) == recipe


def test_defaults_are_complete_and_checked(tmp_path):
    assert recipe_from({}) == Recipe()
    assert Recipe().format.cache_format() == CacheFormat()


@pytest.mark.parametrize("name", ["C4R4", "c4r4", "quantmla_c4r4"])
def test_format_names_are_one(name):
    assert recipe_from({"format": {"name": name}}).format.name == "c4r4"


def test_format_fields_reach_the_cache_format():
    fmt = recipe_from(
        {
            "format": {
                "name": "c8r8",
                "sinks": 0,
                "recent": 64,
                "rope_centring": "page",
                "rope_bands": 2,
            }
        }
    ).format.cache_format()
    assert fmt == CacheFormat(content_bits=8, rope_bits=8, num_sink_tokens=0, recent_window=64)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"modle": {}}, ["'modle'", "model, calibration, format"]),
        ({"format": {"bits": 4}}, ["'format.bits'", "name, rope_centring"]),
        ({"calibration": {"num_sequences": 0}}, ["'calibration.num_sequences'", "0", "greater"]),
        ({"calibration": {"seed": "x"}}, ["'calibration.seed'", "'x'", "integer"]),
        ({"format": {"name": "c5r4"}}, ["'c5r4'", "c4r4"]),
        ({"format": {"rope_centring": "token"}}, ["'token'", "'page'", "'none'"]),
        ({"format": {"group_size": 0}}, ["group_size 0"]),
        ({"version": 2}, ["'version'", "2", "1"]),
        ({"transform": {"options": []}}, ["'transform.options'", "dictionary"]),
    ],
)
def test_faults_are_one_line_that_names_key_and_allowed(data, words):
    with pytest.raises(UsageError) as caught:
        recipe_from(data)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [\n", ""])
def test_files_that_hold_no_recipe_are_named(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"bad\.yaml") as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"absent\.yaml is not a file"):
        load_recipe(tmp_path / "absent.yaml")


def test_changes_replace_only_what_is_given():
    recipe = with_changes(Recipe(), {"model.id": "x", "calibration.seed": 0, "format.name": None})
    assert recipe.model.id == "x"
    assert recipe.format == Recipe().format
    with pytest.raises(UsageError, match="c9r9"):
        with_changes(Recipe(), {"format.name": "c9r9"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("calibration: {num_sequences: true}", "calibration.num_sequences"),
        ("calibration: {num_sequences: '2'}", "calibration.num_sequences"),
        ("calibration: {seed: 18446744073709551616}", "calibration.seed"),
        ("model: {id: ''}", "model.id"),
        ("format: {recent: 1" + 30 * "0" + "}", "recent_window"),
        ("[" * 20_000, "is not YAML"),
        ("!!seq a: 1", "is not YAML"),
        ("model: {id: nano}\nmodel: {id: other}", "'model' is given twice, again in line 2"),
        ("format:\n  layers:\n    0: c2r4\n    00: c4r4", "key 0 is given twice, again in line 4"),
        ("transform: {options: {a: [{b: 1, b: 2}]}}", "'b' is given twice, again in line 1"),
    ],
)
def test_values_that_only_look_right_are_refused(text, words, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        load_recipe(path)


def test_a_merge_may_be_overridden(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("format: {layers: {0: &a {name: c2r4}, 1: {<<: *a, name: c8r8}}}")
    names = [layer.name for layer in load_recipe(path).format.layers.values()]
    assert names == ["c2r4", "c8r8"]


def test_a_decided_recipe_says_what_its_names_stood_for_and_reads_back(tmp_path):
    named = recipe_from({"format": {"name": "c2r2"}})
    recipe = decided(named, {"steps": 7})
    assert recipe.format.rope_centring == "page"
    assert recipe.format.sinks == 4
    assert recipe.transform.options == {"steps": 7}
    assert (
        recipe.format.cache_format()
        == recipe_from({"format": {"name": "c2r2"}}).format.cache_format()
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(recipe))
    assert load_recipe(path) == recipe


LAYERS = {0: "c2r4", 3: {"name": "c8r8", "rope_bands": 1}}


def test_layers_have_their_own_bits_and_share_the_rest():
    recipe = recipe_from({"format": {"name": "c4r4", "recent": 256, "layers": LAYERS}})
    cache = recipe.format.cache_format()
    assert cache.for_layer(0) == parse_format("c2r4", recent_window=256)
    assert cache.for_layer(3) == parse_format("c8r8", recent_window=256)
    assert cache.for_layer(1) == parse_format("c4r4", recent_window=256)


def test_a_recipe_with_layers_is_decided_and_reads_back(tmp_path):
    recipe = recipe_from({"format": {"rope_centring": "none", "layers": LAYERS}})
    written = decided(recipe, {})
    assert written.format.cache_format() == recipe.format.cache_format()
    assert written.format.layers[0].rope_centring == "page"
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(written))
    assert load_recipe(path) == written


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({0: "c5r4"}, "'c5r4'"),
        ({-1: "c4r4"}, "format.layers.-1"),
        (
            {0: {"bits": 4}},
            "'format.layers.0.bits'; allowed here: name, rope_centring, rope_bands$",
        ),
        ({0: 4}, "format.layers.0"),
        ({"0": "c4r4"}, "format.layers.0"),
        (["c4r4"], "'format.layers'"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_meant(layers, words):
    with pytest.raises(UsageError, match=words):
        recipe_from({"format": {"layers": layers}})
