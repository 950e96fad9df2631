"""Which tasks there are: lm-eval's definition, shots, metric, and files that can hold the data.

Shots and metrics are those of the published tables; where the publication says nothing, lm-eval's.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from quantmla.errors import UsageError, require
from quantmla.tasks import local_data as local
from quantmla.tasks.local_data import Reader
from quantmla.tasks.needles import NEEDLE_TOKENS

Kind = Literal["likelihood", "generation"]


class Source(NamedTuple):
    """Files of one task's data in a folder: the first must be there, others may."""

    files: tuple[str, ...]
    read: Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One column of the table."""

    name: str
    kind: Kind
    metric: str
    sources: tuple[Source, ...] = ()
    folder: str | None = None  # of lm-eval's tasks; None: defined here
    definition: str | None = None  # lm-eval's name, where it is not ours
    filter: str = "none"
    shots: int = 0
    max_new_tokens: int | None = None  # None: lm-eval's
    chat: bool = False  # in the model's chat template, where it has one
    runs_code: bool = False

    @property
    def lm_eval_name(self) -> str:
        return self.definition or self.name


def _jsonl(name: str, task: str, split: str, *keys: str) -> Source:
    return Source((f"{name}.jsonl",), local.hub_rows(task, split, *keys))


def _choice(name: str, folder: str, metric: str, *sources: Source) -> TaskSpec:
    return TaskSpec(name=name, kind="likelihood", metric=metric, folder=folder, sources=sources)


def _arc(name: str) -> TaskSpec:
    foundry = local.converted(name, "test", local.arc_row, "query", "choices", "gold")
    return _choice(
        name,
        "arc",
        "acc_norm",
        _jsonl(name, name, "test", "question", "choices", "answerKey"),
        Source((f"llmfoundry_{name}.jsonl",), foundry),
    )


def _extraction(name: str, folder: str, definition: str) -> TaskSpec:
    return TaskSpec(
        name=name,
        kind="generation",
        metric="contains",
        folder=folder,
        definition=definition,
        max_new_tokens=48,
        sources=(_jsonl(name, definition, "validation", "text", "value"),),
    )


COMMONSENSE = ("hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande")
GROUPS: dict[str, tuple[str, ...]] = {
    "paper-general": (*COMMONSENSE, "mmlu", "gsm8k", "fda", "swde", "squad"),
    "paper-reasoning": (
        *("gpqa_diamond", "mmlu", "gsm8k", "math500", "aime25", "humaneval", "livecodebench"),
    ),
    "niah": ("niah_single_1", "niah_single_2", "niah_single_3"),
}
SPECS = (
    _choice(
        "hellaswag",
        "hellaswag",
        "acc_norm",
        _jsonl("hellaswag", "hellaswag", "validation", "activity_label", "endings", "label"),
        Source(("hellaswag_val_full.txt.bz2",), local.hellaswag_text),
        Source(("hellaswag_val_full.txt",), local.hellaswag_text),
    ),
    _choice(
        "piqa",
        "piqa",
        "acc_norm",
        _jsonl("piqa", "piqa", "validation", "goal", "sol1", "sol2", "label"),
        Source(
            ("llmfoundry_piqa.jsonl",),
            local.converted("piqa", "validation", local.piqa_row, "query", "choices", "gold"),
        ),
    ),
    _arc("arc_easy"),
    _arc("arc_challenge"),
    _choice(
        "winogrande",
        "winogrande",
        "acc",
        _jsonl("winogrande", "winogrande", "validation", "sentence", "option1", "answer"),
        Source(
            ("llmfoundry_winogrande.jsonl",),
            local.converted(
                *("winogrande", "validation", local.winogrande_row),
                *("context_options", "continuation", "gold"),
            ),
        ),
    ),
    TaskSpec(
        name="mmlu",
        kind="likelihood",
        metric="acc",
        folder="mmlu/default",
        shots=5,
        sources=(Source(("mmlu.zip",), local.mmlu_zip),),
    ),
    TaskSpec(
        name="gsm8k",
        kind="generation",
        metric="exact_match",
        filter="strict-match",
        folder="gsm8k",
        shots=5,
        max_new_tokens=256,
        sources=(Source(("gsm8k_test.jsonl", "gsm8k_train.jsonl"), local.gsm8k),),
    ),
    _extraction("fda", "fda", "fda"),
    _extraction("swde", "swde", "swde"),
    _extraction("squad", "squad_completion", "squad_completion"),
    TaskSpec(
        name="gpqa_diamond",
        kind="likelihood",
        metric="acc",
        folder="gpqa/zeroshot",
        definition="gpqa_diamond_zeroshot",
        sources=(
            Source(("gpqa_diamond.csv",), local.gpqa_csv),
            _jsonl("gpqa_diamond", "gpqa_diamond_zeroshot", "train", "Question", "Correct Answer"),
        ),
    ),
    TaskSpec(
        name="math500",
        kind="generation",
        metric="math_verify",
        folder="minerva_math",
        definition="minerva_math500",
        shots=4,
        max_new_tokens=1024,
        sources=(_jsonl("math500", "minerva_math500", "test", "problem", "solution", "answer"),),
    ),
    TaskSpec(
        name="aime25",
        kind="generation",
        metric="exact_match",
        folder="aime",
        max_new_tokens=32768,
        chat=True,
        sources=(_jsonl("aime25", "aime25", "test", "problem", "answer"),),
    ),
    TaskSpec(
        name="humaneval",
        kind="generation",
        metric="pass_at_1",
        max_new_tokens=1024,
        runs_code=True,
        sources=tuple(
            Source((name,), local.hub_rows("humaneval", "test", "prompt", "test", "entry_point"))
            for name in ("HumanEval.jsonl.gz", "HumanEval.jsonl", "humaneval.jsonl")
        ),
    ),
    TaskSpec(
        name="livecodebench",
        kind="generation",
        metric="pass_at_1",
        max_new_tokens=2000,
        chat=True,
        runs_code=True,
        sources=(
            Source(
                ("livecodebench.jsonl",),
                local.converted(
                    *("livecodebench", "test", local.livecodebench_row),
                    *("question_content", "public_test_cases", "private_test_cases"),
                ),
            ),
        ),
    ),
    *(
        TaskSpec(name=name, kind="generation", metric="recalled", max_new_tokens=NEEDLE_TOKENS)
        for name in GROUPS["niah"]
    ),
)
BY_NAME = {spec.name: spec for spec in SPECS}


class Asked(NamedTuple):
    """One task as it was asked for; `length` is that of a needle test, in tokens."""

    spec: TaskSpec
    length: int | None = None

    @property
    def label(self) -> str:
        return self.spec.name if self.length is None else f"{self.spec.name}@{self.length}"


def asked_tasks(names: tuple[str, ...], default_length: int) -> list[Asked]:
    """Names, groups, and needle tests at a length (`niah@2048`), each task once, in order."""
    found: dict[str, Asked] = {}
    for name in names:
        bare, at, text = name.partition("@")
        members = GROUPS.get(bare, (bare,))
        allowed = ", ".join((*GROUPS, *BY_NAME))
        require(
            all(member in BY_NAME for member in members),
            f"unknown task {name!r}: choose from {allowed}",
            UsageError,
        )
        needles = bare.startswith("niah")
        number = text.isascii() and text.isdigit() and 0 < len(text) <= 9
        require(
            not at or (needles and number),
            f"task {name!r}: only needle tests take a length in tokens, such as niah@4096",
            UsageError,
        )
        length = (int(text) if at else default_length) if needles else None
        for member in members:
            asked = Asked(BY_NAME[member], length)
            found.setdefault(asked.label, asked)
    return list(found.values())
