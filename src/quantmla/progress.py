"""A progress bar with the remaining time on stderr; silent where stderr is no terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[str, int, int], None]  # stage, done, in all


@contextmanager
def bars(show: bool) -> Iterator[Report]:
    """One bar per stage, each drawn as it is first heard of."""
    console = Console(stderr=True)
    if not show or not console.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, int] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield report


def say(message: str, show: bool) -> None:
    """One line on stderr."""
    if show:
        print(message, file=sys.stderr, flush=True)
