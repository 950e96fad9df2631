"""lm-eval's task objects, with data from a folder or from the hub."""

import contextlib
import hashlib
import importlib
import io
import logging
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quantmla.errors import QuantMLAError, UsageError, require
from quantmla.tasks.definitions import definition
from quantmla.tasks.local_data import Data, Splits
from quantmla.tasks.needles import COUNT, needle_rows
from quantmla.tasks.registry import Asked, Source, TaskSpec

SHOT_SPLITS = ("training_split", "validation_split", "fewshot_split")


class Origin(NamedTuple):
    """Where a task's data come from."""

    name: str
    sha256: str | None = None


class Built(NamedTuple):
    """One asked task: lm-eval's tasks that make it up, by name, and what they are made from."""

    asked: Asked
    parts: dict[str, Any]
    origin: Origin
    shots_from: str | None

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(task.eval_docs) for name, task in self.parts.items()}


def find_source(spec: TaskSpec, folder: Path) -> tuple[Source, list[Path]]:
    """The first source that the folder has, with its files. Raises UsageError naming them all."""
    for source in spec.sources:
        paths = [folder / name for name in source.files if (folder / name).is_file()]
        if (folder / source.files[0]).is_file():
            return source, paths
    names = " or ".join(source.files[0] for source in spec.sources)
    raise UsageError(
        f"no data for task {spec.name} in {folder}: it needs {names}; add the file, or leave the "
        "task out of --tasks"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of lm-eval and datasets, which are for those who call them."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """`quiet`, and without their progress bars."""
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _same_random(seed: int) -> Iterator[None]:
    """lm-eval shuffles answers by the process's generator; afterwards it is as it was."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def settle(task: Any) -> None:
    """Has a task's documents made now, once: lm-eval makes them anew whenever it looks."""
    docs = task.eval_docs
    split = task.config.test_split if task.has_test_docs() else task.config.validation_split
    task.dataset = {**task.dataset, split or "validation": docs}
    task.config.process_docs = None


def build_task(asked: Asked, folder: Path | None, tokenizer: Any, limit: int | None) -> Built:
    """The task's objects; the same items, shots and order whenever the data are the same."""
    with _same_random(0), silent():
        built = _built(asked, folder, tokenizer, limit)
        for task in built.parts.values():
            settle(task)
    return built


def _built(asked: Asked, folder: Path | None, tokenizer: Any, limit: int | None) -> Built:
    spec = asked.spec
    if asked.length is not None:
        count = COUNT if limit is None else min(limit, COUNT)
        rows = needle_rows(spec.name, tokenizer, length=asked.length, count=count, seed=0)
        parts = _own(spec, {spec.name: {"test": rows}})
        return Built(asked, parts, Origin("generated from the packaged held-out text"), None)
    if folder is None:
        parts = _from_hub(spec)
        shots_from = "hub" if spec.shots else None
        return Built(asked, parts, Origin(_hub_name(parts)), shots_from)
    source, paths = find_source(spec, folder)
    data = source.read(paths)
    parts = _own(spec, data) if spec.folder is None else _theirs(spec, data)
    splits = next(iter(data.values()))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    origin = Origin(" + ".join(path.name for path in paths), digest)
    return Built(asked, parts, origin, _shots_from(spec, splits))


def _shots_from(spec: TaskSpec, splits: Splits) -> str | None:
    if spec.shots == 0:
        return None
    if spec.name == "math500":
        return "lm-eval"
    return next((name for name in ("train", "dev") if name in splits), "test, other items")


def _dataset(splits: Splits, **_: Any) -> dict[str, Any]:
    import datasets

    return {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}


def _own(spec: TaskSpec, data: Data) -> dict[str, Any]:
    from lm_eval.api.task import ConfigurableTask

    config = definition(spec) | {"custom_dataset": partial(_dataset, data[spec.name])}
    return {spec.name: ConfigurableTask(config=config)}


def _task_folder(spec: TaskSpec) -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent / str(spec.folder)


def _theirs(spec: TaskSpec, data: Data) -> dict[str, Any]:
    """lm-eval's definitions, with rows of ours in place of the hub's."""
    from lm_eval.tasks import TaskManager

    if spec.metric == "contains":
        return {name: _extraction(spec, splits) for name, splits in data.items()}
    manager = TaskManager(include_path=[_task_folder(spec)], include_defaults=False)
    wanted = [_overrides(spec, name, splits) for name, splits in data.items()]
    unknown = [over["task"] for over in wanted if over["task"] not in manager.all_tasks]
    require(not unknown, f"lm-eval has no tasks {unknown}, which the data of {spec.name} name")
    tasks: dict[str, Any] = manager.load({"group": spec.name, "task": wanted})["tasks"]
    return tasks


def _overrides(spec: TaskSpec, name: str, splits: Splits) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "task": name,
        "custom_dataset": partial(_dataset, splits),
        "num_fewshot": spec.shots,
    }
    if "train" not in splits:
        changes["training_split"] = None
        if spec.name == "gsm8k":
            changes["fewshot_split"] = "test"
    if spec.folder == "arc":
        changes["validation_split"] = None
    return changes


def _extraction(spec: TaskSpec, splits: Splits) -> Any:
    """lm-eval defines these by classes that take no configuration."""
    module = importlib.import_module(f"lm_eval.tasks.{spec.folder}.task")
    name = {"squad_completion": "SQUADCompletion"}.get(str(spec.folder), spec.name.upper())
    parent = getattr(module, name)

    def download(self: Any, *_: Any, **__: Any) -> None:
        self.dataset = _dataset(splits)

    task = type(name, (parent,), {"download": download})()
    task.config.task = spec.lm_eval_name
    return task


def _from_hub(spec: TaskSpec) -> dict[str, Any]:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    try:
        if spec.folder is None:
            return {spec.name: ConfigurableTask(config=definition(spec))}
        manager = TaskManager(include_path=[_task_folder(spec)], include_defaults=False)
        tasks: dict[str, Any] = manager.load([spec.lm_eval_name])["tasks"]
    except (OSError, ValueError, RuntimeError) as error:
        raise QuantMLAError(
            f"the data of task {spec.name} cannot be had from the hub ({_short(error)}): give a "
            f"folder with {' or '.join(source.files[0] for source in spec.sources)} as --data"
        ) from error
    for task in tasks.values():
        task.set_config(key="num_fewshot", value=spec.shots)
    return tasks


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _hub_name(parts: dict[str, Any]) -> str:
    return f"hub: {next(iter(parts.values())).DATASET_PATH}"
