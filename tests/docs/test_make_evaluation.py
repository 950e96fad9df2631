from make_evaluation import PAGE, render, scores, tasks, vllm

from quantmla.tasks.registry import SPECS


def test_the_page_is_as_generated():
    assert PAGE.read_text(encoding="utf-8") == render()


def test_every_task_has_a_line():
    lines = tasks().splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == [spec.name for spec in SPECS]


def test_scores_stand_beside_their_baseline():
    result = {"task": "piqa", "stderr": 0.05}
    text = scores(
        {
            "header": {
                "versions": {"torch": "1", "transformers": "2", "lm_eval": "3"},
                "gpus": [],
                "processor": "x86_64",
            },
            "variants": [
                {"name": "bf16", "format": "bf16"},
                {"name": "quantmla", "format": "c4r4"},
            ],
            "tasks": [{"name": "piqa", "items": 64, "max_new_tokens": None}],
            "results": [
                result | {"variant": "bf16", "score": 0.5},
                result | {"variant": "quantmla", "score": 0.25, "stderr": None},
            ],
            "comparisons": [
                {"task": "piqa", "a": "bf16", "b": "quantmla", "only_a": 3, "only_b": 1, "p": 0.625}
            ],
        }
    )
    assert "| task | items | bf16 | quantmla C4R4 | right alone | p |" in text
    assert "| piqa | 64 | 50.0% ± 5.0% | 25.0% | 3 / 1 | 0.62 |" in text
    assert "a CPU (x86_64), torch 1, transformers 2, lm_eval 3." in text


def test_engines_stand_side_by_side_once_they_were_run():
    assert "no engine was run on a GPU" in vllm(None)
    row = {"task": "gsm8k", "items": 8, "score": 0.5, "stderr": 0.1, "max_new_tokens": 32}
    same = {"same_score": 7, "same_answer": 6}
    variants = [{"variant": "bf16", "format": "bf16"}, {"variant": "quantmla", "format": "c4r4"}]
    rows = [row | v | {"engine": "transformers"} for v in variants]
    rows += [row | v | {"engine": "vllm", "score": 0.25} | same for v in variants]
    versions = {"vllm": "0", "transformers": "1", "torch": "2", "lm_eval": "3"}
    text = vllm({"rows": rows, "environment": {"gpu": "NVIDIA X", "packages": versions}})
    assert "no engine" not in text
    pair = "50.0% ± 10.0% | 25.0% ± 10.0% | 7 / 6"
    assert f"| gsm8k | 8 | {pair} | {pair} |" in text
    assert "quantmla C4R4, vLLM" in text
    assert "At most 32 new tokens; on one NVIDIA X, vllm 0, transformers 1, torch 2" in text
