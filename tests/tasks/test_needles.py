"""RULER's prompts: length, depth, and that the answer is there once."""

import re

import pytest

from quantmla.errors import UsageError
from quantmla.evaluate.perplexity import default_text
from quantmla.tasks.needles import KINDS, NEEDLE_TOKENS, NOISE, needle_rows, recalled
from quantmla.tasks.registry import GROUPS


def test_the_kinds_are_the_groups():
    assert tuple(KINDS) == GROUPS["niah"]


@pytest.mark.parametrize("name", KINDS)
def test_prompts(name, tokenizer):
    rows = needle_rows(name, tokenizer, length=600, count=6, seed=0)
    assert rows == needle_rows(name, tokenizer, length=600, count=6, seed=0)
    assert rows != needle_rows(name, tokenizer, length=600, count=6, seed=1)
    noun = "uuid" if name.endswith("3") else "number"
    pattern = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if noun == "uuid" else "[0-9]{7}"
    depths = []
    for row in rows:
        text, value = row["input"], row["value"]
        assert re.fullmatch(pattern, value)
        assert text.count(value) == 1
        key = re.search(rf"One of the special magic {noun}s for ([a-z]+-[a-z]+) is: ", text)[1]
        assert text.startswith(f"A special magic {noun} is hidden within the following text.")
        asked = f"special magic {noun} for {key} mentioned in the provided text"
        assert text.endswith(f"\nWhat is the {asked}? The {asked} is")
        # as long as it may be, short of one more word or noise sentence
        assert 600 - NEEDLE_TOKENS - 40 < len(tokenizer.encode(text)) <= 600 - NEEDLE_TOKENS
        depths.append(text.index(value) / len(text))
    assert max(depths) - min(depths) > 0.2


def test_haystacks(tokenizer):
    (noise,) = needle_rows("niah_single_1", tokenizer, length=500, count=1, seed=0)
    assert noise["input"].count(NOISE + "\n") > 5
    (prose,) = needle_rows("niah_single_2", tokenizer, length=500, count=1, seed=0)
    middle = prose["input"].split("\n")[1]
    piece = middle[:60]
    assert "One of" in piece or piece in re.sub(r"\s+", " ", default_text())


def test_a_length_without_room(tokenizer):
    with pytest.raises(UsageError, match="needle tests of 150 tokens leave no room"):
        needle_rows("niah_single_2", tokenizer, length=150, count=1, seed=0)


def test_a_value_counts_in_any_case_of_letters():
    assert recalled("ab-12", " it is AB-12.") == 1
    assert recalled("ab-12", " it is ab-1 2") == 0
