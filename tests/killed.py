"""A kill before any one of the operations that change files, as SIGKILL would leave them."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Killed(BaseException):
    """No handler of the code takes it; whatever it then tries to clean up fails, too."""


class _Killer:
    """Lives as long as the process, as audit hooks do; does nothing unless it is watching."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.left = 0
        self.dead = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or not self._changes(event, arguments):
            return
        if self.dead or self.left == 0:
            self.dead = True
            raise Killed
        self.left -= 1

    def _changes(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            if not isinstance(arguments[2], int) or not arguments[2] & WRITING:
                return False
        elif event not in CHANGES:
            return False
        name = arguments[0]
        return isinstance(name, str | os.PathLike) and os.fspath(name).startswith(str(self.folder))


_killer = _Killer()
_hooked: list[_Killer] = []


def killed_before(change: int, under: Path, run: Callable[[], Any]) -> bool:
    """Runs until that change, counted from 0, of a path that begins with `under`.

    False where there are fewer, and `run` came to its end.
    """
    if not _hooked:
        sys.addaudithook(_killer)
        _hooked.append(_killer)
    _killer.folder, _killer.left, _killer.dead = str(under), change, False
    try:
        run()
    except Killed:
        return True
    finally:
        _killer.folder = None
    return False
