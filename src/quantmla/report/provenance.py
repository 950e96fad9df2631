"""How a figure came about: of how much, by what, on which machine, with which versions."""

from collections.abc import Iterable, Mapping
from typing import Any

from quantmla.report.collect import Record
from quantmla.report.markup import Markup, el

SIMULATED = "simulated: every position as if decoded through the quantised cache, teacher-forced"
SCORED = "scored texts: simulated as if decoded through the quantised cache, teacher-forced"
WRITTEN = "answers: decoded through the quantised cache in torch, no native kernel"
SERVED = "answers: decoded by vLLM with native kernels over packed pages"
NATIVE = "native kernels over packed pages"
LEARNED = "fake-quantised on held-out calibration text, each path alone, nothing in bf16"
COMPUTED = "computed from the page layout"
STUDIED = "fake-quantised captured activations, float32"
SHOWN = ("quantmla", "torch", "transformers", "triton", "vllm", "lm_eval")


def measured(record: Record, kind: str, **facts: Any) -> dict[str, Any]:
    """For report.json: `kind` says fake-quantised or native; facts such as n, seeds, repeats."""
    data = record.data if isinstance(record.data, Mapping) else {}
    header = data.get("header") or data.get("environment") or {}
    return {
        "file": record.name,
        "kind": kind,
        "machine": machine(header),
        "versions": versions(header),
        **{name: value for name, value in facts.items() if value is not None},
    }


def answered(settings: Mapping[str, Any], tasks: Iterable[Mapping[str, Any]]) -> str:
    """What `kind` is for tasks: it depends on the engine, and on whether answers are written."""
    if settings.get("engine") == "vllm":
        return SERVED
    kinds = {task.get("kind") for task in tasks}
    parts = (("likelihood", SCORED), ("generation", WRITTEN))
    return "; ".join(words for kind, words in parts if kind in kinds or None in kinds)


def machine(header: Mapping[str, Any]) -> str | None:
    """A GPU, or a CPU by its kind; None where it was not recorded."""
    found = header.get("gpus") or ([header["gpu"]] if header.get("gpu") else [])
    if found:
        driver = f", driver {header['driver']}" if header.get("driver") else ""
        return ", ".join(map(str, found)) + driver
    if not header:
        return None
    return f"CPU {header.get('processor') or header.get('machine') or ''}".strip()


def versions(header: Mapping[str, Any]) -> dict[str, str]:
    found = {**(header.get("versions") or {}), **(header.get("packages") or {})}
    found |= {"quantmla": header["quantmla"]} if "quantmla" in header else {}
    return {name: str(found[name]) for name in SHOWN if found.get(name)}


def how(*sources: Mapping[str, Any]) -> Markup:
    """The small print under a figure or table."""
    return el("p", " · ".join(_words(source) for source in sources), class_="how")


def _words(source: Mapping[str, Any]) -> str:
    parts = [str(source["kind"])]
    if source["kind"] == COMPUTED:  # the same on every machine
        return f"{COMPUTED}; {source['file']}"
    if source.get("n") is not None:
        parts.append(f"{source['n']:,} {source.get('of', 'samples')}")
    if source.get("seeds") is not None:
        parts.append("1 seed" if source["seeds"] == 1 else f"{source['seeds']} seeds")
    repeats = source.get("repeats")
    parts.append("single run" if repeats in (None, 1) else f"{repeats} repeats")
    parts.append(source["machine"] or "machine not recorded")
    parts += [f"{name} {value}" for name, value in source["versions"].items()]
    parts.append(str(source["file"]))
    return "; ".join(parts)
