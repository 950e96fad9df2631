"""A run folder: tasks.json, which others read, and the items that resuming goes by.

`RUN/items/VARIANT/TASK.json` holds one task through one variant; `RUN/tasks.json` is made from all
of them and written anew after each, whole or not at all.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantmla.errors import QuantMLAError, UsageError, require
from quantmla.tasks.registry import COMMONSENSE, GROUPS
from quantmla.tasks.statistics import compare, mean

SCHEMA, VERSION = "quantmla-tasks", 1
FILE = "tasks.json"
BASELINE = "bf16"
SAME_TO_RESUME = ("model", "settings", "variants")
Document = dict[str, Any]
KEYS = {  # of tasks.json, and what is there; the lists are of objects
    "header": dict,
    "model": dict,
    "settings": dict,
    "variants": list,
    "tasks": list,
    "results": list,
    "complete": bool,
}


def item_path(folder: Path, variant: str, task: str) -> Path:
    return folder / "items" / variant / f"{task}.json"


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read_json(path: Path) -> Document:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise QuantMLAError(f"{path} cannot be read: {error}") from None
    require(isinstance(found, dict), f"{path} is no JSON object")
    assert isinstance(found, dict)
    return found


def _are_objects(found: Any, **kinds: type | tuple[type, ...]) -> bool:
    """Whether that is a list of objects which have those keys, with values of those kinds."""
    return isinstance(found, list) and all(
        isinstance(entry, dict)
        and all(isinstance(entry.get(key), wanted) for key, wanted in kinds.items())
        for entry in found
    )


def read_run(folder: Path | str) -> Document:
    """What tasks.json of a run folder holds.

    Raises UsageError where there is none, QuantMLAError where it is damaged, of another version or
    without any result.
    """
    path = Path(folder) / FILE
    require(
        path.is_file(), f"{folder} is not a run of `eval --tasks`: it has no {FILE}", UsageError
    )
    found = _read_json(path)
    kind, version = found.get("schema"), found.get("version")
    require(kind == SCHEMA, f"{path} has schema {kind!r}, not {SCHEMA!r}")
    require(
        version == VERSION,
        f"{path} has version {version!r}, not {VERSION}, the one this release reads",
    )
    missing = [key for key in KEYS if key not in found]
    require(not missing, f"{path} is damaged: it lacks {', '.join(missing)}")
    other = [
        key
        for key, kind in KEYS.items()
        if not (_are_objects(found[key]) if kind is list else isinstance(found[key], kind))
    ]
    require(not other, f"{path} is damaged: it has something else under {', '.join(other)}")
    require(bool(found["results"]), f"{folder} is an empty run: no task has been finished in it")
    return found


def start_run(folder: Path, document: Document, resume: bool) -> Document:
    """The document to go on from: an earlier run's when resuming, else the new one.

    Raises UsageError where the folder is taken, or where the earlier run is of something else.
    """
    path = folder / FILE
    if not path.is_file():
        empty = not folder.exists() or (folder.is_dir() and all(map(_is_draft, folder.iterdir())))
        require(empty, f"{folder} exists and is not a run of `eval --tasks`", UsageError)
        return document
    require(
        resume, f"{folder} holds a run: go on with --resume, or name another folder", UsageError
    )
    earlier = _read_json(path)
    same = (earlier.get("schema"), earlier.get("version")) == (SCHEMA, VERSION)
    require(same, f"{path} was written by another version: name another folder", UsageError)
    header, tasks = earlier.get("header"), earlier.get("tasks")
    require(
        isinstance(header, dict) and _are_objects(tasks, name=str, metric=str),
        f"{path} is damaged: its header or its tasks are none; name another folder",
    )
    assert isinstance(header, dict)
    differ = [key for key in SAME_TO_RESUME if earlier.get(key) != document[key]]
    versions = header.get("versions")
    differ += ["versions"] if versions != document["header"]["versions"] else []
    require(
        not differ,
        f"{folder} holds a run with other {', '.join(differ)}: name another folder",
        UsageError,
    )
    return {**document, "tasks": tasks}


def _is_draft(path: Path) -> bool:
    """What `write_json` leaves of that file when it is killed."""
    return path.name.startswith(f".{FILE}.")


def finished(folder: Path, variant: str, task: Document) -> Document | None:
    """What was found of one task through one variant, if it is there and of the same task."""
    path = item_path(folder, variant, task["name"])
    if not path.is_file():
        return None
    found = _read_json(path)
    require(
        found.get("task") == task,
        f"{path} is of other data or settings of task {task['name']}: name another run folder",
        UsageError,
    )
    items, cost = found.get("items"), found.get("cost")
    require(
        _are_objects(items, score=(int, float))
        and len(items or ()) == task.get("items", len(items or ()))
        and isinstance(cost, dict)
        and set(cost) <= {"seconds", "truncated", "cache_bytes"},
        f"{path} is damaged: remove this file to run the task again with --resume",
    )
    return found


def summarize(folder: Path, document: Document) -> Document:
    """The document with results, averages and comparisons of all items in the folder."""
    names = [variant["name"] for variant in document["variants"]]
    results: list[Document] = []
    comparisons: list[Document] = []
    for task in document["tasks"]:
        found = {name: finished(folder, name, task) for name in names}
        scores = {
            name: [item["score"] for item in part["items"]]
            for name, part in found.items()
            if part is not None
        }
        for name, values in scores.items():
            part = found[name]
            assert part is not None
            results.append(_result(task, name, values, scores.get(BASELINE)) | part["cost"])
        comparisons += _comparisons(task, scores)
    complete = len(results) == len(names) * len(document["tasks"])
    return {
        **document,
        "complete": complete,
        "results": results,
        "averages": averages(results, names),
        "comparisons": comparisons,
    }


def _result(
    task: Document, variant: str, scores: Sequence[float], baseline: Sequence[float] | None
) -> Document:
    found = mean(scores)
    reference = 0.0 if baseline is None else mean(baseline).score
    return {
        "task": task["name"],
        "variant": variant,
        "metric": task["metric"],
        "score": found.score,
        "stderr": found.stderr,
        "recovery": found.score / reference if reference else None,
        "items": len(scores),
    }


def _comparisons(task: Document, scores: Mapping[str, Sequence[float]]) -> list[Document]:
    names = list(scores)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return [
        {"task": task["name"], "a": a, "b": b}
        | compare(scores[a], scores[b])._asdict()
        | {"items": len(scores[a])}
        for a, b in pairs
    ]


def columns(group: str, tasks: Sequence[str]) -> dict[str, list[str]]:
    """The columns of a published table that were evaluated, and the tasks each is the mean of.

    The five commonsense tasks are one column, as published, and only where all five are there.
    """
    found: dict[str, list[str]] = {}
    if group == "niah":
        return {task: [task] for task in tasks if task.partition("@")[0] in GROUPS[group]}
    if group == "paper-general" and set(COMMONSENSE) <= set(tasks):
        found["CS"] = list(COMMONSENSE)
    members = (name for name in GROUPS[group] if name not in COMMONSENSE and name in tasks)
    return found | {name: [name] for name in members}


def averages(results: Sequence[Document], variants: Sequence[str]) -> list[Document]:
    """Means over a group's columns, for groups of which at least two columns are there."""
    score = {(r["task"], r["variant"]): r["score"] for r in results}
    found: list[Document] = []
    for group in GROUPS:
        for variant in variants:
            tasks = [task for task, name in score if name == variant]
            parts = columns(group, tasks)
            if len(parts) < 2:
                continue
            values = [
                mean([score[task, variant] for task in members]).score for members in parts.values()
            ]
            found.append(
                {
                    "group": group,
                    "variant": variant,
                    "tasks": list(parts),
                    "score": mean(values).score,
                }
            )
    base = {(a["group"], tuple(a["tasks"])): a["score"] for a in found if a["variant"] == BASELINE}
    for entry in found:
        reference = base.get((entry["group"], tuple(entry["tasks"])))
        entry["recovery"] = entry["score"] / reference if reference else None
    return found
