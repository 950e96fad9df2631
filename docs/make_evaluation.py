"""Writes the tables of docs/evaluation.md: `python docs/make_evaluation.py`.

Tasks come from tasks/registry.py, nano's scores from the newest benchmarks/results/tasks_nano_*.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markers import replace_part

from quantmla.tasks.registry import GROUPS, SPECS, TaskSpec

PAGE = Path(__file__).with_name("evaluation.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


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


def newest() -> Mapping[str, Any] | None:
    """The latest published run, if there is one."""
    found = sorted(RESULTS.glob("tasks_nano_*.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def render() -> str:
    """The whole file as it should be."""
    text = replace_part(PAGE, "tasks", tasks())
    run = newest()
    if run is None:
        return text
    start, end = "<!-- nano: generated -->\n", "<!-- end of nano -->\n"
    before, rest = text.split(start)
    return before + start + scores(run) + "\n" + end + rest.split(end)[1]


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
