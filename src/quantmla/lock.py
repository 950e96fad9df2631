"""One run at a time in a work folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quantmla.errors import QuantMLAError, UsageError


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Makes `folder` and locks it; one that is still empty at the end is removed.

    The system releases the lock of a killed process. Raises UsageError where another run has the
    folder, QuantMLAError where it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise QuantMLAError(f"cannot use {folder} as work folder: {error.strerror}") from error
    try:
        _lock(descriptor, folder)
        try:
            yield
        finally:
            with suppress(OSError):  # not empty, or gone
                folder.rmdir()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"another run is using {folder}: wait for its end, or choose another output folder"
        ) from None
    except OSError:  # a file system without locks: then nobody can be told of us
        return
