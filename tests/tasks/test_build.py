"""lm-eval's own definitions over files: what a model is asked, and where data are missing."""

import random

import pytest

from quantmla.errors import QuantMLAError, UsageError
from quantmla.tasks.build import build_task, find_source
from quantmla.tasks.definitions import code_block
from quantmla.tasks.registry import BY_NAME, Asked


@pytest.fixture
def built(data, tokenizer):
    return lambda name: build_task(Asked(BY_NAME[name]), data, tokenizer, None)


def asked(built, index: int = 0) -> tuple[str, list[str]]:
    """The prompt of one document and what may follow it."""
    task = next(iter(built.parts.values()))
    task.set_fewshot_seed(seed=1234)
    task.build_all_requests(samples={index})
    arguments = [instance.arguments for instance in task.instances]
    return arguments[0][0], [str(second) for _, second in arguments]


def test_choices(built):
    assert asked(built("hellaswag")) == (
        "Roof: A man sits on a roof. he",
        [" sings.", " runs.", " flies.", " works on."],
    )
    assert asked(built("piqa"))[0] == "Question: dry hands\nAnswer:"
    assert asked(built("arc_easy")) == (
        "Question: What shines?\nAnswer:",
        [" mud", " the sun", " rock"],
    )
    assert asked(built("arc_challenge"))[1] == [" sand", " rain"]


def test_winogrande_scores_one_ending_after_two_beginnings(built):
    task = built("winogrande").parts["winogrande"]
    task.build_all_requests()
    assert [instance.arguments for instance in task.instances] == [
        ("Sam paid Tom so Sam", " was poorer."),
        ("Sam paid Tom so Tom", " was poorer."),
    ]


def test_mmlu_is_its_subjects_with_five_shots(built):
    found = built("mmlu")
    assert found.sizes == {"mmlu_anatomy": 3, "mmlu_virology": 3}
    assert found.shots_from == "dev"
    prompt, choices = asked(found)
    assert prompt.startswith("The following are multiple choice questions (with answers) about an")
    assert [prompt.count(f"anatomy dev {i}, which?") for i in range(5)] == [1] * 5
    assert prompt.endswith("D. nail\nAnswer:")
    assert choices == [" A", " B", " C", " D"]


def test_shots_of_gsm8k_are_other_items_where_there_is_no_training_file(built):
    found = built("gsm8k")
    assert found.shots_from == "test, other items"
    prompt, _ = asked(found, 3)
    assert prompt.count("#### ") == 5
    assert prompt.count("What is 3 plus 2?") == 1
    assert prompt.endswith("Question: What is 3 plus 2?\nAnswer:")


def test_math_has_four_shots_of_its_own(built):
    prompt, _ = asked(built("math500"))
    assert prompt.count("Problem:") == 5
    assert prompt.endswith("Problem:\nWhat is 1+1?\n\nSolution:")


def test_the_order_of_gpqa_answers_is_always_the_same(built):
    random.seed(1)
    first = asked(built("gpqa_diamond"))[0]
    state = random.getstate()
    assert asked(built("gpqa_diamond"))[0] == first
    assert random.getstate() == state
    assert all(word in first for word in ("fire", "ice", "snow", "hail"))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("fda", " a RED one", " blue"),
        ("swde", " red", ""),
        ("squad", "Red.", "rd"),
        ("math500", " so $2$.\nFinal Answer: The final answer is $2$.", " it is $3$."),
        ("aime25", " $4$", " 5"),
        ("humaneval", "    return a + b\n", "    return a - b\n"),
        ("livecodebench", "```python\nprint(2 * int(input()))\n```", "print(3)"),
    ],
)
def test_answers_are_scored(built, name, right, wrong):
    found = built(name)
    (task,) = found.parts.values()
    (doc,) = task.eval_docs
    metric = found.asked.spec.metric
    given = (lambda text: [[text]]) if task.config.filter_list else (lambda text: [text])
    assert task.process_results(doc, given(right))[metric] == 1
    assert task.process_results(doc, given(wrong))[metric] == 0


def test_where_data_are_missing(tmp_path, tokenizer):
    with pytest.raises(UsageError, match=r"no data for task fda .* it needs fda\.jsonl;"):
        find_source(BY_NAME["fda"], tmp_path)
    with pytest.raises(UsageError, match=r"hellaswag\.jsonl or hellaswag_val_full\.txt\.bz2"):
        build_task(Asked(BY_NAME["hellaswag"]), tmp_path, tokenizer, None)


def test_a_hub_that_does_not_answer(tokenizer, monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    for name in ("piqa", "humaneval", "mmlu"):
        with pytest.raises(QuantMLAError, match=rf"data of task {name} cannot be had .*--data"):
            build_task(Asked(BY_NAME[name]), None, tokenizer, None)


def test_rows_of_the_hub(tokenizer, monkeypatch):
    import datasets

    livecode = {
        "question_content": "q",
        "starter_code": "",
        "public_test_cases": '[{"input": "1", "output": "2", "testtype": "stdin"}]',
        "private_test_cases": "[]",
        "metadata": "{}",
    }
    sums = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(7)]
    hub = {
        "json": {"test": [livecode]},
        "openai/gsm8k": {"train": sums, "test": sums[:2]},
    }

    def load_dataset(path, **_):
        rows = hub[path].items()
        return datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in rows})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = build_task(Asked(BY_NAME["livecodebench"]), None, tokenizer, None)
    assert asked(found)[0].startswith("Solve this programming problem.\n\nq\n")
    assert '"output": "2"' in found.parts["livecodebench"].eval_docs[0]["tests"]
    found = build_task(Asked(BY_NAME["gsm8k"]), None, tokenizer, None)
    assert asked(found)[0].count("#### ") == 5
    assert found.origin.name == "hub: openai/gsm8k"
    assert found.shots_from == "hub"


def test_code_is_taken_from_the_last_fence():
    assert code_block("x = 1") == "x = 1"
    assert code_block("so:\n```python\nx = 1\n```\nand\n```\ny = 2\n```\nthat is it") == "y = 2\n"
    assert code_block("```python\nx = 1\n") == "x = 1\n"
