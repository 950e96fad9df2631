"""Writes the tables of docs/evaluation.md: `python docs/make_evaluation.py`.

Tasks come from tasks/registry.py, scores from the newest benchmarks/results/tasks_nano_* and
tasks_vllm_*.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markers import replace_in, replace_part

from quantmla.tasks.registry import GROUPS, SPECS, TaskSpec

PAGE = Path(__file__).with_name("evaluation.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SCRIPTED = """Tests run lm-eval's model and vLLM's own arguments, model configs and sampling \
parameters with a script in place of the engine, and compare
prompts and scores with the other way"""
ON_GPU = """    python benchmarks/eval_vllm.py --data DIR --work DIR

ran both engines on a GPU beside transformers: nano in DeepSeek's latent width \
(`benchmarks/wide_nano.py`, the same function), since vLLM's
own cache takes no other. vLLM computes in bf16, transformers in float32: texts part where two \
tokens are nearly as likely."""


def _task(spec: TaskSpec) -> str:
    groups = ", ".join(name for name, members in GROUPS.items() if spec.name in members)
    where = "quantmla" if spec.folder is None else f"lm-eval `{spec.lm_eval_name}`"
    metric = spec.metric if spec.filter == "none" else f"{spec.metric}, {spec.filter}"
    files = ", ".join(f"`{source.files[0]}`" for source in spec.sources) or "made"
    new = "-" if spec.max_new_tokens is None else f"{spec.max_new_tokens:,}"
    return f"| {spec.name} | {groups} | {where} | {spec.shots} | {metric} | {new} | {files} |"


def tasks() -> str:
    """One line for each task."""
    head = "| task | group | definition | shots | metric | new tokens | file in DIR |"
    return "\n".join([head, "|---|---|---|---:|---|---:|---|", *map(_task, SPECS)])


def _cell(result: Mapping[str, Any]) -> str:
    error = result["stderr"]
    return f"{result['score']:.1%}" + ("" if error is None else f" ± {error:.1%}")


def scores(document: Mapping[str, Any]) -> str:
    """Tasks down, variants across, with the paired difference of the last to bf16."""
    names = [variant["name"] for variant in document["variants"]]
    formats = [variant["format"].upper() for variant in document["variants"]]
    found = {(r["task"], r["variant"]): r for r in document["results"]}
    pairs = {(c["task"], c["a"], c["b"]): c for c in document["comparisons"]}
    heads = [
        name if name.upper() == fmt else f"{name} {fmt}"
        for name, fmt in zip(names, formats, strict=True)
    ]
    lines = [
        f"| task | items | {' | '.join(heads)} | right alone | p |",
        f"|---|---:|{'---:|' * len(heads)}---:|---:|",
    ]
    for task in document["tasks"]:
        name = task["name"]
        pair = pairs[name, names[0], names[-1]]
        alone = "-" if pair["only_a"] is None else f"{pair['only_a']} / {pair['only_b']}"
        cells = [_cell(found[name, variant]) for variant in names]
        lines.append(
            f"| {name} | {task['items']} | {' | '.join(cells)} | {alone} | {pair['p']:.2g} |"
        )
    return "\n".join([*lines, "", _machine(document)])


def _machine(document: Mapping[str, Any]) -> str:
    header = document["header"]
    versions: Sequence[str] = [
        f"{name} {header['versions'][name]}" for name in ("torch", "transformers", "lm_eval")
    ]
    where = ", ".join(header["gpus"]) or f"a CPU ({header['processor']})"
    most = {t["max_new_tokens"] for t in document["tasks"] if t["max_new_tokens"] is not None}
    return (
        f"± is the standard error, *right alone* the items that only bf16 and only the last got "
        f"right, p McNemar's. At most {max(most, default=0)} new tokens; on {where}, "
        f"{', '.join(versions)}."
    )


def vllm(document: Mapping[str, Any] | None) -> str:
    """What was run of `--engine vllm`: a script in its place, and engines where there is a file."""
    if document is None:
        return f"{SCRIPTED}; **no engine was run on a GPU**."
    rows = {(row["task"], row["variant"], row["engine"]): row for row in document["rows"]}
    variants = {row["variant"]: row["format"].upper() for row in document["rows"]}
    heads = [name if name.upper() == fmt else f"{name} {fmt}" for name, fmt in variants.items()]
    titles = [f"{head}, {what}" for head in heads for what in ("transformers", "vLLM", "same")]
    lines = [
        f"| task | items | {' | '.join(titles)} |",
        f"|---|---:|{'---:|' * len(titles)}",
    ]
    for task in dict.fromkeys(row["task"] for row in document["rows"]):
        cells = []
        for variant in variants:
            theirs, ours = (rows[task, variant, engine] for engine in ("transformers", "vllm"))
            same = f"{ours['same_score']} / {ours['same_answer']}"
            cells += [_cell(theirs), _cell(ours), same]
        lines.append(f"| {task} | {ours['items']} | {' | '.join(cells)} |")
    return "\n".join([f"{SCRIPTED}.", "", ON_GPU, "", *lines, "", _engines_machine(document)])


def _engines_machine(document: Mapping[str, Any]) -> str:
    found = document["environment"]
    packages = found["packages"]
    versions = ", ".join(f"{p} {packages[p]}" for p in ("vllm", "transformers", "torch", "lm_eval"))
    most = max(row["max_new_tokens"] for row in document["rows"])
    return (
        f"*same* counts the items on which both engines score the same, and those on which they "
        f"write the same text. At most {most} new tokens; on one {found['gpu']}, {versions}."
    )


def newest(what: str) -> Mapping[str, Any] | None:
    """The latest published run of a kind, if there is one."""
    found = sorted(RESULTS.glob(f"tasks_{what}_*.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def render() -> str:
    """The whole file as it should be."""
    text = replace_part(PAGE, "tasks", tasks())
    text = replace_in(text, "vllm", vllm(newest("vllm")))
    run = newest("nano")
    return text if run is None else replace_in(text, "nano", scores(run))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
