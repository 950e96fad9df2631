from dataclasses import replace
from typing import Any

import pytest
import yaml

from quantmla.card import model_card
from quantmla.layer_log import LayerLog
from quantmla.method.layer import PathErrors
from quantmla.quant.format import parse_format
from quantmla.quant.mixed import MixedFormat

LOG = LayerLog(
    prefix="model.layers.0.self_attn",
    before=PathErrors(4e-3, 2e-3, 1e-3),
    after=PathErrors(5e-4, 6e-4, 7e-4),
    seconds=1.0,
    peak_bytes=1,
    history=(),
)


def config(base_model: str = "owner/name") -> dict[str, Any]:
    return {
        "base_model": base_model,
        "base_sha256": "ab" * 32,
        "method": "quantmla",
        "format": parse_format("c2r4").to_json(),
    }


@pytest.mark.parametrize("base", ["owner/name", "nano", '/a b/it\'s: #1 "best"', "C:\\x", "- y"])
def test_the_front_matter_is_yaml_whatever_the_model_is_called(base: str):
    card = model_card(config(base), [LOG])
    start, front, body = card.split("---\n", 2)
    assert start == ""
    assert yaml.safe_load(front) == {
        "base_model": base,
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "tags": ["quantmla", "kv-cache", "mla"],
    }
    assert f"# {base}, fused by QuantMLA for a c2r4 cache" in body


def test_the_card_says_what_was_done_and_with_which_errors():
    card = model_card(config(), [LOG])
    assert "2-bit latents and 4-bit rope keys" in card
    assert "method: quantmla" in card
    assert "4 sink tokens and at least 128 recent tokens" in card
    assert "ab" * 32 in card
    assert "| model.layers.0.self_attn | 4.00e-03 → 5.00e-04 | 1.00e-03 → 7.00e-04 |" in card
    assert "{" not in card


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (LOG.after, "What changed is the basis of\nits two cached paths, so that a cache of 2-bit"),
        (LOG.before._replace(content_output=1e-3), "the basis of\nits cached latents, so that"),
        (LOG.before._replace(rope_output=1e-3), "the basis of\nits cached rope keys, so that"),
    ],
)
def test_the_card_names_the_paths_that_changed(after: PathErrors, words: str):
    same = replace(LOG, after=LOG.before)
    assert words in model_card(config(), [same, replace(LOG, after=after)])


def test_the_card_of_a_method_that_changes_nothing_promises_nothing():
    card = model_card(config() | {"method": "rtn"}, [replace(LOG, after=LOG.before)])
    assert "No basis changed: the weights\nkeep their values, and a cache of 2-bit latents" in card
    assert "loses less" not in card


def test_the_card_of_a_mixed_format_names_the_layers():
    mixed = MixedFormat(default=parse_format("c4r4"), layers={3: parse_format("c2r4")})
    card = model_card(config() | {"format": mixed.to_json()}, [LOG])
    assert "fused by QuantMLA for a mixed cache" in card
    assert "cache format: mixed (c2r4 in layer 3; c4r4 in all others), groups of 64" in card
