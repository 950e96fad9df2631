"""Files in public formats become the hub's rows; damaged ones get a sentence."""

import base64
import json
import os
import pickle
import zlib

import pytest

from quantmla.errors import QuantMLAError
from quantmla.tasks.local_data import (
    arc_row,
    gpqa_csv,
    gsm8k,
    hellaswag_text,
    json_rows,
    livecodebench_row,
    mmlu_zip,
    piqa_row,
    winogrande_row,
)


def test_two_beginnings_become_a_sentence_with_a_gap():
    row = {
        "context_options": ["The cup fit the box as the box", "The cup fit the box as the cup"],
        "continuation": "was big.",
        "gold": 1,
    }
    assert winogrande_row(row) == {
        "sentence": "The cup fit the box as the _ was big.",
        "option1": "box",
        "option2": "cup",
        "answer": "2",
    }


def test_options_that_share_letters_are_cut_at_a_word():
    row = {"context_options": ["so Ann", "so Anna"], "continuation": "left.", "gold": 0}
    assert winogrande_row(row)["option1"] == "Ann"
    assert winogrande_row(row)["option2"] == "Anna"


def test_questions_lose_the_word_that_the_template_adds():
    piqa = piqa_row({"query": "Question: to dry\n", "choices": ["a", "b"], "gold": 1})
    assert piqa == {"goal": "to dry", "sol1": "a", "sol2": "b", "label": 1}
    arc = arc_row({"query": "Question: what?", "choices": ["x", "y", "z"], "gold": 2})
    assert arc["question"] == "what?"
    assert arc["choices"]["label"].index(arc["answerKey"]) == 2


def test_hellaswag_and_mmlu_and_gpqa(data):
    (row,) = hellaswag_text([data / "hellaswag_val_full.txt.bz2"])["hellaswag"]["validation"]
    assert (row["activity_label"], row["ctx_a"]) == ("Roof", "A man sits on a roof. he")
    assert row["endings"][int(row["label"])] == "works on."
    found = mmlu_zip([data / "mmlu.zip"])
    assert list(found) == ["mmlu_anatomy", "mmlu_virology"]
    assert {name: len(rows) for name, rows in found["mmlu_virology"].items()} == {
        "test": 3,
        "dev": 5,
    }
    assert found["mmlu_anatomy"]["test"][2]["answer"] == 2
    (gpqa,) = gpqa_csv([data / "gpqa_diamond.csv"])["gpqa_diamond_zeroshot"]["train"]
    assert gpqa["Correct Answer"] == "fire"


def test_training_items_are_for_shots(data, tmp_path):
    assert set(gsm8k([data / "gsm8k_test.jsonl"])["gsm8k"]) == {"test"}
    both = [data / "gsm8k_test.jsonl"] * 2
    assert set(gsm8k(both)["gsm8k"]) == {"test", "train"}


PROBLEM = {"question_content": "q", "public_test_cases": "[]", "metadata": '{"func_name": "f"}'}


def pack(content: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


def test_packed_tests_are_unpacked():
    tests = [{"input": "1", "output": "2", "testtype": "functional"}]
    row = livecodebench_row(PROBLEM | {"private_test_cases": pack(json.dumps(tests))})
    assert json.loads(row["tests"]) == tests
    assert row["func_name"] == "f"


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_a_pickle_that_would_run_something_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QuantMLAError, match=r"names posix\.mkdir"):
        livecodebench_row(PROBLEM | {"private_test_cases": pack(Harm())})
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no rows"),
        ("{not json", "line 1 .* cannot be read as JSON"),
        ('{"a": 1}\n{"b": 1}\n', "line 2 .* lacks one of the keys a"),
        ("[1]\n", "lacks one of the keys"),
        ("[" * 100_000, "line 1 .* too many levels"),
        ('{"a": "\\ud800"}', "line 1 .* surrogates not allowed"),
    ],
)
def test_damaged_rows(tmp_path, text, words):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(QuantMLAError, match=words):
        json_rows(path, ["a"])


def test_damaged_archives(tmp_path):
    for name, reader, words in (
        ("m.zip", mmlu_zip, "not the MMLU archive"),
        ("h.txt", hellaswag_text, "six lines"),
        ("h.txt.bz2", hellaswag_text, "cannot read"),
        ("g.csv", gpqa_csv, "columns Question"),
    ):
        (tmp_path / name).write_text("no\nsuch\n")
        with pytest.raises(QuantMLAError, match=words):
            reader([tmp_path / name])
        (tmp_path / name).write_bytes(b"\xff\n" * 6)
        with pytest.raises(QuantMLAError, match=r"cannot read|is not the MMLU archive"):
            reader([tmp_path / name])


def test_lines_end_with_line_feeds_alone(tmp_path):
    (tmp_path / "h.txt").write_text("a: b\u2028c\n3\n1\n2\n\u00853\n4\n")
    (row,) = hellaswag_text([tmp_path / "h.txt"])["hellaswag"]["validation"]
    assert (row["ctx_a"], row["endings"]) == ("b\u2028c", ["1", "2", "\u00853", "4"])
