"""The work folder of a run that can go on after a kill: whose it is, and files that are whole.

It is known by a state file that says what the run is made from. Files are written beside their
place, flushed and renamed, so that whatever has its name is finished. A folder that is emptied
loses its state first, by a rename: at every moment its files count all, or none does.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from quantmla.errors import QuantMLAError, UsageError, require

STATE = "state.json"  # what the folder's run is
EMPTYING = "emptying.json"  # what that is called from when the folder is emptied
THREADS = "cpu_threads"  # stands there too; a run may go on with others
UNFINISHED = ".partial"


def present_part(path: Path) -> Path:
    """The path itself if it exists, else the nearest of its folders that does."""
    target = Path(os.path.realpath(path))
    return next(p for p in (target, *target.parents) if os.path.exists(p) or not p.name)


def check_makeable(path: Path, out: Path) -> None:
    """Refuses the output `out` if its folder `path` cannot be made or written to.

    A missing folder is tried out beside its place, so that nothing is left and no other run is met.
    """
    try:
        target, present = Path(os.path.realpath(path)), present_part(path)
        if path.is_symlink() and present != target:
            raise ValueError("it is a link that leads nowhere")
        if present != target:
            with tempfile.TemporaryDirectory(dir=present) as trial:
                (Path(trial) / target.relative_to(present)).mkdir(parents=True)
        elif not (target.is_dir() and os.access(target, os.W_OK | os.X_OK)):
            raise ValueError(f"{path} is no folder that may be written to")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"output {out} cannot be written: {reason}") from None


def check_file(file: Path) -> None:
    """The same of a file, which is written beside its place first."""
    trial = file.with_name(f".{file.name}.{UNFINISHED}")
    check_makeable(trial, file)
    require(not file.is_dir(), f"output {file} is a folder: name a file", UsageError)


def check_workdir(workdir: Path, fingerprint: dict[str, Any], *, resume: bool) -> None:
    """Refuses a work folder of another run, and what is no work folder."""
    if not is_workdir(workdir):
        require(
            not workdir.exists() or _is_free(workdir),
            f"{workdir} is in the way and no work folder of quantmla: move it, or choose another "
            "output",
            UsageError,
        )
        return
    require(
        resume,
        f"{workdir} holds an unfinished run: go on with --resume, or remove it",
        UsageError,
    )
    found = _read_state(workdir)
    differs = [key for key in fingerprint if found.get(key) != fingerprint[key]]
    require(
        not differs,
        f"{workdir} holds another run, with other {', '.join(differs)}: remove it to begin anew",
        UsageError,
    )


def _is_free(folder: Path) -> bool:
    """Whether nothing in a folder without a state counts: a killed run left it, or nobody did."""
    killed_early = {STATE + UNFINISHED}
    return folder.is_dir() and (
        (folder / EMPTYING).is_file() or {path.name for path in folder.iterdir()} <= killed_early
    )


def _read_state(workdir: Path) -> dict[str, Any]:
    """What the work folder's run is; a sentence where that cannot be read."""
    try:
        return dict(json.loads((workdir / STATE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise QuantMLAError(
            f"{workdir / STATE} is damaged ({error}): remove {workdir} to begin anew"
        ) from error


def begun_with(workdir: Path) -> dict[str, Any]:
    """What the work folder's run was begun with; nothing where none was."""
    return _read_state(workdir) if is_workdir(workdir) else {}


def is_workdir(folder: Path) -> bool:
    return (folder / STATE).is_file()


def mark_workdir(workdir: Path, fingerprint: dict[str, Any]) -> None:
    if not is_workdir(workdir):
        empty_workdir(workdir)  # of a killed run that was about to
        try:
            workdir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QuantMLAError(f"cannot make {workdir}: {error.strerror}") from error
        write_whole(workdir / STATE, json.dumps(fingerprint, indent=1).encode())


def write_whole(path: Path, content: bytes) -> None:
    """The file, whole or not at all."""
    part = path.with_name(path.name + UNFINISHED)
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # as after a failed write
            error.filename = str(path)
        raise


def empty_workdir(workdir: Path) -> None:
    """Drops what an interrupted or finished run left; touches no other folder."""
    if is_workdir(workdir):
        _check_inner(workdir)
        (workdir / STATE).replace(workdir / EMPTYING)
    if not (workdir / EMPTYING).is_file():
        return
    # The mark goes last: until then a killed removal is still known as ours.
    for path in sorted(workdir.iterdir(), key=lambda path: path.name == EMPTYING):
        if path.is_dir() and not path.is_symlink():
            remove_workdir(path)
        else:
            path.unlink()


def _check_inner(workdir: Path) -> None:
    """Refuses to empty a folder that holds another which no run made."""
    for path in workdir.iterdir():
        if path.is_dir() and not path.is_symlink():
            ours = is_workdir(path) or _is_free(path)
            require(ours, f"{path} is no work folder of quantmla: move it away", UsageError)


def remove_workdir(workdir: Path) -> None:
    """The same, and the folder itself; one inside another run's folder goes with it."""
    empty_workdir(workdir)
    if workdir.is_dir():
        (workdir / (STATE + UNFINISHED)).unlink(missing_ok=True)
        workdir.rmdir()
