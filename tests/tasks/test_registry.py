"""Names, groups and lengths of tasks."""

import pytest

from quantmla.errors import UsageError
from quantmla.tasks.registry import BY_NAME, GROUPS, asked_tasks


def labels(*names: str) -> list[str]:
    return [task.label for task in asked_tasks(names, 4096)]


def test_the_published_columns_with_their_shots_and_metrics():
    assert len(labels("paper-general")) == 10
    assert len(labels("paper-reasoning")) == 7
    shots = {name: spec.shots for name, spec in BY_NAME.items() if spec.shots}
    assert shots == {"mmlu": 5, "gsm8k": 5, "math500": 4}
    metrics = {name: BY_NAME[name].metric for name in GROUPS["paper-general"]}
    assert metrics == {
        **dict.fromkeys(("hellaswag", "piqa", "arc_easy", "arc_challenge"), "acc_norm"),
        **dict.fromkeys(("winogrande", "mmlu"), "acc"),
        "gsm8k": "exact_match",
        **dict.fromkeys(("fda", "swde", "squad"), "contains"),
    }
    assert {s.name for s in BY_NAME.values() if s.runs_code} == {"humaneval", "livecodebench"}


def test_each_task_once_and_in_order():
    assert labels("gsm8k", "paper-general", "gsm8k")[:2] == ["gsm8k", "hellaswag"]
    assert len(labels("paper-general", "paper-reasoning")) == 15


def test_needles_take_a_length():
    assert labels("niah") == [f"niah_single_{i}@4096" for i in (1, 2, 3)]
    assert labels("niah@512", "niah_single_2@1024", "niah_single_1@512") == [
        *(f"niah_single_{i}@512" for i in (1, 2, 3)),
        "niah_single_2@1024",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hellaswg", "unknown task 'hellaswg': choose from paper-general"),
        ("piqa@512", "only needle tests take a length"),
        ("niah@", "only needle tests take a length"),
        ("niah@0x10", "only needle tests take a length"),
        ("nope@512", "unknown task 'nope@512'"),
    ],
)
def test_what_there_is_not(name, words):
    with pytest.raises(UsageError, match=words):
        asked_tasks((name,), 4096)
