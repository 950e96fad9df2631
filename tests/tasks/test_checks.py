"""What is refused, with a sentence."""

import pytest

from quantmla.errors import UsageError
from quantmla.recipe import EvaluationRequest, TaskRequest
from quantmla.tasks.checks import check_engine
from quantmla.tasks.registry import asked_tasks


def test_vllm_scores_no_given_texts():
    def check(*tasks, fused=True, **given):
        evaluation = EvaluationRequest(model="out", **given)
        request = TaskRequest(evaluation=evaluation, tasks=tasks, output="run", engine="vllm")
        check_engine(asked_tasks(tasks, 4096), request, fused=fused)

    check("gsm8k", "niah")
    with pytest.raises(UsageError, match="says nothing about piqa, mmlu"):
        check("gsm8k", "piqa", "mmlu")
    with pytest.raises(UsageError, match="evaluates what quantize wrote"):
        check("gsm8k", fused=False)
    with pytest.raises(UsageError, match="and no --methods"):
        check("gsm8k", methods=("rtn",))
    with pytest.raises(UsageError, match="serves the folder's own format"):
        check("gsm8k", sinks=0)
