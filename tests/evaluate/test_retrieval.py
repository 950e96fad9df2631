import re

import pytest
import torch

from quantmla.errors import UsageError
from quantmla.evaluate.retrieval import (
    DISTRACTORS,
    are_recalled,
    key_words,
    make_needles,
    measure_recall,
)
from quantmla.evaluate.variant import Variant
from quantmla.quant.format import parse_format

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [a + b + "stone" for a in LETTERS for b in "aeiou"]
TEXT = " ".join(WORDS * 60)
FACT = re.compile(r" One of the special magic (\w+) for ([\w-]+) is: ([\w-]+)\.")
QUESTION = re.compile(
    r"\nWhat is the special magic (\w+) for ([\w-]+) mentioned in the provided text\?"
    r" The special magic (\w+) for ([\w-]+) mentioned in the provided text is ([\w-]+)\.$"
)


class ExactTokenizer:
    """One token per character, and back."""

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: torch.Tensor) -> str:
        return "".join(chr(int(i)) for i in ids)


@pytest.fixture
def exact():
    return ExactTokenizer()


@pytest.mark.parametrize("context", [2500, 4096])
@pytest.mark.parametrize("kind", ["single", "near", "long"])
def test_needles_are_whole_far_back_and_asked_for(exact, kind, context):
    for needle in make_needles(exact, TEXT, context=context, count=3, kinds=[kind]):
        assert len(needle.ids_T) == context
        text = exact.decode(needle.ids_T)
        noun, key, noun_again, key_again, value = QUESTION.search(text).groups()
        assert (noun, key) == (noun_again, key_again)
        facts = FACT.findall(text)
        right = [f for f in facts if f[1] == key]
        assert right == [(noun + "s", key, value)]
        assert exact.decode(needle.ids_T[-needle.answer_length :]) == f" {value}."
        end = text.index(f"for {key} is: {value}.") + len(f"for {key} is: {value}.")
        assert needle.distance == context - needle.answer_length - end
        assert needle.distance >= 1024
        assert len(facts) == (1 + DISTRACTORS if kind == "near" else 1)
        assert (noun == "uuid") == (kind == "long")


def test_look_alikes_differ_by_one_word_and_one_digit(exact):
    (needle,) = make_needles(exact, TEXT, context=4096, count=1, kinds=["near"])
    text = exact.decode(needle.ids_T)
    _, key, *_, value = QUESTION.search(text).groups()
    others = [f for f in FACT.findall(text) if f[1] != key]
    assert len(others) == DISTRACTORS
    for _, other_key, other in others:
        assert sum(a != b for a, b in zip(key.split("-"), other_key.split("-"), strict=True)) == 1
        assert sum(a != b for a, b in zip(value, other, strict=True)) == 1


def test_seeds_decide_everything(exact):
    def ids(seed):
        return torch.stack(
            [n.ids_T for n in make_needles(exact, TEXT, context=2100, count=2, seed=seed)]
        )

    assert torch.equal(ids(1), ids(1))
    assert not torch.equal(ids(1), ids(2))


def test_what_does_not_fit_is_refused(exact):
    with pytest.raises(UsageError, match="too short for needles"):
        make_needles(exact, TEXT, context=200, count=1)
    with pytest.raises(UsageError, match="too few to plant"):
        make_needles(exact, TEXT, context=300, count=1, kinds=["near"])
    with pytest.raises(UsageError, match="too short for needles"):
        make_needles(exact, TEXT[:1200], context=4096, count=1)
    with pytest.raises(UsageError, match="unknown kinds"):
        make_needles(exact, TEXT, context=2100, count=1, kinds=["multi"])
    with pytest.raises(UsageError, match="usable words"):
        key_words("Too few here")


class Oracle(torch.nn.Module):
    """Predicts the next token of `ids` with certainty, except at the positions in `wrong`."""

    def __init__(self, ids: torch.Tensor, wrong: set[int]):
        super().__init__()
        self.ids, self.wrong = ids, wrong
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, use_cache, logits_to_keep):
        rows = torch.zeros(1, len(self.ids), 128)
        for t in range(len(self.ids) - 1):
            rows[0, t, int(self.ids[t + 1]) if t + 1 not in self.wrong else 0] = 1
        return type("Out", (), {"logits": rows[:, -logits_to_keep:]})


def test_only_a_whole_answer_counts(exact):
    (needle,) = make_needles(exact, TEXT, context=600, count=1, kinds=["single"])
    plain, length = Variant(name="plain"), len(needle.ids_T)
    first = length - needle.answer_length
    assert are_recalled(Oracle(needle.ids_T, {first - 1}), plain, [needle])[0]
    for position in range(first, length):
        assert not are_recalled(Oracle(needle.ids_T, {position}), plain, [needle])[0]


def test_recall_agrees_with_greedy_generation_through_the_cache(model):
    """A random model recalls nothing by itself, so the answer is what it generates."""
    from quantmla.evaluate.retrieval import Needle
    from quantmla.serve.transformers import QuantMLACache

    model = model.double()
    fmt = parse_format("c4r4", group_size=16, page_size=16, recent_window=16)
    ids = torch.randint(2, 64, (1, 50), generator=torch.Generator().manual_seed(0))
    cache, written = QuantMLACache(model.config, fmt), ids
    with torch.inference_mode():
        for t in range(50 + 5):
            out = model(
                input_ids=written[:, t : t + 1], past_key_values=cache, use_cache=True
            ).logits
            if t >= 49 and t < 54:
                written = torch.cat((written, out[:, -1:].argmax(-1)), dim=1)
    found = Needle("single", written[0], 5, 0)
    wrong = Needle("single", torch.cat((written[0, :-1], (written[0, -1:] + 1) % 64)), 5, 0)
    through = Variant(name="c4r4", fmt=fmt)
    assert measure_recall(model, [through], [found, wrong]) == [{"single": 0.5}]
    assert are_recalled(model, through, [found])[0]
