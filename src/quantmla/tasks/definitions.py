"""Tasks that lm-eval has not, or cannot score without a network: configurations of our own."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantmla.tasks.code_runner import passes_check, passes_tests
from quantmla.tasks.local_data import livecodebench_row
from quantmla.tasks.needles import recalled
from quantmla.tasks.registry import TaskSpec

FUNCTION_ENDS = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
FENCE = "```"
Doc = Mapping[str, Any]


def _config(spec: TaskSpec, until: list[str], **more: Any) -> dict[str, Any]:
    return {
        "task": spec.name,
        "output_type": "generate_until",
        "test_split": "test",
        "num_fewshot": 0,
        "generation_kwargs": {"until": until, "do_sample": False},
        "metric_list": [{"metric": spec.metric, "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    } | more


def humaneval(spec: TaskSpec) -> dict[str, Any]:
    """Function bodies, completed; the first completion passes the problem's own check or not."""

    def process_results(doc: Doc, results: Sequence[str]) -> dict[str, float]:
        program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
        return {spec.metric: float(passes_check(program))}

    return _config(
        spec,
        FUNCTION_ENDS,
        dataset_path="openai/openai_humaneval",
        doc_to_text="{{prompt}}",
        doc_to_target="{{entry_point}}",
        process_results=process_results,
    )


def livecodebench_prompt(doc: Doc) -> str:
    """The problem, how an answer is to look, and the code that it must begin with, if any."""
    given = doc["starter_code"]
    how = (
        f"Complete this code:\n{FENCE}python\n{given}\n{FENCE}\n"
        if given
        else "Write a Python program that reads from standard input and prints the answer.\n"
    )
    return (
        f"Solve this programming problem.\n\n{doc['question_content']}\n\n{how}"
        f"Give the whole program in one block that begins with {FENCE}python.\n\nAnswer:\n"
    )


def code_block(text: str) -> str:
    """The last fenced block of an answer; all of it where there is no fence."""
    parts = text.split(FENCE)
    if len(parts) < 2:
        return text
    block = parts[-2] if len(parts) % 2 else parts[-1]  # the last may have been cut off
    first, newline, rest = block.partition("\n")
    return rest if newline and first.strip() in ("", "python", "py", "python3") else block


def _readable(docs: Any) -> Any:
    """The hub's rows as ours; rows of a file already are."""
    if "tests" in docs.column_names:
        return docs
    return docs.map(livecodebench_row, remove_columns=docs.column_names)


def livecodebench(spec: TaskSpec) -> dict[str, Any]:
    """Whole programs and methods of a class; every test must pass."""

    def process_results(doc: Doc, results: Sequence[str]) -> dict[str, float]:
        passed = passes_tests(code_block(results[0]), doc["tests"], doc["func_name"])
        return {spec.metric: float(passed)}

    files = "hf://datasets/livecodebench/code_generation_lite/test*.jsonl"
    return _config(
        spec,
        [],
        dataset_path="json",
        dataset_kwargs={"data_files": {"test": files}},
        process_docs=_readable,
        doc_to_text=livecodebench_prompt,
        doc_to_target="{{func_name}}",
        process_results=process_results,
    )


def needles(spec: TaskSpec) -> dict[str, Any]:
    """One generated fact, asked for."""

    def process_results(doc: Doc, results: Sequence[str]) -> dict[str, float]:
        return {spec.metric: recalled(doc["value"], results[0])}

    return _config(
        spec,
        [],
        doc_to_text="{{input}}",
        doc_to_target="{{value}}",
        process_results=process_results,
    )


def definition(spec: TaskSpec) -> dict[str, Any]:
    """The configuration of a task that is defined here."""
    own = {"humaneval": humaneval, "livecodebench": livecodebench}
    return own.get(spec.name, needles)(spec)
