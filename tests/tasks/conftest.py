"""Data files that the tests make themselves, and the packaged model with its tokenizer."""

import bz2
import csv
import gzip
import io
import json
import zipfile
from pathlib import Path

import pytest
import torch

from quantmla.capture.tokens import load_tokenizer
from quantmla.checkpoint.source import open_source
from quantmla.verify import load_model


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(open_source("nano").path)


@pytest.fixture(scope="session")
def nano():
    return load_model(open_source("nano").path, torch.float32)


def jsonl(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def sums(count: int) -> list[dict]:
    return [
        {"question": f"What is {i} plus 2?", "answer": f"{i} + 2 = {i + 2}\n#### {i + 2}"}
        for i in range(count)
    ]


def mmlu_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for subject in ("anatomy", "virology"):
            for split, count in (("dev", 5), ("test", 3)):
                table = io.StringIO()
                for i in range(count):
                    letter = "ABCD"[i % 4]
                    row = [f"{subject} {split} {i}, which?", "bone", "skin", "hair", "nail", letter]
                    csv.writer(table).writerow(row)
                archive.writestr(f"data/{split}/{subject}_{split}.csv", table.getvalue())


HELLASWAG = "Roof: A man sits on a roof. he\n3\nsings.\nruns.\nflies.\nworks on.\n"
HUMANEVAL = {
    "task_id": "x/0",
    "prompt": "def add(a, b):\n",
    "entry_point": "add",
    "test": "def check(f):\n    assert f(1, 2) == 3\n",
}
LIVECODE = {
    "question_content": "Print twice the number.",
    "starter_code": "",
    "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
    "private_test_cases": "[]",
    "metadata": "{}",
}
GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """One small file for every task; not to be modified."""
    folder = tmp_path_factory.mktemp("data")
    texts = {
        "llmfoundry_piqa.jsonl": jsonl(
            {"query": "Question: dry hands\n", "choices": ["a towel", "a stone"], "gold": 0},
            {"query": "Question: cut bread\n", "choices": ["a spoon", "a knife"], "gold": 1},
        ),
        "llmfoundry_arc_easy.jsonl": jsonl(
            {"query": "Question: What shines?", "choices": ["mud", "the sun", "rock"], "gold": 1}
        ),
        "arc_challenge.jsonl": jsonl(
            {
                "question": "What is wet?",
                "choices": {"text": ["sand", "rain"], "label": ["A", "B"]},
                "answerKey": "B",
            }
        ),
        "llmfoundry_winogrande.jsonl": jsonl(
            {
                "context_options": ["Sam paid Tom so Sam", "Sam paid Tom so Tom"],
                "continuation": "was poorer.",
                "gold": 0,
            }
        ),
        "gsm8k_test.jsonl": jsonl(*sums(8)),
        "math500.jsonl": jsonl(
            {"problem": "What is 1+1?", "solution": "It is $\\boxed{2}$.", "answer": "2"}
        ),
        "aime25.jsonl": jsonl({"problem": "What is 2+2?", "answer": "4"}),
        "livecodebench.jsonl": jsonl(LIVECODE),
        **{
            f"{name}.jsonl": jsonl({"text": f"{name}: colour red. colour:", "value": "red"})
            for name in ("fda", "swde", "squad")
        },
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "hellaswag_val_full.txt.bz2").write_bytes(bz2.compress(HELLASWAG.encode()))
    (folder / "HumanEval.jsonl.gz").write_bytes(gzip.compress(jsonl(HUMANEVAL).encode()))
    with open(folder / "gpqa_diamond.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*GPQA, "Incorrect Answer 3"])
        table.writerow(["What is hot?", "fire", "ice", "snow", "hail"])
    mmlu_archive(folder / "mmlu.zip")
    return folder
