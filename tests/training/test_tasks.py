"""Planted tasks can be solved from the row alone, and only answers weigh more."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
from tasks import ANSWER_WEIGHT, TaskMaker, corpus_words, place
from tokenizers import Tokenizer

ASSETS = Path(__file__).parents[2] / "src" / "quantmla" / "assets"
FILLER = 1  # <|pad|>, which no encoded text holds
LENGTH = 2048
FACT = re.compile(r"One of the special magic (\w+)s for (\S+) is: (.*?)\.")
QUESTION = re.compile(
    r"\nWhat is the special magic (\w+) for (\S+)(| mentioned in the provided text)\?"
    r" The special magic \1 for \2\3 is (.*?)\."
)


@pytest.fixture(scope="module")
def maker() -> TaskMaker:
    text = (ASSETS / "text" / "heldout.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(ASSETS / "nano" / "tokenizer.json"))
    return TaskMaker(tokenizer, corpus_words(text))


def planted(maker: TaskMaker, task: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    row, weight = np.full(LENGTH, FILLER, dtype=np.int64), np.ones(LENGTH, dtype=np.float32)
    getattr(maker, task)(random.Random(seed), row, weight, LENGTH)
    return row, weight


def runs(mask: np.ndarray) -> list[slice]:
    """Where a mask is true, run by run."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [slice(a, b) for a, b in edges.reshape(-1, 2)]


def test_places_never_overlap_and_full_rows_take_no_more():
    rng = random.Random(0)
    for _ in range(50):
        row, busy = np.zeros(100, dtype=np.int64), np.zeros(100, dtype=bool)
        low, high = rng.randrange(40), rng.randrange(50, 101)
        taken = 0
        for number in range(1, 40):
            size = rng.randint(1, 12)
            before = row.copy()
            at = place(rng, row, busy, np.full(size, number), low, high)
            if at is None:
                np.testing.assert_array_equal(row, before)
                continue
            assert low <= at
            assert at + size <= high
            assert not before[at : at + size].any()
            taken += size
        assert busy.sum() == np.count_nonzero(row) == taken > 0
    assert place(rng, row, np.ones(100, dtype=bool), np.array([5]), 0, 100) is None
    assert place(rng, row, busy, np.zeros(101, dtype=np.int64), 0, 100) is None


def test_needles_are_asked_for_after_their_fact_and_answered_right(maker):
    asked = distractors = 0
    for seed in range(40):
        row, weight = planted(maker, "needles", seed)
        text = maker.tokenizer.decode(row.tolist(), skip_special_tokens=True)
        facts = {(m[1], m[2]): (m[3], m.start()) for m in FACT.finditer(text)}
        questions = list(QUESTION.finditer(text))
        for question in questions:
            value, at = facts[question[1], question[2]]
            assert question[4] == value
            assert at < question.start()
        answers = [maker.tokenizer.decode(row[s].tolist()) for s in runs(weight == ANSWER_WEIGHT)]
        assert sorted(answers) == sorted(f" {q[4]}." for q in questions)
        assert set(np.unique(weight)) <= {1.0, ANSWER_WEIGHT}
        asked += len(questions)
        distractors += len(facts) - len(questions)
    assert asked > 40
    assert distractors > 10


def test_a_look_alike_differs_from_its_needle_in_one_word(maker):
    rng = random.Random(3)
    for _ in range(100):
        key, (value, _) = maker._key(rng), maker._value(rng)
        other_key, other = maker._near(rng, key, value)
        pairs = zip(key.split("-"), other_key.split("-"), strict=True)
        assert sum(a != b for a, b in pairs) <= 1
        if value.isdigit():
            assert sum(a != b for a, b in zip(value, other, strict=True)) <= 1
            assert other[0] != "0"


def test_tables_are_looked_up_right(maker):
    looked_up = 0
    for seed in range(20):
        row, weight = planted(maker, "table", seed)
        text = maker.tokenizer.decode(row.tolist(), skip_special_tokens=True)
        lines = dict(re.findall(r"\n(\S+): (\S+)(?=\n)", text))
        found = re.findall(r"\nThe value of (\S+) is: (\S+)\n", text)
        assert all(lines[key] == value for key, value in found)
        assert (weight == ANSWER_WEIGHT).any() == bool(found)
        looked_up += len(found)
    assert looked_up > 20


def test_copied_spans_occur_twice_and_their_beginnings_do_not_count(maker):
    copies = 0
    for seed in range(20):
        row, weight = planted(maker, "copies", seed)
        assert set(np.unique(weight)) <= {0.0, 1.0}
        for start in np.flatnonzero(weight == 0)[::2]:
            assert weight[start + 1] == 0
            span = row[start : start + 12]  # the shortest span
            earlier = np.lib.stride_tricks.sliding_window_view(row[:start], 12)
            assert (earlier == span).all(-1).any()
            copies += 1
    assert copies > 40


def test_rows_depend_on_the_seed_and_stay_as_they_are_without_tasks(maker):
    text = np.arange(LENGTH, dtype=np.int16) % 4000
    plain, weight = maker.row(random.Random(0), text, planted=0.0)
    np.testing.assert_array_equal(plain, text)
    assert (weight == 1).all()
    for seed in range(5):
        row, weight = maker.row(random.Random(seed), text, planted=1.0)
        again, _ = maker.row(random.Random(seed), text, planted=1.0)
        np.testing.assert_array_equal(row, again)
        assert (row != text).any()
        assert row.shape == weight.shape == text.shape
    np.testing.assert_array_equal(text, np.arange(LENGTH) % 4000)


def test_words_of_the_corpus_by_frequency():
    text = "tree tree tree stone stone Word it's abc abcdefghijk moon"
    assert corpus_words(text) == ["tree", "stone", "moon"]
    assert corpus_words(text, 1) == ["tree"]
