"""What config.json may hold under the keys that we read, apart from the sizes of attention.

Those are checked by the family's adapter, which says what it needs. A key may be absent or null.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quantmla.errors import require

LARGEST = 2**31 - 1  # that any count may be: more is a typing error, and overflows somewhere


class Rule(NamedTuple):
    """What a value must be, and that in words."""

    fits: Callable[[Any], bool]
    words: str


def is_count(value: Any, least: int) -> bool:
    """A whole number from `least` to LARGEST; true and false are none."""
    return type(value) is int and least <= value <= LARGEST


def is_positive(value: Any) -> bool:
    """A number above 0 that a float can hold; true and false are none."""
    # not < inf, which a whole number of any length is
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _count(least: int) -> Rule:
    words = f"a whole number of at least {least} and below 2^31"
    return Rule(lambda value: is_count(value, least), words)


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_count(n, 1) for n in value)


def _are_layers(value: Any) -> bool:
    """Layers by number, counted from 1, each once."""
    if not (isinstance(value, list) and value and all(is_count(n, 1) for n in value)):
        return False
    return len(set(value)) == len(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


STRING = Rule(lambda value: isinstance(value, str), "a string")
OBJECT = Rule(lambda value: isinstance(value, dict), "an object")
TRUTH = Rule(lambda value: isinstance(value, bool), "true or false")
POSITIVE = Rule(is_positive, "a number above 0")
LAYER_COUNT = Rule(lambda value: type(value) is int and value > 0, "a whole number of at least 1")
STRINGS = Rule(
    lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value),
    "a list of strings",
)
LAYERS = Rule(_are_layers, "a list of different whole numbers of at least 1")

# Of config.json and of its text_config.
RULES = {
    "model_type": STRING,
    "text_config": OBJECT,
    "architectures": STRINGS,
    "quantization_config": OBJECT,
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "linear_attn_config": OBJECT,
    "num_hidden_layers": LAYER_COUNT,
    "num_layers": LAYER_COUNT,
    "num_nextn_predict_layers": _count(0),
    "first_k_dense_replace": _count(0),
    "vocab_size": _count(1),
    "max_position_embeddings": _count(1),
    "rope_interleave": TRUTH,
    "tie_word_embeddings": TRUTH,
    "dtype": STRING,
    "torch_dtype": STRING,
}
ROPE = {
    "rope_type": STRING,
    "type": STRING,
    "factor": POSITIVE,
    "rope_theta": POSITIVE,
    "mscale_all_dim": Rule(_is_number, "a number"),
}
# Of the objects under those keys.
INNER: Mapping[str, Mapping[str, Rule]] = {
    "quantization_config": {
        "quant_method": STRING,
        "scale_fmt": STRING,
        "weight_block_size": Rule(_is_block, "a list of two whole numbers of at least 1"),
    },
    "linear_attn_config": {"full_attn_layers": LAYERS},
    "rope_parameters": ROPE,
    "rope_scaling": ROPE,
}


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Refuses a value that its key cannot have, in one sentence that names both; `where` it is."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            _check(part, RULES, where, "")
            for outer, rules in INNER.items():
                _check(part.get(outer) or {}, rules, where, f"{outer}.")


def _check(part: Mapping[str, Any], rules: Mapping[str, Rule], where: str, prefix: str) -> None:
    for key, rule in rules.items():
        value = part.get(key)
        require(
            value is None or rule.fits(value),
            f"{where} gives {prefix}{key} = {shown(value)}, which is not {rule.words}",
        )


def shown(value: Any) -> str:
    """A value in an error; whole numbers of thousands of digits have no text in Python."""
    if isinstance(value, int) and abs(value) > 10**40:
        return f"about 10^{int(math.log10(abs(value)))}"
    return f"{value!r:.80}"
