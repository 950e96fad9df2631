"""RULER's single needles: one fact in a long text, asked for at its end, answered by decoding.

`niah_single_1` hides a number in a repeated sentence, `niah_single_2` in prose, `niah_single_3` a
UUID in prose. Templates, forty depths, 128 new tokens and the score (the value occurs in what was
written, in any case of letters) are RULER's. Its haystack and word list are not free to ship: the
prose here is the packaged held-out text, keys are two of its words, and sentences end where a
pattern says so. Source: Hsieh et al., RULER, arXiv 2404.06654.
"""

import random
import re
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from quantmla.errors import UsageError, require
from quantmla.evaluate.perplexity import beginning_ids, default_text, text_ids
from quantmla.evaluate.retrieval import key_words

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = 40  # from the beginning to the end, evenly
NEEDLE_TOKENS = 128  # new tokens of an answer
COUNT = 500  # tests of one kind at one length, unless limited
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
Length = Callable[[str], int]


class _Kind(NamedTuple):
    noun: str
    prose: bool


KINDS = {
    "niah_single_1": _Kind("number", False),
    "niah_single_2": _Kind("number", True),
    "niah_single_3": _Kind("uuid", True),
}


class Prompt(NamedTuple):
    """RULER's template around a haystack."""

    before: str
    needle: str
    after: str
    value: str


def _prompt(kind: _Kind, rng: random.Random, words: list[str]) -> Prompt:
    key, noun = "-".join(rng.sample(words, 2)), kind.noun
    if noun == "uuid":
        value = str(uuid.UUID(int=rng.getrandbits(128), version=4))
    else:
        value = str(rng.randint(1_000_000, 9_999_999))
    asked = f"special magic {noun} for {key} mentioned in the provided text"
    return Prompt(
        before=f"A special magic {noun} is hidden within the following text. Make sure to memorize "
        f"it. I will quiz you about the {noun} afterwards.\n",
        needle=f"One of the special magic {noun}s for {key} is: {value}.",
        after=f"\nWhat is the {asked}? The {asked} is",
        value=value,
    )


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n of at most `limit` that fits; whatever is below one that fits does, too."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def needle_rows(
    name: str, tokenizer: Any, *, length: int, count: int, seed: int
) -> list[dict[str, str]]:
    """`count` tests of at most `length` tokens, the answer's included; same seed, same tests.

    Raises UsageError where `length` is too short for the template.
    """
    kind, text = KINDS[name], default_text()
    keys, rng = key_words(text), random.Random(f"{name} {length} {seed}")
    hay = text.split() if kind.prose else [NOISE]
    special = len(beginning_ids(tokenizer))

    def tokens(prompt: str) -> int:
        return special + len(text_ids(tokenizer, prompt))

    return [_row(_prompt(kind, rng, keys), hay, rng, tokens, length) for _ in range(count)]


def _sentences(hay: list[str], start: int, count: int) -> list[str]:
    """`count` words of prose as sentences, or as many repetitions of the one sentence."""
    taken = [hay[(start + i) % len(hay)] for i in range(count)]
    return taken if hay == [NOISE] else SENTENCE_END.split(" ".join(taken))


def _row(
    prompt: Prompt, hay: list[str], rng: random.Random, tokens: Length, length: int
) -> dict[str, str]:
    start, depth = rng.randrange(len(hay)), rng.randrange(DEPTHS) / (DEPTHS - 1)
    joint, room = "\n" if hay == [NOISE] else " ", length - NEEDLE_TOKENS

    def filled(count: int) -> str:
        taken = _sentences(hay, start, count)
        at = int(len(taken) * depth)
        return prompt.before + joint.join([*taken[:at], prompt.needle, *taken[at:]]) + prompt.after

    # every word is at least a token
    count = _most(lambda n: tokens(filled(n)) <= room, max(room, 0))
    require(
        count >= 1,
        f"needle tests of {length} tokens leave no room for a haystack beside the template and "
        f"{NEEDLE_TOKENS} new tokens: ask for longer ones",
        UsageError,
    )
    return {"input": filled(count), "value": prompt.value}


def recalled(value: str, written: str) -> float:
    """1 where the value occurs in what was written."""
    return float(value.lower() in written.lower())
