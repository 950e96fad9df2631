"""Synthetic in-context recall for pre-training: what makes a small model look far back.

A row of ordinary text gets facts planted in it and, later, questions about them. Four kinds:
needles ("One of the special magic numbers for K is: V."), near-duplicate needles whose keys or
values differ in one word or digit, look-up tables ("K: V" lines) and copied spans of random tokens.
Keys are drawn from the words of the corpus, so that recall must work for any key.
"""

import random
import uuid
from collections import Counter
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ANSWER_WEIGHT = 3.0  # loss weight of answer tokens


def corpus_words(text: str, count: int = 6000) -> list[str]:
    """The most frequent lower-case words of 4 to 10 letters, most frequent first."""
    words = Counter(w for w in text.split() if 4 <= len(w) <= 10 and w.isalpha() and w.islower())
    return [w for w, _ in words.most_common(count)]


@dataclass(frozen=True, slots=True)
class TaskMaker:
    """Makes one training row at a time; `rng` decides everything."""

    tokenizer: Tokenizer
    words: list[str]

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text).ids, dtype=np.int64)

    def _key(self, rng: random.Random) -> str:
        return "-".join(rng.choice(self.words) for _ in range(rng.choice((2, 2, 2, 3))))

    def _value(self, rng: random.Random) -> tuple[str, str]:
        """A value and the plural noun that the template calls it."""
        kind = rng.random()
        if kind < 0.5:
            return str(rng.randint(1_000_000, 9_999_999)), "numbers"
        if kind < 0.8:
            return str(uuid.UUID(int=rng.getrandbits(128), version=4)), "uuids"
        return " ".join(rng.choice(self.words) for _ in range(rng.randint(2, 4))), "words"

    def _near(self, rng: random.Random, key: str, value: str) -> tuple[str, str]:
        """A distractor: one word of the key replaced, one character of the value changed."""
        parts = key.split("-")
        parts[rng.randrange(len(parts))] = rng.choice(self.words)
        if value.isdigit():
            at = rng.randrange(1, len(value))
            value = value[:at] + rng.choice("0123456789") + value[at + 1 :]
        else:
            value = (
                self._value(rng)[0] if " " in value else str(uuid.UUID(int=rng.getrandbits(128)))
            )
        return "-".join(parts), value

    def needles(self, rng: random.Random, row: np.ndarray, weight: np.ndarray, end: int) -> None:
        """Plants facts and asks for each of them later in the row, but not for distractors."""
        busy = np.zeros(end, dtype=bool)
        for _ in range(rng.randint(1, 4)):
            key, (value, noun) = self._key(rng), self._value(rng)
            fact = self._ids(f" One of the special magic {noun} for {key} is: {value}.")
            tail = " mentioned in the provided text" if rng.random() < 0.6 else ""
            ask = self._ids(
                f"\nWhat is the special magic {noun[:-1]} for {key}{tail}?"
                f" The special magic {noun[:-1]} for {key}{tail} is"
            )
            answer = self._ids(f" {value}.")
            size = len(ask) + len(answer)
            for _ in range(rng.choice((0, 0, 1, 3))):
                other_key, other = self._near(rng, key, value)
                if other_key != key:
                    near = self._ids(
                        f" One of the special magic {noun} for {other_key} is: {other}."
                    )
                    place(rng, row, busy, near, 0, end)
            at = place(rng, row, busy, fact, 0, end - size - 1)
            if at is None:
                continue
            asked = place(rng, row, busy, np.concatenate([ask, answer]), at + len(fact), end)
            if asked is not None:
                weight[asked + len(ask) : asked + size] = ANSWER_WEIGHT

    def table(self, rng: random.Random, row: np.ndarray, weight: np.ndarray, end: int) -> None:
        """A list of "key: value" lines, then several look-ups."""
        busy = np.zeros(end, dtype=bool)
        short = rng.random() < 0.5
        pairs = {}
        for _ in range(rng.randint(4, 32)):
            key = rng.choice(self.words) if short else self._key(rng)
            pairs[key] = (
                str(rng.randint(100, 99_999)) if rng.random() < 0.6 else rng.choice(self.words)
            )
        body = self._ids("\n" + "\n".join(f"{k}: {v}" for k, v in pairs.items()) + "\n")
        at = place(rng, row, busy, body, 0, end - 200)
        if at is None:
            return
        for key in rng.sample(sorted(pairs), min(4, len(pairs))):
            ask, answer = self._ids(f"\nThe value of {key} is:"), self._ids(f" {pairs[key]}\n")
            asked = place(rng, row, busy, np.concatenate([ask, answer]), at + len(body), end)
            if asked is not None:
                weight[asked + len(ask) : asked + len(ask) + len(answer)] = ANSWER_WEIGHT

    def copies(self, rng: random.Random, row: np.ndarray, weight: np.ndarray, end: int) -> None:
        """Spans of random tokens that occur twice; predictable after two tokens."""
        busy = np.zeros(end, dtype=bool)
        vocabulary = self.tokenizer.get_vocab_size()
        for _ in range(5):
            span = np.array([rng.randrange(8, vocabulary) for _ in range(rng.randint(12, 48))])
            at = place(rng, row, busy, span, 0, end - len(span) - 1)
            if at is None:
                continue
            again = place(rng, row, busy, span, at + len(span), end)
            if again is not None:
                weight[again : again + 2] = 0.0

    def row(
        self, rng: random.Random, text: np.ndarray, planted: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """`text` (context + 1 tokens) with tasks planted in some of the calls, and loss weights."""
        row, weight = text.astype(np.int64), np.ones(len(text), dtype=np.float32)
        if rng.random() < planted:
            if rng.random() < 0.08:  # the repeated-sentence haystack of S-NIAH-1
                noise = self._ids(NOISE + "\n")
                row = np.resize(noise, len(row))
                weight[:] = 0.05
            task = rng.choices((self.needles, self.table, self.copies), (0.65, 0.15, 0.2))[0]
            task(rng, row, weight, len(row))
        return row, weight


def place(
    rng: random.Random, row: np.ndarray, busy: np.ndarray, ids: np.ndarray, low: int, high: int
) -> int | None:
    """Writes `ids` at a random free place in [low, high); None if a few tries find none."""
    for _ in range(8):
        if high - len(ids) <= low:
            return None
        at = rng.randrange(low, high - len(ids))
        if not busy[at : at + len(ids)].any():
            row[at : at + len(ids)] = ids
            busy[at : at + len(ids)] = True
            return at
    return None
