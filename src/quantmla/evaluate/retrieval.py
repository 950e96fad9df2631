"""Recall over distance: facts planted in ordinary text, asked for at the end.

Three kinds: `single` plants one number, `near` plants seven look-alikes of it as well (one word of
the key and one digit of the value differ), `long` asks for a UUID. A recall counts only when every
token of the answer is the most likely one given the right tokens before it, which is the case
exactly when greedy decoding writes the answer.
"""

import random
import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from quantmla.errors import UsageError, require
from quantmla.evaluate.perplexity import Progress, beginning_ids, text_ids
from quantmla.evaluate.variant import Variant, logits

Kind = Literal["single", "near", "long"]
KINDS: tuple[Kind, ...] = ("single", "near", "long")
DISTRACTORS = 7
MIN_DISTANCE = 1024  # tokens between a fact and the end; half of a context below twice that

GPU_BATCH = 8  # needles that run together on a GPU; on a CPU more would only cost memory


class Needle(NamedTuple):
    """One input whose last `answer_length` tokens are the answer."""

    kind: Kind
    ids_T: Tensor
    answer_length: int
    distance: int  # tokens from the fact's end to the question's


def key_words(text: str) -> list[str]:
    """Lower-case words of 4 to 10 letters, sorted."""
    words = {
        w for w in text.split() if 4 <= len(w) <= 10 and w.isascii() and w.isalpha() and w.islower()
    }
    require(
        len(words) >= 16,
        f"the text has {len(words)} usable words for keys; 16 are needed",
        UsageError,
    )
    return sorted(words)


class _Maker(NamedTuple):
    tokenizer: Any
    words: list[str]
    haystack: list[int]
    context: int
    rng: random.Random

    def ids(self, text: str) -> list[int]:
        return text_ids(self.tokenizer, text)

    def fact(self, noun: str, key: str, value: str) -> list[int]:
        return self.ids(f" One of the special magic {noun} for {key} is: {value}.")

    def look_alike(self, key: str, value: str) -> tuple[str, str]:
        parts = key.split("-")
        at = self.rng.randrange(len(parts))
        parts[at] = self.rng.choice([w for w in self.words if w != parts[at]])
        at = self.rng.randrange(1, len(value))
        digit = self.rng.choice([d for d in "0123456789" if d != value[at]])
        return "-".join(parts), value[:at] + digit + value[at + 1 :]

    def make(self, kind: Kind) -> Needle:
        key = "-".join(self.rng.sample(self.words, self.rng.choice((2, 2, 2, 3))))
        if kind == "long":
            noun, value = "uuids", str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
        else:
            noun, value = "numbers", str(self.rng.randint(1_000_000, 9_999_999))
        what = f"special magic {noun[:-1]} for {key} mentioned in the provided text"
        ask, answer = self.ids(f"\nWhat is the {what}? The {what} is"), self.ids(f" {value}.")
        fact = self.fact(noun, key, value)
        begin = beginning_ids(self.tokenizer)
        body = self.context - len(begin) - len(ask) - len(answer)
        start = self.rng.randrange(max(1, len(self.haystack) - body))
        row = self.haystack[start : start + body]
        far = min(MIN_DISTANCE, self.context // 2)
        latest = min(self.context - far - len(answer) - len(begin), body) - len(fact)
        require(
            len(row) == body and latest > 0,
            f"context {self.context} or the text ({len(self.haystack)} tokens) is too short "
            "for needles",
            UsageError,
        )
        at = self.rng.randrange(latest)
        row[at : at + len(fact)] = fact
        taken = [range(at, at + len(fact))]
        for _ in range(DISTRACTORS if kind == "near" else 0):
            _plant(self.rng, row, taken, self.fact(noun, *self.look_alike(key, value)))
        ids = torch.tensor(begin + row + ask + answer)
        return Needle(kind, ids, len(answer), body - at - len(fact) + len(ask))


def _plant(rng: random.Random, row: list[int], taken: list[range], ids: list[int]) -> None:
    """Overwrites a random free place of `row`; the places left are few only in tiny contexts."""
    free = [
        at
        for at in range(len(row) - len(ids))
        if all(at + len(ids) <= t.start or at >= t.stop for t in taken)
    ]
    require(bool(free), f"{len(row)} tokens are too few to plant every distractor", UsageError)
    at = rng.choice(free)
    row[at : at + len(ids)] = ids
    taken.append(range(at, at + len(ids)))


def make_needles(
    tokenizer: Any,
    text: str,
    *,
    context: int,
    count: int,
    kinds: Sequence[Kind] = KINDS,
    seed: int = 0,
) -> list[Needle]:
    """`count` inputs of each kind, `context` tokens long; the same for the same seed."""
    unknown = sorted(set(kinds) - set(KINDS))
    require(not unknown, f"unknown kinds of needle {unknown}: use {KINDS}", UsageError)
    haystack = text_ids(tokenizer, text)
    maker = _Maker(tokenizer, key_words(text), haystack, context, random.Random(seed))
    return [maker.make(kind) for kind in kinds for _ in range(count)]


def are_recalled(base: nn.Module, variant: Variant, needles: Sequence[Needle]) -> list[bool]:
    """Whether greedy decoding through the variant's cache writes each whole answer.

    All inputs are of one length and run in one batch.
    """
    last = max(needle.answer_length for needle in needles) + 1
    ids_BT = torch.stack([needle.ids_T for needle in needles])
    said_BT = logits(base, variant, ids_BT, last=last)[:, :-1].argmax(-1).cpu()
    return [
        bool((said[-n.answer_length :] == n.ids_T[-n.answer_length :]).all())
        for said, n in zip(said_BT, needles, strict=True)
    ]


def measure_recall(
    base: nn.Module,
    variants: Sequence[Variant],
    needles: Sequence[Needle],
    progress: Progress | None = None,
) -> list[dict[str, float]]:
    """Share of recalled needles of each kind, per variant."""
    right: list[dict[str, list[bool]]] = [{} for _ in variants]
    size = GPU_BATCH if next(base.parameters()).is_cuda else 1
    for start in range(0, len(needles), size):
        batch = needles[start : start + size]
        for variant, kept in zip(variants, right, strict=True):
            for needle, found in zip(batch, are_recalled(base, variant, batch), strict=True):
                kept.setdefault(needle.kind, []).append(found)
        if progress is not None:
            progress("recall", start + len(batch), len(needles))
    return [{kind: sum(x) / len(x) for kind, x in kept.items()} for kept in right]
